"""task=microbench takes a decode step apart into all of its parts, and its figures hang together."""

import json
from typing import Any

import pytest
from support.chat_folders import TINY
from support.task_runs import RunTask

NATIVE_KINDS = {"embed", "linear", "attend", "head", "argmax", "advance"}
TORCH_KINDS = {"embed", "norm", "linear", "rope", "attend", "activation", "head", "argmax"}
SMALL = ("task=microbench", "task.lengths=[5,17]", "task.repeats=3", "dtype=fp32")


def micro(run_task: RunTask, family: str, *overrides: str) -> dict[str, Any]:
    run = run_task(f"model.checkpoint={TINY / family}", *SMALL, *overrides)
    assert run.status == 0, run.error
    return run.record


def stored_matrices(family: str) -> int:
    """Return the elements of all stored matrices but the embedding table."""
    from safetensors.torch import load_file

    stored = load_file(TINY / family / "model.safetensors")
    return sum(tensor.numel() for name, tensor in stored.items() if tensor.dim() == 2 and "embed_tokens" not in name)


@pytest.mark.parametrize(("graph", "kinds"), [("auto", NATIVE_KINDS), ("eager", TORCH_KINDS)])
def test_all_parts_of_a_step_are_there(run_task: RunTask, graph: str, kinds: set[str]) -> None:
    record = micro(run_task, "llama3", f"graph={graph}")
    assert {found["kind"].split()[0] for found in record["operations"]} == kinds
    config = json.loads((TINY / "llama3" / "config.json").read_text(encoding="utf-8"))
    layers, vocab, dim = config["num_hidden_layers"], config["vocab_size"], config["hidden_size"]
    attends = [found for found in record["operations"] if found["kind"] == "attend"]
    assert [(found["length"], found["count"]) for found in attends] == [(5, layers), (17, layers)]
    head = next(found for found in record["operations"] if found["kind"] == "head")
    assert (head["shape"], head["count"], head["weight_bytes"]) == (f"{vocab}x{dim}", 1, 4 * vocab * dim)
    linears = [found for found in record["operations"] if found["kind"] == "linear"]
    assert sum(found["count"] for found in linears) == layers * (4 if graph == "auto" else 7)


def test_bytes_of_the_parts_are_those_of_the_files_matrices(run_task: RunTask) -> None:
    record = micro(run_task, "llama3", "graph=auto")
    found = sum(part["count"] * part["weight_bytes"] for part in record["operations"] if part["kind"] == "linear")
    assert found == 4 * stored_matrices("llama3")


@pytest.mark.parametrize("graph", ["auto", "eager"])
def test_units_and_sums_agree(run_task: RunTask, graph: str) -> None:
    record = micro(run_task, "llama3", f"graph={graph}")
    for part in record["operations"]:
        assert part["step_microseconds"] == pytest.approx(part["count"] * part["in_order_microseconds"])
        assert part["warm_microseconds"] > 0
        if part["weight_gb_per_second"] is not None:
            rate = part["weight_bytes"] / part["in_order_microseconds"] / 1e3  # bytes per microsecond are MB/s
            assert part["weight_gb_per_second"] == pytest.approx(rate)
    assert [step["length"] for step in record["steps"]] == [5, 17]
    longest = record["steps"][-1]
    parts = [part for part in record["operations"] if part["length"] in (None, 17)]
    assert longest["sum_microseconds"] == pytest.approx(sum(part["step_microseconds"] for part in parts))
    for step in record["steps"]:
        assert step["difference_microseconds"] == pytest.approx(step["microseconds"] - step["sum_microseconds"])
        assert step["weight_gb_per_second"] == pytest.approx(step["weight_bytes"] / step["microseconds"] / 1e3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("gemma3", {"add_norm"}),
        ("gpt2", set()),
        ("gptoss", {"route", "experts_up", "experts_down"}),
    ],
)
def test_other_families_come_apart_too(run_task: RunTask, family: str, kinds: set[str]) -> None:
    found = {part["kind"] for part in micro(run_task, family, "graph=auto")["operations"]}
    assert kinds <= found <= kinds | NATIVE_KINDS
    eager = {part["kind"].split()[0] for part in micro(run_task, family, "graph=eager")["operations"]}
    assert eager <= TORCH_KINDS | {"experts"}


@pytest.mark.thorough
def test_packed_parts_name_their_format(run_task: RunTask) -> None:
    record = micro(run_task, "llama3", "graph=auto", "quant=q8_0", "dtype=bf16")
    formats = {part["format"] for part in record["operations"] if part["kind"] in ("linear", "head", "embed")}
    assert formats == {"q8_0"}


def test_lengths_are_cut_to_the_context(run_task: RunTask) -> None:
    record = micro(run_task, "llama3", "graph=auto", "context_length=16")
    assert [step["length"] for step in record["steps"]] == [5, 16]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("task.lengths=[]", "must name at least one length"),
        ("task.lengths=[0]", "each at least 1"),
        ("task.repeats=0", "task.repeats=0 must be at least 1"),
        ("prompt=hello", "prompt has no effect with task=microbench"),
    ],
)
def test_what_cannot_be_timed_is_refused(run_task: RunTask, override: str, said: str) -> None:
    run = run_task(f"model.checkpoint={TINY / 'llama3'}", *SMALL, override)
    assert run.status == 1
    assert said in str(run.error)
