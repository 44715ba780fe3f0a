"""A ring of GPU ranks, rehearsed: two processes with captured steps on `FakeCuda` answer as one, to the bit."""

import functools
from contextlib import closing
from pathlib import Path
from typing import Any

import device_ranks
import pytest
import torch
from ring_ranks import Case, answers_of, load, run_cases
from support.tiny_models import save_tiny

SCRIPT = device_ranks.__file__
EAGER = ("graph=eager", "dtype=fp32")
STREAMED = ("streaming=on", "streaming.layer_group_size=1", *EAGER)
CASES = {
    "dense, resident": ("llama3", ("streaming=off", *EAGER)),
    "windows, streamed": ("gemma3", STREAMED),
    "recurrent, interleaved layers": ("qwen3_next", STREAMED),
    "mixture, two thirds on rank 0": ("gpt_oss", ("streaming=off", "parallel.split=[2,1]", *EAGER)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of all cases."""
    made = tmp_path_factory.mktemp("device_ring")
    for model, _ in CASES.values():
        save_tiny(model, made / model)
    return made


@pytest.fixture(scope="module")
def ring(folder: Path) -> Any:
    """A function to what rank 0 finds in all cases, and the errors of each rank, by the transport."""

    @functools.cache
    def run(transport: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
        cases = {name: Case(str(folder / model), overrides, 2) for name, (model, overrides) in CASES.items()}
        cases["lose"] = Case(str(folder / "llama3"), ("batch_size=1", *EAGER), 3, "lose")
        return run_cases(3, cases, folder, SCRIPT, transport)

    return run


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """A function to what one process answers in a case, that decodes in the same way."""

    @functools.cache
    def run(name: str) -> dict[str, Any]:
        model, overrides = CASES[name]
        own = tuple(one for one in overrides if not one.startswith("parallel"))
        threads = torch.get_num_threads()
        with pytest.MonkeyPatch.context() as patch, closing(_engine(patch, Case(str(folder / model), own))) as engine:
            answers = answers_of(engine, {})
            assert engine.runner.captures.num_graphs > 0
        torch.set_num_threads(threads)
        return answers

    return run


def _engine(patch: pytest.MonkeyPatch, case: Case) -> Any:
    device_ranks.decode_as_on_a_gpu(patch)
    return load(case, [])


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["staged", "device"])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_answer_as_one_process_to_the_bit(name: str, transport: str, ring: Any, alone: Any) -> None:
    (answers, errors), expected = ring(transport), alone(name)
    assert name in answers, errors
    found = answers[name]
    for part, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[part], value), f"{part} differs by {(found[part] - value).abs().max()}"
        else:
            assert found[part] == value, part


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["staged", "device"])
def test_requests_fail_and_all_ranks_end_when_one_is_lost(transport: str, ring: Any) -> None:
    found, errors = ring(transport)
    assert [line.partition(":")[0] for line in found["lose"]] == ["request", "request", "failure", "later"]
    assert all("a process has ended, or the network has failed" in line for line in found["lose"])
    assert errors[2]["lose"].startswith("ParallelError: rank 2 of 3: ")
