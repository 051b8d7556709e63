"""Prompts of many kinds for the embedded model."""

from __future__ import annotations

CHAT = [
    "What is the capital of France?",
    "Explain to a child why the sky is blue.",
    "Write a short poem about autumn rain.",
    "Give me three tips for better sleep.",
    "Who wrote Romeo and Juliet?",
    "Tell me a joke about programmers.",
    "What should I cook with eggs and spinach?",
    "Summarize the plot of Cinderella in two sentences.",
    "Is it safe to eat raw potatoes?",
    "How do I politely decline an invitation?",
]
CODE = [
    "Write a Python function that reverses a string.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "SELECT name, age FROM users WHERE",
    "for (int i = 0; i < 10; i++) {\n    printf(",
    '{"name": "Alice", "age": 30, "city": "Paris"}\n{"name": "Bob", "age": 25, "city":',
    "<ul>\n  <li>one</li>\n  <li>two</li>\n  <li>",
    "import numpy as np\nimport matplotlib.pyplot as plt\n\nx = np.linspace(0, 10, 100)\n",
    "git commit -m 'fix'; git push; git commit -m",
]
COPYING = [
    "Repeat exactly: the quick brown fox jumps over the lazy dog.",
    "Repeat this line five times: All work and no play makes Jack a dull boy.",
    "Copy the text below word for word.\n\nThe mitochondria is the powerhouse of the cell. It "
    "makes energy. The mitochondria is the powerhouse of the cell. It makes energy.",
    "one two three one two three one two three one two three one two",
    "ABABABABABABABABABABABABABABABAB",
    "the the the the the the the the",
    "row, row, row your boat, gently down the stream. row, row, row your boat,",
]
LINES = [
    "The cat sat on the mat and looked at the dog in the yard.",
    "Row, row, row your boat, gently down the stream.",
    "All work and no play makes Jack a dull boy.",
    "def add(a, b): return a + b  # adds two numbers",
    "The quick brown fox jumps over the lazy dog and runs away.",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
    "She sells sea shells by the sea shore every summer morning.",
    "id: 1, name: example, status: active, owner: nobody",
]
"""Four times in a prompt, a model goes on repeating it; short, so that decoding is what counts."""
LISTS = [
    "List the days of the week.",
    "1. apple\n2. banana\n3. cherry\n4.",
    "Monday, Tuesday, Wednesday,",
    "2, 4, 6, 8, 10, 12,",
    "- milk\n- bread\n- butter\n-",
    "a) red b) green c) blue d)",
]
SCRIPTS = [
    "Bonjour, comment allez-vous aujourd'hui ?",
    "今日はとても良い天気ですね。",
    "Привет! Как дела?",
    "مرحبا، كيف حالك؟",
    "안녕하세요, 만나서 반갑습니다.",
    "नमस्ते, आप कैसे हैं?",
    "I ❤️ pizza 🍕🍕🍕 and 👩‍👩‍👧‍👦",
    "Ζεῦ πάτερ, ἀλλὰ σὺ ῥῦσαι",
]
SINGLE_TOKEN = "Hello"
LONG = "It was a bright cold day in April, and the clocks were striking thirteen. " * 94
"""About 1,500 tokens."""

PASSAGE = (
    "Once upon a time there was a little girl who lived in a village near the forest. Whenever "
    "she went out, the little girl wore a red riding cloak, so everyone in the village called "
    "her Little Red Riding Hood. One morning she asked her mother if she could visit her "
    "grandmother. "
)
COPY_TASK = 3 * PASSAGE + PASSAGE[:16]
"""A model goes on copying it."""

ALL = [*CHAT, *CODE, *COPYING, *LISTS, *SCRIPTS, SINGLE_TOKEN, LONG]
