"""The Python of README.md and docs/python.md runs as it stands there."""

import re
from pathlib import Path

import pytest

from graphcore import Engine

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.real


def examples(name: str) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found, f"{name} has no Python"
    return found


@pytest.mark.thorough
def test_readme_s_example_prints_what_it_promises(smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for example in examples("README.md"):
        exec(example, names)  # noqa: S102 - the example is ours
    out = capsys.readouterr().out
    assert out.startswith(" Paris.")
    assert len(out) > 40
    assert names["logits"].shape[:2] == (1, 3)


@pytest.mark.slow
def test_the_examples_about_threads_and_tasks_run(smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine.load(smollm2_gguf, overrides=["context_length=256", "prefill_chunk=32"]) as engine:
        names: dict[str, object] = {"engine": engine}
        for example in examples("docs/python.md"):
            exec(example, names)  # noqa: S102 - the example is ours
        assert [answer[0].text for answer in names["answers"]] == [
            engine.generate(prompt)[0].text for prompt in ("One", "Two", "Three", "Four")
        ]
        assert len(names["texts"]) == 2
        assert engine.tokenizer.decode(names["beams"][0].tolist()).startswith("The capital of France is Paris")
        assert names["following"].shape == (1, 1, engine.config.vocab_size)
        assert names["loader"].num_groups == 6
        asked = ("One, two,", "One, two,", "A, B,")
        alone = [engine.generate(prompt, max_new_tokens=8)[0].text for prompt in asked]
    assert sorted(capsys.readouterr().out) == sorted("".join(alone))
