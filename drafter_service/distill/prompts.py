"""What the target is asked, so that it shows how it answers: no data set is needed.

Five kinds of prompts are put together from parts written here, and a sixth kind is left to the
target, which then writes the question too. A prompt is a function of (seed, index). Held-out
prompts use subjects, passages and records that the others never do.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a prompt asks for."""

    CHAT = "chat"
    CODE = "code"
    EDIT = "edit"
    JSON = "json"
    PROSE = "prose"
    SELF_WRITTEN = "self-written"


ASKED_KINDS = (Kind.CHAT, Kind.CODE, Kind.EDIT, Kind.JSON, Kind.PROSE)
"""Those whose prompts are put together here."""

_SHARES = {
    Kind.SELF_WRITTEN: 25,
    Kind.CHAT: 19,
    Kind.CODE: 14,
    Kind.EDIT: 14,
    Kind.JSON: 14,
    Kind.PROSE: 14,
}
"""Percent of the prompts to learn from."""

_HELD_OUT_EVERY = 6
"""One of so many subjects, passages and so on is held out."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question."""

    kind: Kind
    text: str
    """Empty where the target is to write it."""


def training_prompt(seed: int, index: int) -> Prompt:
    """The prompt with this index."""
    rng = random.Random(f"train-{seed}-{index}")
    kind = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
    if kind is Kind.SELF_WRITTEN:
        return Prompt(kind, "")
    return Prompt(kind, _Composer(rng, held_out=False).text(kind))


def held_out_prompts(seed: int, num_per_kind: int) -> list[Prompt]:
    """Prompts of each asked kind that have nothing in common with those to learn from but their
    patterns."""
    prompts = []
    for kind in ASKED_KINDS:
        for index in range(num_per_kind):
            rng = random.Random(f"held-out-{seed}-{kind}-{index}")
            prompts.append(Prompt(kind, _Composer(rng, held_out=True).text(kind)))
    return prompts


class _Composer:
    """Puts prompts together from the parts of one side."""

    def __init__(self, rng: random.Random, *, held_out: bool) -> None:
        self._rng = rng
        self._held_out = held_out

    def text(self, kind: Kind) -> str:
        compose = {
            Kind.CHAT: self._chat,
            Kind.CODE: self._code,
            Kind.EDIT: self._edit,
            Kind.JSON: self._json,
            Kind.PROSE: self._prose,
        }
        return compose[kind]()

    def _some(self, parts: tuple[str, ...], count: int) -> list[str]:
        """Different parts of our side, fewer where there are not so many."""
        own = [p for i, p in enumerate(parts) if (i % _HELD_OUT_EVERY == 0) == self._held_out]
        return self._rng.sample(own, min(count, len(own)))

    def _one(self, parts: tuple[str, ...]) -> str:
        return self._some(parts, 1)[0]

    def _chat(self) -> str:
        return self._rng.choice(_CHAT_PATTERNS).format(
            subject=self._one(_SUBJECTS), task=self._one(_TASKS), person=self._one(_PEOPLE)
        )

    def _prose(self) -> str:
        return self._rng.choice(_PROSE_PATTERNS).format(
            subject=self._one(_SUBJECTS), place=self._one(_PLACES), person=self._one(_PEOPLE)
        )

    def _code(self) -> str:
        return self._rng.choice(_CODE_PATTERNS).format(
            function=self._one(_FUNCTIONS),
            language=self._rng.choice(_LANGUAGES),
            snippet=self._one(_SNIPPETS),
        )

    def _edit(self) -> str:
        if self._rng.random() < 0.35:
            return f"{self._rng.choice(_CODE_EDITS)}\n\n```python\n{self._one(_SNIPPETS)}\n```"
        passage = " ".join(self._some(_SENTENCES, self._rng.randint(2, 5)))
        return f"{self._rng.choice(_TEXT_EDITS)}\n\n{passage}"

    def _json(self) -> str:
        record = self._record()
        pattern = self._rng.choice(_JSON_PATTERNS)
        fields = ", ".join(record)
        prose = "; ".join(f"the {name} is {value}" for name, value in record.items())
        return pattern.format(fields=fields, prose=prose, record=json.dumps(record))

    def _record(self) -> dict[str, object]:
        rng = self._rng
        fields: dict[str, object] = {
            "name": self._one(_NAMES),
            "city": self._one(_PLACES),
            "age": rng.randint(18, 90),
            "price": round(rng.uniform(1, 500), 2),
            "quantity": rng.randint(1, 40),
            "in_stock": rng.random() < 0.5,
            "topic": self._one(_SUBJECTS),
            "date": f"20{rng.randint(10, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
            "tags": self._some(_SUBJECTS, 2),
            "profession": self._one(_PEOPLE),
        }
        chosen = rng.sample(list(fields), rng.randint(3, 6))
        return {name: fields[name] for name in chosen}


