"""lm-evaluation-harness scores the model over HTTP, and the same with drafts and without."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.clients.packages import python_of
from tests.clients.server import Served, found_by, run_client

pytestmark = pytest.mark.long

ROWS = [
    {"question": "two and two", "choices": ["four", "five"], "answer": 0, "text": "la la la la"},
    {"question": "a cat is", "choices": ["a plant", "a pet", "a city"], "answer": 1, "text": "do"},
    {"question": "the sky is", "choices": ["blue", "deep"], "answer": 0, "text": "re mi fa so la"},
]
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
GENERATE = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 24, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def write_tasks(folder: Path) -> dict[str, Path]:
    """Tasks over a file, so that no hub is asked."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    files = {}
    for name, text in {"choice": CHOICE, "rolling": ROLLING, "generate": GENERATE}.items():
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(text.replace("DATA", str(data)), encoding="utf-8")
    return files


async def evaluate(
    system: Served, kind: str, endpoint: str, tasks: list[Path], out: Path
) -> dict[str, Any]:
    """Run all tasks."""
    arguments = f"model={system.model},base_url={system.url}/v1/{endpoint},num_concurrent=2"
    arguments += f",max_retries=1,tokenizer={system.tokenizer}"
    chat = ["--apply_chat_template"] if kind == "local-chat-completions" else []
    command = (
        f"-m lm_eval run --model {kind} --model_args {arguments} --batch_size 2 --log_samples "
        f"--tasks {','.join(map(str, tasks))} --output_path {out}"
    )
    await run_client([python_of("lm_eval"), *command.split(), *chat], cwd=out.parent)
    return read_results(out)


def read_results(out: Path) -> dict[str, Any]:
    """Scores by task, and what each sample was answered."""
    (results,) = out.rglob("results_*.json")
    samples = {
        file.name.split("_20")[0]: [
            json.loads(line)["filtered_resps"] for line in file.read_text().splitlines()
        ]
        for file in out.rglob("samples_*.jsonl")
    }
    return {"results": json.loads(results.read_text())["results"], "samples": samples}


async def with_and_without(
    model: Path, tmp_path: Path, kind: str, endpoint: str, tasks: list[Path]
) -> dict[str, Any]:
    async def run(system: Served) -> dict[str, Any]:
        out = Path(tempfile.mkdtemp(dir=tmp_path))
        return await evaluate(system, kind, endpoint, tasks, out)

    drafted = await found_by(run, model, speculative=True)
    (plain,) = await found_by(run, model, speculative=False)
    assert all(found == plain for found in drafted)
    return plain


async def test_local_completions(model: Path, tmp_path: Path) -> None:
    tasks = [*write_tasks(tmp_path).values()]
    found = await with_and_without(model, tmp_path, "local-completions", "completions", tasks)
    assert found["results"].keys() == {"tiny_choice", "tiny_rolling", "tiny_generate"}
    assert all(len(answers) == len(ROWS) for answers in found["samples"].values())
    chosen = [row for rows in found["samples"]["samples_tiny_choice"] for row in rows]
    assert all(float(logprob) < 0 for logprob, _ in chosen)
    assert len({tuple(row) for row in chosen}) == len(chosen), "no two choices score alike"


async def test_local_chat_completions(model: Path, tmp_path: Path) -> None:
    tasks = [write_tasks(tmp_path)["generate"]]
    found = await with_and_without(
        model, tmp_path, "local-chat-completions", "chat/completions", tasks
    )
    assert found["results"].keys() == {"tiny_generate"}
