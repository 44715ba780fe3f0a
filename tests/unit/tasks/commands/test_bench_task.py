"""task=bench counts what it says it counts."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.chat_folders import TINY
from support.packed_matrices import native_kernels
from support.task_runs import RunTask, run_in

from graphcore import Engine
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.tasks.measuring.random_batch import RandomBatch
from graphcore.tasks.measuring.weight_reads import step_nbytes

LLAMA = f"model.checkpoint={TINY / 'llama3'}"
SMALL = ("task=bench", "task.prompt_tokens=6", "task.new_tokens=4", "task.repeats=3")


@dataclass(frozen=True)
class Measured:
    """One run, of packed weights behind a depth: its result.json, what it printed, and what it computed, in order."""

    record: dict[str, Any]
    printed: str
    begun: list[tuple[str, list[int], int]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    begun: list[tuple[str, list[int], int]] = []
    extend, resume = ProgramRunner.extend, ContinuousBatching.resume

    def fill(self: ProgramRunner, rows: list[list[int]], starts: list[int]) -> torch.Tensor:
        begun.append(("fill", [len(row) for row in rows], starts[0]))
        return extend(self, rows, starts)

    def run(self: ContinuousBatching, requests: list[Request], cached: int) -> None:
        begun.append(("run", [len(request.prompt_ids) for request in requests], cached))
        resume(self, requests, cached)

    asked = ("task.depth=9", "task.batch=2", "quant=q8_0", "dtype=bf16")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(ProgramRunner, "extend", fill)
        patch.setattr(ContinuousBatching, "resume", run)
        record = run_in(tmp_path_factory.mktemp("bench") / "run", LLAMA, *SMALL, *asked).record
    return Measured(record, printed.getvalue(), begun)


def test_speeds_are_tokens_over_the_measured_seconds(measured: Measured) -> None:
    record = measured.record
    for phase, tokens in (("prefill", 2 * 6), ("decode", 2 * 4)):
        part = record[phase]
        assert (part["tokens"], len(part["seconds"])) == (tokens, 3)
        assert part["tokens_per_second"] == pytest.approx(tokens / sorted(part["seconds"])[1])
        spread = part["tokens_per_second_spread"]
        assert spread["min"] <= spread["q1"] <= spread["median"] <= spread["q3"] <= spread["max"]
    assert record["first_token_seconds"] == record["prefill"]["median_seconds"]
    seconds_per_step = record["decode"]["median_seconds"] / 4
    expected = record["decode"]["weight_bytes_per_step"] / seconds_per_step / 1e9
    assert record["decode"]["weight_gb_per_second"] == pytest.approx(expected)
    assert f"{record['decode']['tokens_per_second']:.1f}" in measured.printed
    assert "prompt 6, new 4, depth 9, batch 2, 3 repeats" in measured.printed


@pytest.mark.parametrize(("family", "is_tied"), [("llama3", True), ("qwen3", False), ("gpt2", True), ("gemma3", True)])
def test_weights_read_per_step_are_all_but_the_embedding_table_and_rows_of_it(family: str, is_tied: bool) -> None:
    from safetensors.torch import load_file

    stored = load_file(TINY / family / "model.safetensors")
    rows = {"wte.weight", "wpe.weight", "transformer.wte.weight", "transformer.wpe.weight", "model.embed_tokens.weight"}
    tables = {name: tensor.numel() for name, tensor in stored.items() if name in rows}
    others = sum(tensor.numel() for name, tensor in stored.items() if name not in rows and ".attn.bias" not in name)
    head = next(size for name, size in tables.items() if "wpe" not in name) if is_tied else 0
    used = sum(tensor.shape[1] for name, tensor in stored.items() if name in rows)
    with Engine.load(TINY / family, dtype="fp32", graph="eager", device="cpu") as engine:
        found = RandomBatch(engine, 1, 0, 1, 1, 0).weight_nbytes()
    assert found == 4 * (others + head + used)


def test_of_experts_a_step_reads_the_chosen_ones() -> None:
    from safetensors.torch import load_file

    stored = load_file(TINY / "gptoss" / "model.safetensors")
    config = json.loads((TINY / "gptoss" / "config.json").read_text(encoding="utf-8"))
    num_experts, chosen = config["num_local_experts"], config["num_experts_per_tok"]
    table = stored["model.embed_tokens.weight"]
    experts = sum(tensor.nbytes for name, tensor in stored.items() if ".experts." in name)
    others = sum(tensor.nbytes for tensor in stored.values()) - experts - table.nbytes
    experts += sum(tensor.nbytes for name, tensor in stored.items() if name.endswith("_scales"))  # two bytes in memory
    with Engine.load(TINY / "gptoss", dtype="fp32", graph="eager", device="cpu") as engine:
        decoder = engine.runner.builder.decoder
        for batch, used in ((1, chosen), (100, num_experts)):
            expected = others + batch * table[0].nbytes + experts // num_experts * used
            assert step_nbytes(decoder, batch) == expected  # float32 and mxfp4, as stored


def test_each_program_of_a_step_reads_the_weights_for_its_rows() -> None:
    native_kernels()
    with Engine.load(TINY / "gptoss", dtype="fp32", device="cpu", overrides=["batch_size=20"]) as engine:
        decoder = engine.runner.builder.decoder
        work = RandomBatch(engine, 20, 0, 5, 3, seed=0)
        assert work.weight_nbytes() == 2 * step_nbytes(decoder, 10)
        work.prefill()
        work.decode()
        states = [program.state for program, _ in engine.runner.programs.step(dict.fromkeys(range(20), ([1], 0)))]
        assert [int(state.span.counts.sum()) for state in states] == [10, 10]
        for at in (0, 10):
            expected = engine.generate([work._prompts[at][:1]], 3, ignore_eos=True)[0].token_ids
            assert work.tokens[at] == list(expected)


def test_packed_weights_are_read_as_packed_bytes(measured: Measured) -> None:
    record = measured.record
    packed = {found["format"]: found for found in record["quant"]["weights"]}
    assert record["quant"]["format"] == "q8_0"
    assert packed["q8_0"]["tensors"] == len(record["quant"]["errors"])
    assert all(0 < error < 0.01 for error in record["quant"]["errors"].values())
    assert "model.embed_tokens.weight" not in record["quant"]["errors"]
    total = sum(found["bytes"] for found in packed.values())
    assert 0 <= record["memory"]["weight_bytes"] - total < 256 * 40  # alignment of each tensor
    read = record["decode"]["weight_bytes_per_step"] / 2  # two rows, which an eager step computes one by one
    assert total <= read < 1.05 * total  # tied: the table is the head's


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("override", "prefill", "decode"),
    [
        ("quant.activations=auto", ["float"], ["wide"]),
        ("quant.activations=float", ["float"], ["float"]),
        ("quant.activations=int8", ["block"], ["block"]),
        ("dtype=fp32", ["float"], ["float"]),
    ],
)
def test_the_rounding_of_activations_that_ran_is_recorded(
    run_task: RunTask, override: str, prefill: list[str], decode: list[str]
) -> None:
    settings = ("dtype=bf16", "quant=q8_0", override) if "dtype" not in override else ("quant=q8_0", override)
    activations = run_task(LLAMA, *SMALL, *settings).record["quant"]["activations"]
    assert (activations["prefill"], activations["decode"]) == (prefill, decode)


def test_memory_is_what_the_process_holds(measured: Measured) -> None:
    record = measured.record
    memory = record["memory"]
    stored = (TINY / "llama3" / "model.safetensors").stat().st_size
    assert abs(memory["resident_bytes"] - memory["before_load_bytes"]) < 1e9  # what was freed before may go meanwhile
    assert 0 <= memory["compiler_bytes"] < memory["resident_bytes"]
    assert 0.9 * stored < memory["file_bytes"] < stored  # the file has a header
    share = record["decode"]["weight_gb_per_second"] / record["bandwidth"]["gb_per_second"]
    assert record["decode"]["bandwidth_share"] == pytest.approx(share)


def test_every_timed_part_begins_at_the_depth(measured: Measured) -> None:
    first, filled, *timed = measured.begun
    assert (first, filled) == (("run", [6, 6], 0), ("fill", [9, 9], 0))
    repeats = 1 + 3  # one is not timed
    kernels = 2 * 1  # of one step and of two
    assert timed == [("run", [15, 15], 9)] * repeats + [("run", [10, 10], 9)] * (repeats + kernels)


def test_decode_gives_the_engines_own_greedy_tokens_each_time() -> None:
    with Engine.load(TINY / "llama3", dtype="fp32", graph="eager", device="cpu") as engine:
        work = RandomBatch(engine, 1, 7, 3, 5, seed=0)
        ids = work._before[0] + [work._prompts[0][0]]
        expected = engine.generate([ids], max_new_tokens=5, ignore_eos=True)[0].token_ids
        engine._queue.run_alone("test", lambda: None)  # the sequence has left its row
        for _ in range(2):
            work.fill()
            work.decode()
            assert work.tokens == [list(expected)]
        assert engine.status() == []


@pytest.mark.slow
def test_a_long_depth_makes_the_context_it_needs(run_task: RunTask) -> None:
    record = run_task(LLAMA, *SMALL, "task.depth=5000").record
    assert record["context_length"] == 5006
    assert run_task(LLAMA, *SMALL).record["context_length"] == 4096


def test_what_the_machine_took_is_recorded(measured: Measured) -> None:
    record = measured.record
    assert record["graph"]["kernels_per_token"] > 20  # two eager layers
    assert record["memory"]["peak_device_bytes"] >= 0
    assert record["streaming"]["overlap"] is None
    assert record["process_to_first_token_seconds"] > record["load_seconds"]


def test_a_captured_step_on_a_cpu_is_counted_in_native_instructions(
    run_task: RunTask, capsys: pytest.CaptureFixture[str]
) -> None:
    native_kernels()
    record = run_task(LLAMA, *SMALL, "graph=auto", "task.batch=17").record  # whose prompts are not compiled
    each = 1 + 2 * 5 + 3  # embedding; q k v, attention, o, gate and up, down of two layers; head, choice, next input
    assert record["graph"]["instructions_per_token"] == 2 * each  # a program for 16 rows, one for the 17th
    assert f"; {2 * each} native instructions/step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("task.repeats=0", "task.repeats=0 must be at least 1"),
        ("task.depth=-1", "task.depth=-1 must be at least 0"),
        ("prompt=hello", "prompt has no effect with task=bench"),
        ("stop=[x]", "stop has no effect with task=bench"),
        ("batch_size=3", "batch_size=3 and task.batch=1 contradict"),
        ("context_length=5", "6 tokens do not fit in context_length=5"),
        ("task.depth=200000", "context_length=200006, but the model was made for 131072"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(run_task: RunTask, override: str, said: str) -> None:
    run = run_task(LLAMA, *SMALL, override)
    assert run.status == 1
    assert said in str(run.error)