_CHAT_PATTERNS = (
    "What is {subject}?",
    "Can you explain {subject} to me?",
    "How does {subject} work?",
    "Why is {subject} important?",
    "Explain {subject} to {person}.",
    "What are the advantages and disadvantages of {subject}?",
    "Give me five facts about {subject}.",
    "What should I know about {subject} before I begin?",
    "How can I {task}?",
    "What is the best way to {task}?",
    "Give me three tips on how to {task}.",
    "I want to {task}. Where should I start?",
    "List the steps to {task}.",
    "What mistakes do people make when they {task}?",
    "I am {person} and I would like to {task}. What do you suggest?",
    "Is it difficult to {task}?",
    "What would {person} say about {subject}?",
    "Compare {subject} with something similar.",
    "Hi! Tell me something interesting about {subject}.",
    "Who are you, and can you help me to {task}?",
)

_PROSE_PATTERNS = (
    "Write a short story about {person} in {place}.",
    "Write a paragraph about {subject}.",
    "Write a poem about {subject}.",
    "Describe {place} as if you saw it for the first time.",
    "Write an essay about how {subject} changed the world.",
    "Write a letter from {person} to a friend in {place}.",
    "Tell a story in which {person} learns about {subject}.",
    "Write the beginning of a novel set in {place}.",
    "Write a newspaper article about {subject} in {place}.",
    "Write a diary entry of {person}.",
    "Describe a day in the life of {person}.",
    "Write a fable that has to do with {subject}.",
    "Write a speech that {person} gives about {subject}.",
)

_CODE_PATTERNS = (
    "Write a {language} function that {function}.",
    "Write a {language} program that {function}.",
    "Show me how to write code in {language} that {function}.",
    "Implement a function in {language} that {function}. Include an example of its use.",
    "Write a Python function that {function}, with type annotations and a docstring.",
    "Write a Python class with a method that {function}.",
    "Write unit tests for a Python function that {function}.",
    "Explain what this code does:\n\n```python\n{snippet}\n```",
    "Find the bug in this code, if there is one:\n\n```python\n{snippet}\n```",
    "What does this function return, and why?\n\n```python\n{snippet}\n```",
)

_TEXT_EDITS = (
    "Repeat the following text exactly:",
    "Copy this text without any change:",
    "Correct the grammar of the following text:",
    "Fix spelling and punctuation, and leave the rest as it is:",
    "Rewrite the following text in the past tense:",
    "Rewrite this text so that it sounds more formal:",
    "Make this text simpler, and keep its meaning:",
    "Turn the following text into a bulleted list:",
    "Summarize the following text in one sentence:",
    "Give this text a title, and then repeat it:",
    "Replace every 'the' by 'a' in this text:",
    "Put each sentence of this text on a line of its own:",
)

_CODE_EDITS = (
    "Repeat this code exactly:",
    "Add comments to this code:",
    "Add a docstring to this function and change nothing else:",
    "Add type annotations to this code:",
    "Rename the function to `process` and leave the rest as it is:",
    "Rewrite this code so that it is easier to read:",
    "Add error handling to this code:",
    "Change this code so that it also prints its result:",
)

_JSON_PATTERNS = (
    "Write a JSON object with these fields: {fields}. Use made-up values.",
    "Give me a list of three JSON objects, each with the fields {fields}.",
    "Answer in JSON only. Turn this into an object: {prose}.",
    "Extract the data as JSON with the fields {fields}: {prose}.",
    "Pretty-print this JSON:\n\n{record}",
    'Add a field "id" to this JSON object and print it:\n\n{record}',
    "Write a JSON schema for this object:\n\n{record}",
    "Return this JSON with all text in upper case:\n\n{record}",
    "Convert this JSON into YAML:\n\n{record}",
    "Write a JSON array of three objects like this one:\n\n{record}",
)

_SUBJECTS = (
    "photosynthesis",
    "the water cycle",
    "gravity",
    "machine learning",
    "the French Revolution",
    "compound interest",
    "a black hole",
    "the human heart",
    "climate change",
    "the Roman Empire",
    "electricity",
    "a healthy diet",
    "the internet",
    "democracy",
    "evolution",
    "the solar system",
    "chess",
    "a computer network",
    "vaccination",
    "the stock market",
    "jazz",
    "volcanoes",
    "renewable energy",
    "the Great Wall of China",
    "DNA",
    "a balanced budget",
    "public transport",
    "the Renaissance",
    "bees",
    "quantum mechanics",
    "the ocean",
    "meditation",
    "a database",
    "the immune system",
    "inflation",
    "friendship",
    "the printing press",
    "rain forests",
    "object-oriented programming",
    "sleep",
    "the Silk Road",
    "time management",
    "earthquakes",
    "photography",
    "the scientific method",
    "music theory",
    "recycling",
    "space travel",
    "the periodic table",
    "bread",
    "probability",
    "migration of birds",
    "cloud computing",
    "the Cold War",
    "courage",
    "a compiler",
    "coffee",
    "artificial intelligence",
    "the moon",
    "urban planning",
    "glaciers",
    "open-source software",
    "ancient Egypt",
    "teamwork",
    "a microscope",
    "the Industrial Revolution",
    "plate tectonics",
    "human rights",
    "antibiotics",
    "cycling",
    "encryption",
    "winter",
)

