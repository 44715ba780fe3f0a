"""task=plan counts bytes from shapes and reads no weight."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.chat_folders import TINY
from support.files.gpt_oss_files import save_mxfp4
from support.task_runs import RunTask

from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.config.byte_sizes import in_words
from graphcore.planning import rates
from graphcore.streaming.link_rate import LinkRate
from graphcore.tasks.plan_machine import DISKS, GPUS, MEMORIES

LLAMA = f"model.checkpoint={TINY / 'llama3'}"


def test_the_plan_is_the_checkpoints_bytes(
    run_task: RunTask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: object, name: str) -> None:
        pytest.fail(f"{name} was read")

    stored = load_file(TINY / "llama3" / "model.safetensors")
    monkeypatch.setattr(SafetensorsCheckpoint, "read", refuse)
    record = run_task("task=plan", LLAMA, "dtype=fp32", "context_length=100", "batch_size=2").record
    assert [group["name"] for group in record["groups"]] == ["embed_tokens", "layers.0", "layers.1", "head", "vectors"]
    assert {group["place"] for group in record["groups"]} == {"resident"}
    layer = sum(tensor.nbytes for name, tensor in stored.items() if ".layers.0." in name and tensor.dim() == 2)
    assert record["groups"][1]["bytes"] == layer  # every tensor of it is a multiple of 256 bytes
    assert record["groups"][0]["bytes"] == stored["model.embed_tokens.weight"].nbytes
    # 2 sequences x 7 pages and one that is nobody's, of 16 positions x 2 layers x keys and values x 2 kv heads x 32
    # elements x 4 bytes, and a table of 4 bytes for each page of a sequence
    assert record["memory"]["kv_bytes"] == (2 * 7 + 1) * 16 * 2 * 2 * 2 * 32 * 4 + 2 * 7 * 4
    assert record["memory"]["weight_bytes"] == sum(group["bytes"] for group in record["groups"])
    parts = ("weight_bytes", "kv_bytes", "workspace_bytes", "program_bytes")
    assert record["memory"]["total_bytes"] == sum(record["memory"][part] for part in parts)
    assert record["memory"]["workspace_bytes"] > 0
    assert record["fits"] is True
    out = capsys.readouterr().out
    assert "layers 0-1 (2, each)" in out
    assert f"{layer:,}" in out
    assert "llama3 (llama) on cpu, streaming=off: weights" in out  # the checkpoint's name, not the model group's


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["plan", "generate"])
def test_threads_are_those_asked_for_or_as_many_as_the_quota_allows(
    run_task: RunTask, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    own = () if task == "plan" else ("prompt_ids=[1,2]", "max_new_tokens=1")
    torch.set_num_threads(2)
    monkeypatch.setattr("graphcore.device.usable_processors", lambda: 1)
    assert run_task(f"task={task}", LLAMA, *own).record["threads"] == 1
    assert run_task(f"task={task}", LLAMA, "threads=2", *own).record["threads"] == 2
    torch.set_num_threads(2)
    monkeypatch.setattr("graphcore.device.usable_processors", lambda: 64)
    assert run_task(f"task={task}", LLAMA, *own).record["threads"] == 2


def test_what_cannot_fit_is_shown_and_fails(run_task: RunTask, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_task("task=plan", LLAMA, "context_length=131072", "batch_size=1000000")
    assert (run.status, run.record["status"], run.record["fits"]) == (1, "failed", False)
    assert run.record["error"].startswith("PlanError: streaming=off needs")
    out, err = capsys.readouterr()
    assert "kv cache" in out
    assert err.splitlines()[-1] == f"graphcore: {run.record['error']}"


def test_a_model_too_large_to_make_can_be_planned(run_task: RunTask) -> None:
    record = run_task("task=plan", "model=llama3", "model.checkpoint='random:'", "dtype=bf16").record
    # Llama 3.2 1B: 1,235,814,400 parameters, the tied head among them once; the 33 norms stay float32
    assert record["memory"]["weight_bytes"] == 2 * 1_235_814_400 + 2 * 33 * 2048


def test_a_prompt_has_no_effect(run_task: RunTask) -> None:
    assert "prompt has no effect with task=plan" in str(run_task("task=plan", LLAMA, "prompt=a").error)


def plan_of_1b(run_task: RunTask, *overrides: str) -> dict[str, Any]:
    """Return what is planned for Llama 3.2 1B's shape in bf16 with 512 tokens of context."""
    shape = ("model=llama3", "model.checkpoint='random:'", "dtype=bf16", "context_length=512")
    return run_task("task=plan", *shape, *overrides).record


