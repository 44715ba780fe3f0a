"""parallel=ring on GPUs: two ranks have the bits of one process, on one GPU through gloo, on two through NCCL.

All decode steps are captured, prompts run eager, and the host samples, in one process as on the ring. NCCL's test is
skipped on a machine with one GPU.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import device_ranks
import pytest
import torch
from ring_ranks import Case, answers_of, load, run_ranks

COMMON = ("dtype=fp32", "graph=captured", "parallel.split=[1,1]")
CASES: Mapping[str, tuple[str, ...]] = {
    "resident": ("streaming=off", *COMMON),
    "streamed": ("streaming=on", *COMMON),
}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], Mapping[str, Any]]:
    """A function to what rank 0 of two answers in all cases, with further settings."""

    @functools.cache
    def run(folder: Path, *more: str) -> Mapping[str, Any]:
        cases = {name: Case(str(folder), (*given, *more)) for name, given in CASES.items()}
        return run_ranks(2, cases, tmp_path_factory.mktemp("ring"), device_ranks.__file__, "real")

    return run


@pytest.fixture(scope="module")
def alone() -> Callable[[Path, str], Mapping[str, Any]]:
    """A function to what one process answers in a case."""

    @functools.cache
    def run(folder: Path, name: str) -> Mapping[str, Any]:
        own = tuple(one for one in CASES[name] if not one.startswith("parallel"))
        threads = torch.get_num_threads()
        with pytest.MonkeyPatch.context() as patch:
            device_ranks.sample_on_the_host(patch)
            with closing(load(Case(str(folder), (*own, "device=cuda:0")), [])) as engine:
                answers = answers_of(engine, {})
                assert engine.runner.captures.num_graphs > 0
        torch.set_num_threads(threads)
        return answers

    return run


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return the names of answers that are not the same to the bit."""

    def same(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)

    return [name for name in expected if not same(found[name], expected[name])]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_on_one_gpu_answer_as_one_process_to_the_bit(case: str, tiny_model, of_two, alone) -> None:
    folder = tiny_model("llama3").folder
    found = of_two(folder, "device=cuda:0")[case]
    assert differing(found, alone(folder, case)) == []
    assert any(note.startswith("2 ranks have ") for note in found["notes"])
    assert bool(found["streamed"]) == (case == "streamed")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, one for each rank of NCCL")
@pytest.mark.parametrize("transport", ["nccl", "gloo"])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_with_a_gpu_each_answer_as_one_process_to_the_bit(
    case: str, transport: str, tiny_model, of_two, alone
) -> None:
    folder = tiny_model("llama3").folder
    found = of_two(folder, "device=cuda", f"parallel.transport={transport}")[case]
    assert differing(found, alone(folder, case)) == []