_TASKS = (
    "learn a new language",
    "improve my writing",
    "bake bread at home",
    "prepare for a job interview",
    "sleep better",
    "save money every month",
    "grow tomatoes on a balcony",
    "write a good resume",
    "stay focused while studying",
    "start running",
    "plan a trip to another country",
    "learn to play the guitar",
    "make new friends in a new city",
    "build a simple website",
    "reduce stress at work",
    "teach a child to read",
    "clean a bicycle chain",
    "cook rice",
    "give a presentation",
    "remember names",
    "organize my desk",
    "repair a leaking tap",
    "read more books",
    "learn to swim",
    "write a thank-you note",
    "set up a home office",
    "use less plastic",
    "train a puppy",
    "learn Python",
    "make a budget",
    "solve a quadratic equation",
    "choose a laptop",
    "paint a room",
    "start a small business",
    "drink more water",
    "take better photographs",
    "negotiate a salary",
    "keep a diary",
    "learn to draw",
    "host a dinner for six people",
)

_PEOPLE = (
    "a teacher",
    "a retired sailor",
    "a ten-year-old child",
    "a young scientist",
    "an old farmer",
    "a nurse",
    "a detective",
    "a student",
    "a lighthouse keeper",
    "a software engineer",
    "a baker",
    "a lonely robot",
    "a musician",
    "a mountain guide",
    "a librarian",
    "a carpenter",
    "an astronaut",
    "a painter",
    "a doctor",
    "a taxi driver",
    "a journalist",
    "a beginner",
    "a grandmother",
    "a clockmaker",
)

_PLACES = (
    "Paris",
    "a small village by the sea",
    "Tokyo",
    "the Sahara desert",
    "an old library",
    "New York",
    "a forest in autumn",
    "Nairobi",
    "a railway station at night",
    "London",
    "the Alps",
    "a busy market",
    "Mexico City",
    "an island without people",
    "Cairo",
    "a space station",
    "Rome",
    "a quiet street after rain",
    "Sydney",
    "a castle on a hill",
    "Berlin",
    "a garden in spring",
    "Lima",
    "Istanbul",
)

_NAMES = (
    "Alice Johnson",
    "Miguel Torres",
    "Sara Lind",
    "John Smith",
    "Priya Sharma",
    "Chen Wei",
    "Emma Brown",
    "Omar Haddad",
    "Julia Novak",
    "David Kim",
    "Fatima Noor",
    "Lucas Martin",
    "Maria Rossi",
    "Peter Olsen",
    "Aisha Bello",
    "Thomas Weber",
    "Nina Petrova",
    "James Carter",
)

_LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Go", "SQL")

_FUNCTIONS = (
    "reverses a string",
    "checks whether a number is prime",
    "computes the factorial of a number",
    "finds the largest element of a list",
    "sorts a list of numbers with bubble sort",
    "counts the words of a text",
    "reads a CSV file and prints its rows",
    "returns the first n Fibonacci numbers",
    "checks whether a string is a palindrome",
    "removes duplicates from a list",
    "merges two sorted lists",
    "computes the average of a list of numbers",
    "converts Celsius to Fahrenheit",
    "implements binary search",
    "counts how often each character occurs",
    "finds the greatest common divisor of two numbers",
    "validates an email address",
    "flattens a nested list",
    "implements a stack",
    "generates a random password",
    "transposes a matrix",
    "finds all anagrams in a list of words",
    "adds two matrices",
    "parses a date and returns the day of the week",
    "implements a queue with two stacks",
    "computes the sum of the digits of a number",
    "downloads a web page and counts its links",
    "finds the second largest number of a list",
    "rotates a list by k places",
    "prints a multiplication table",
    "checks whether two strings are anagrams",
    "implements a simple calculator",
    "inserts a node into a linked list",
    "traverses a binary tree in order",
    "writes a dictionary to a JSON file",
    "computes the distance between two points",
    "filters the even numbers of a list",
    "capitalizes each word of a sentence",
    "counts the vowels of a string",
    "finds the longest word of a text",
    "groups a list of people by city",
    "computes compound interest",
)

