"""lm-eval's scores of local tasks, through the server, are those of the engine's own answers.

It runs as its own command, `lm_eval`, which may come from another environment: put its folder at the end of PATH.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_folders import save_calling_folder
from support.serving import SECONDS, Running, running_server

from graphcore import Engine

QUESTIONS = [f"What is {number} plus {number}?" for number in range(12)]
CHOICES = [" yes", " no", " perhaps, who knows"]
NEW_TOKENS = 8
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {documents}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
CHOOSING = """
target_delimiter: ""
doc_to_choice: "{{choices}}"
metric_list:
  - metric: acc
"""
WRITING = f"""
generation_kwargs:
  until: []
  max_gen_toks: {NEW_TOKENS}
  temperature: 0
metric_list:
  - metric: exact_match
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("lm_eval") is None, reason="the command lm_eval is not installed"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = save_calling_folder(tmp_path_factory.mktemp("evaluation") / "model")
    sizes = ["batching.max_sequences=4", "context_length=512"]
    with Engine.load(folder, dtype="fp32", device="cpu", overrides=sizes) as engine:
        yield engine


@pytest.fixture(scope="module")
def running(engine: Engine) -> Iterator[Running]:
    with running_server(lambda: engine) as running:
        yield running


def evaluated(folder: Path, running: Running, kind: str, documents: list[dict[str, Any]], chat: bool = False) -> Any:
    """Return what lm-eval measures of a task, and its samples, in the order of the documents."""
    (folder / "documents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents), "utf-8")
    more = CHOOSING if kind == "multiple_choice" else WRITING
    task = TASK.format(name="tiny", documents=folder / "documents.jsonl", kind=kind, more=more)
    (folder / "tiny.yaml").write_text(task, "utf-8")
    model = "local-chat-completions" if chat else "local-completions"
    path = "/v1/chat/completions" if chat else "/v1/completions"
    command = ["lm_eval", "--model", model, "--tasks", "tiny", "--include_path", str(folder), "--log_samples"]
    command += ["--model_args", f"model=tiny,base_url={running.url}{path},tokenizer_backend=remote,max_retries=1"]
    command += ["--output_path", str(folder / "found"), *(["--apply_chat_template"] if chat else [])]
    caches = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=10 * SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (folder / "found").rglob("results_*.json")
    (samples,) = (folder / "found").rglob("samples_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text("utf-8").splitlines()]
    return json.loads(results.read_text("utf-8"))["results"]["tiny"], sorted(lines, key=lambda line: line["doc_id"])


def own_logprob(engine: Engine, context: str, continuation: str) -> float:
    """Return the log probability of a continuation by the engine's logits."""
    before, ids = engine.tokenizer.encode(context), engine.tokenizer.encode(context + continuation)
    logits = engine.logits([ids])
    assert isinstance(logits, torch.Tensor)
    logprobs = logits[0].double().log_softmax(-1)
    return sum(float(logprobs[at - 1, ids[at]]) for at in range(len(before), len(ids)))


def test_choices_are_scored_as_by_the_engines_logits(running: Running, engine: Engine, tmp_path: Path) -> None:
    documents = [
        {"question": question, "choices": CHOICES, "answer": at % len(CHOICES)} for at, question in enumerate(QUESTIONS)
    ]
    found, samples = evaluated(tmp_path, running, "multiple_choice", documents)
    own = [[own_logprob(engine, one["question"], choice) for choice in CHOICES] for one in documents]
    for sample, expected in zip(samples, own, strict=True):
        assert [float(pair[0][0]) for pair in sample["resps"]] == pytest.approx(expected, abs=1e-3)
    right = [max(range(3), key=row.__getitem__) == one["answer"] for row, one in zip(own, documents, strict=True)]
    assert found["acc,none"] == pytest.approx(sum(right) / len(right))
    assert 0 < sum(right) < len(right)


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_written_answers_are_the_engines(running: Running, engine: Engine, tmp_path: Path, chat: bool) -> None:
    def own_answer(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        ids = engine.chat_ids(messages) if chat else engine.prompts.prompt_ids(question)
        return engine.submit(ids, NEW_TOKENS, temperature=0).result(SECONDS).text

    own = [own_answer(question) for question in QUESTIONS]
    documents = [
        {"question": question, "answer": answer if at % 4 else "something else"}
        for at, (question, answer) in enumerate(zip(QUESTIONS, own, strict=True))
    ]
    found, samples = evaluated(tmp_path, running, "generate_until", documents, chat)
    assert [sample["resps"][0][0] for sample in samples] == own
    assert found["exact_match,none"] == pytest.approx(0.75)