def test_what_streams_is_listed_with_its_place_and_its_slots(
    run_task: RunTask, capsys: pytest.CaptureFixture[str]
) -> None:
    record = plan_of_1b(run_task, "streaming=on", "streaming.layer_group_size=5", "streaming.memory_budget=2GB")
    layer = 121_634_816  # 2048 x (2 x 2048 + 2 x 512 + 3 x 8192) in bf16
    places = {group["name"]: (group["bytes"], group["place"]) for group in record["groups"]}
    assert list(places) == ["embed_tokens", "layers.0-4", "layers.5-9", "layers.10-14", "layers.15", "head", "vectors"]
    assert places["layers.5-9"] == (5 * layer, "streamed")
    assert places["layers.15"] == (layer, "streamed")
    assert places["embed_tokens"] == (2 * 128256 * 2048, "gathered")
    assert places["head"] == (0, "streamed")
    assert (record["streaming"]["slots"], record["memory"]["slot_bytes"]) == (2, 10 * layer)
    assert record["streaming"]["bytes_per_token"] == pytest.approx(16 * layer + 2 * 128256 * 2048, abs=256 * 16)
    assert record["memory"]["total_bytes"] <= record["budget_bytes"] == 2_000_000_000
    out = capsys.readouterr().out
    assert "head (the bytes of embed_tokens)" in out
    assert "2 for " in out


def test_rates_predict_the_speed(run_task: RunTask, capsys: pytest.CaptureFixture[str]) -> None:
    # Random weights wait in RAM, where a copy reads and writes, and keeps the processors that compute busy.
    record = plan_of_1b(run_task, "streaming=on", "streaming.source=host", "task.bandwidth=4GB/s")
    moved = record["streaming"]["bytes_per_token"]
    assert record["predicted"]["copy_seconds"] == pytest.approx(moved / 2e9)
    assert record["predicted"]["compute_seconds"] == pytest.approx(moved / (0.8 * 4e9), rel=1e-3)
    assert record["predicted"]["busy_seconds"] == record["predicted"]["copy_seconds"]
    assert record["predicted"]["tokens_per_second"] == pytest.approx(1 / (moved / 2e9 + moved / 3.2e9), rel=1e-3)
    assert record["predicted"]["is_overlapped"] is True
    out = capsys.readouterr().out
    assert "predicted 0.498" in out  # 2.47 GB at 2 GB/s and at 3.2 GB/s
    assert "at the same time, by the same processors" in out


def test_a_13b_at_128k_in_14_gib_reads_its_keys_and_values_from_files(
    run_task: RunTask, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}
    sizes |= {"num_key_value_heads": 40, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 131072}
    shape = [f"model.random_config.{name}={value}" for name, value in sizes.items()]
    asked = "task=plan", "model=llama3", "model.checkpoint=random:q4_k", *shape, "dtype=bf16", "context_length=131072"
    described = "streaming=auto", "streaming.source=disk", "task.ram=14GiB", "task.disk=nvme4", "task.memory=ddr5"
    record = run_task(*asked, *described).record
    layer = 2 * 40 * 128 * 2 * 131072  # keys and values of all heads and tokens, in bf16
    away = len(record["streaming"]["offloaded_kv_layers"])
    assert away > 30
    assert record["streaming"]["offloaded_kv_bytes_per_token"] == away * layer
    assert record["memory"]["offloaded_kv_bytes"] == away * layer * (131072 + 64) // 131072
    kept = (40 - away) * layer
    assert kept <= record["memory"]["kv_bytes"] < kept * 1.001 + 10_000
    assert record["memory"]["total_bytes"] <= record["budget_bytes"] < 14 * 1024**3
    assert record["predicted"]["kv_seconds"] == pytest.approx(away * layer / 7.45e9)
    seconds = 1 / record["predicted"]["tokens_per_second"]
    assert seconds == pytest.approx(
        record["predicted"]["kv_seconds"]
        + max(record["predicted"]["copy_seconds"], record["predicted"]["compute_seconds"])
    )
    out = capsys.readouterr().out
    assert f"that of {away} of 40 layers" in out
    assert f"up to {in_words(away * layer)} of keys and values are read from files; predicted 0.0" in out