_SENTENCES = (
    "The old clock in the hall struck nine, and nobody moved.",
    "Our team meets every Monday to talk about the plans for the week.",
    "Water freezes at zero degrees Celsius and boils at one hundred.",
    "She dont like when the train are late.",
    "The library opens at eight and closes at six, except on Sundays.",
    "Please send the report to the office before the end of the day.",
    "He have visited three countries last year, and he liked all of them.",
    "The new bridge connects the two halves of the city.",
    "Most plants need light, water and air to grow.",
    "The museum was full of visitor who wanted to see the paintings.",
    "In the evening the children played football behind the school.",
    "The price of bread rose by ten percent during the winter.",
    "I has been working on this project since two years.",
    "A good night's sleep is as important as a good breakfast.",
    "The river flows through the valley and into the sea.",
    "Many people prefers to read books on paper.",
    "The company announced that it will open two new offices next year.",
    "Birds fly south when the days grow short.",
    "The doctor told him to rest and to drink a lot of water.",
    "They was going to the market when it begun to rain.",
    "The conference takes place in the main hall on the second floor.",
    "A recipe is easy to follow when its steps are short.",
    "The mountain was covered with snow until late in May.",
    "My brother and me goes fishing every weekend.",
    "The teacher explained the lesson twice, because it was difficult.",
    "Solar panels turn sunlight into electricity.",
    "The package arrived on Tuesday, two days later than expected.",
    "Each student must bring a pencil, a ruler and a notebook.",
    "The results shows that the medicine work well.",
    "The bakery on the corner sells fresh rolls every morning.",
    "The software was updated last night to fix a serious problem.",
    "There is many reasons to learn another language.",
    "The garden is small, but it has an apple tree and a bench.",
    "The meeting has been moved from Thursday to Friday.",
    "A sharp knife is safer than a dull one.",
    "The committee could not agree on a date for the next election.",
    "The sky turned dark, and the first drops fell on the dusty road.",
    "Customers who order before noon receive their goods the same day.",
    "The dog chased it's tail around the yard.",
    "The scientists measured the temperature every hour for a month.",
    "Travel by rail is often faster than travel by road.",
    "The committee have decided to postponed the event.",
    "She wrote three letters and posted them on her way to work.",
    "The lake is deep, cold and very clear.",
    "Every machine in this workshop is cleaned once a week.",
    "Less people came to the concert then we had hoped.",
    "The author lives in a quiet town near the coast.",
    "Honey keeps for years if it is stored in a dry place.",
)

_SNIPPETS = (
    "def add(a, b):\n    return a + b",
    "def is_even(n):\n    return n % 2 == 0",
    "def greet(name):\n    message = 'Hello, ' + name\n    return message",
    "def total(prices):\n    result = 0\n    for price in prices:\n        result += price\n"
    "    return result",
    "def find_max(numbers):\n    largest = numbers[0]\n    for number in numbers:\n"
    "        if number > largest:\n            largest = number\n    return largest",
    "def count_words(text):\n    counts = {}\n    for word in text.split():\n"
    "        counts[word] = counts.get(word, 0) + 1\n    return counts",
    "def factorial(n):\n    if n == 0:\n        return 1\n    return n * factorial(n - 1)",
    "def read_lines(path):\n    with open(path) as file:\n        return file.readlines()",
    "def average(values):\n    return sum(values) / len(values)",
    "def reverse(items):\n    result = []\n    for item in items:\n        result.insert(0, item)\n"
    "    return result",
    "class Counter:\n    def __init__(self):\n        self.value = 0\n\n"
    "    def increment(self):\n        self.value += 1",
    "def squares(n):\n    return [i * i for i in range(n)]",
    "def contains(items, wanted):\n    for item in items:\n        if item == wanted:\n"
    "            return True\n    return False",
    "class Account:\n    def __init__(self, owner, balance=0):\n        self.owner = owner\n"
    "        self.balance = balance\n\n    def deposit(self, amount):\n"
    "        self.balance += amount",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
    "    return a",
    "def longest(words):\n    return max(words, key=len)",
    "def merge(first, second):\n    merged = dict(first)\n    merged.update(second)\n"
    "    return merged",
    "def swap(pair):\n    x, y = pair\n    return y, x",
    "def clamp(value, low, high):\n    if value < low:\n        return low\n"
    "    if value > high:\n        return high\n    return value",
    "def initials(name):\n    return ''.join(part[0] for part in name.split())",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
    "    def push(self, item):\n        self.items.append(item)\n\n"
    "    def pop(self):\n        return self.items.pop()",
    "def celsius(fahrenheit):\n    return (fahrenheit - 32) * 5 / 9",
    "def unique(items):\n    seen = set()\n    result = []\n    for item in items:\n"
    "        if item not in seen:\n            seen.add(item)\n            result.append(item)\n"
    "    return result",
    "def power(base, exponent):\n    result = 1\n    for _ in range(exponent):\n"
    "        result *= base\n    return result",
)