def test_names_of_hardware_stand_for_their_rates(run_task: RunTask) -> None:
    streamed = ("task=plan", "model=llama3", "model.checkpoint=random:", "streaming=auto", "device=auto", "graph=auto")
    on_gpu = run_task(*streamed, "task.gpu=rtx4090", "task.ram=64GiB", "task.disk=nvme4").record["planned_for"]
    # 384 bits x 21 Gbit/s; 16 lanes of 16 Gbit/s with 128 of 130 bits
    assert on_gpu["device_memory_bytes"] == 24 * 1024**3
    assert on_gpu["bandwidth_bytes_per_second"] == 384 * 21e9 / 8
    assert on_gpu["link_bytes_per_second"] == pytest.approx(31.5e9, rel=1e-3)
    assert on_gpu["disk_bytes_per_second"] == 7.45e9
    slow_ram = ("task.gpu=rtx4090", "task.ram=64GiB", "task.memory=ddr4-1ch", "task.device_memory=20GiB")
    limited = run_task(*streamed, *slow_ram).record["planned_for"]
    assert limited["link_bytes_per_second"] == 3200e6 * 8  # DDR4-3200 cannot fill the link
    assert limited["device_memory_bytes"] == 20 * 1024**3
    alone = ("task.ram=64GiB", "task.memory=ddr5")
    on_cpu = run_task(*streamed, *alone).record["planned_for"]
    assert on_cpu["bandwidth_bytes_per_second"] == 5600e6 * 8 * 2
    typed = run_task(*streamed, *alone, "task.bandwidth=50GB").record["planned_for"]
    assert typed["bandwidth_bytes_per_second"] == 50e9
    error = run_task(*streamed, "task.device_memory=8GiB", "task.memory=ddr5").error
    assert str(error) == "task.memory=ddr5 has no effect on cuda:0; give task.gpu, too, or leave it out"


def test_every_name_of_hardware_is_documented() -> None:
    text = (Path(__file__).parents[4] / "docs" / "streaming.md").read_text(encoding="utf-8")
    assert [name for name in (*GPUS, *DISKS, *MEMORIES) if f"`{name}`" not in text] == []


def test_every_layer_has_a_row_where_it_is_asked_for(run_task: RunTask, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("task=plan", "model=llama3", "model.checkpoint=random:", "dtype=bf16", "context_length=512")
    record = run_task(*asked).record
    assert [group["name"] for group in record["groups"]].count("layers.7") == 1
    assert "layers 0-15 (16, each)" in capsys.readouterr().out
    run_task(*asked, "task.rows=all")
    shown = capsys.readouterr().out
    assert "(16, each)" not in shown
    assert all(f" layers.{index} " in shown for index in range(16))


def test_the_verdict_comes_first_and_says_what_would_fit(run_task: RunTask, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("task=plan", "model=llama3", "model.checkpoint=random:", "task.ram=2GB", "task.bandwidth=4GB/s")
    record = run_task(*asked, "task.disk=1GB/s").record
    verdict, streamed, packed = capsys.readouterr().out.splitlines()[:3]
    assert not record["fits"]
    assert verdict.startswith("does not fit: ")
    assert re.search(r"are needed on cpu, 1\.\d+ GiB may be taken$", verdict)
    assert re.match(r"streaming=auto would fit: \d+ of \d+ layer groups stay, .* for each token$", streamed)
    assert re.match(r"quant=q\d_[0k] would fit: all weights stay, 1\.\d+ GiB on cpu with \d+ tokens", packed)
    record = run_task(*asked[:-2], "task.ram=20GB", "task.bandwidth=4GB/s").record
    verdict = capsys.readouterr().out.splitlines()[0]
    assert record["fits"]
    assert re.match(r"fits: all weights stay, .* with 131072 tokens of context; predicted 1\.\d+ tokens/s", verdict)


def test_where_only_experts_move_the_rate_is_that_of_reading_one_in_each_layer(
    run_task: RunTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[LinkRate] = []

    def noted(*arguments: Any) -> LinkRate:
        measured.append(measure(*arguments))
        return measured[-1]

    measure = rates.measure_jobs
    monkeypatch.setattr(rates, "measure_jobs", noted)
    save_mxfp4(tmp_path, 1)
    asked = ("streaming=auto", "streaming.source=disk", "streaming.expert_cache=0", "task.bandwidth=4GB")
    record = run_task("task=plan", f"model.checkpoint={tmp_path}", *asked).record
    stored = load_file(tmp_path / "model.safetensors")
    experts = [tensor for name, tensor in stored.items() if name.endswith(("_blocks", "_scales"))]
    assert (record["streaming"]["groups"], len(measured)) == (0, 3)
    assert measured[0].nbytes >= sum(tensor[0].nbytes for tensor in experts)  # in slots rows are padded to 16
    config = json.loads((tmp_path / "config.json").read_text())
    routed = config["num_experts_per_tok"]
    in_slots = record["streaming"]["bytes_per_token"] / routed  # with what lies between the matrices of a slot
    assert 0.95 * in_slots < measured[0].nbytes <= in_slots
    moved = record["streaming"]["expected_bytes_per_token"]
    assert 0 < moved < record["streaming"]["bytes_per_token"]
    assert record["predicted"]["fetch_seconds"] == pytest.approx(moved / max(one.bytes_per_second for one in measured))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("task.link=0", "task.link=0 must be more than 0"),
        ("task.bandwidth=.inf", "task.bandwidth=.inf is no rate; write bytes per second"),
        ("task.disk=25", "would be 25 bytes; write the unit"),
        ("task.disk=auto", "task.disk=auto is no rate; write bytes per second"),
        ("task.disk=nvme6", "3GB, 600MB/s; or a name: hdd, sata, nvme3, nvme4, nvme5 (did you mean 'nvme5'?)"),
        ("task.bandwidth=nvme4", "task.bandwidth=nvme4 is no rate"),
        ("task.gpu=rtx409", "unknown task.gpu=rtx409 (did you mean 'rtx4090'?); known: rtx3060, rtx3090, "),
        ("task.memory=ddr6", "unknown task.memory=ddr6 (did you mean 'ddr5'?); known: ddr4-1ch, ddr4, "),
        ("task.rows=al", "task.rows=al must be folded or all (did you mean 'all'?)"),
        ("task.disk=3Gbit/s", "task.disk=3Gbit has the unknown unit 'Gbit'"),
        ("task.ram=some", "task.ram=some is no size; write whole bytes"),
        ("task.ram=auto", "task.ram=auto is no size; write whole bytes"),
    ],
)
def test_sizes_and_rates_that_are_none_are_refused(run_task: RunTask, override: str, said: str) -> None:
    assert said in str(run_task("task=plan", LLAMA, override).error)


def test_an_impossible_budget_is_shown_with_the_smallest_that_works(
    run_task: RunTask, capsys: pytest.CaptureFixture[str]
) -> None:
    record = plan_of_1b(run_task, "streaming=on", "streaming.memory_budget=100MB")
    assert (record["status"], record["fits"], record["budget_bytes"]) == ("failed", False, 100_000_000)
    # Random weights are drawn whole, the table first, and that takes more than what stays.
    smallest = max(record["memory"]["total_bytes"], record["memory"]["load_peak_bytes"])
    assert smallest >= 2 * 128256 * 2048
    assert (
        f"the smallest streaming.memory_budget that works at context_length=512 is {smallest} bytes" in record["error"]
    )
    assert "slots" in capsys.readouterr().out
    assert plan_of_1b(run_task, "streaming=on", f"streaming.memory_budget={smallest}")["fits"] is True
    assert plan_of_1b(run_task, "streaming=on", f"streaming.memory_budget={smallest - 1}")["fits"] is False
