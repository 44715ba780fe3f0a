"""What a plan for a GPU counts where: slots on the device, what weights wait in and go through in RAM."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphcore.config.byte_sizes import in_words
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.decoder_share import with_share
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.plan_run import plan_run
from graphcore.engine.loading.prepare_model import prepare_model
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.errors import ConfigError, PlanError
from graphcore.kernels.backend import TritonBackend
from graphcore.parallel.share import Share
from graphcore.planning import machine
from graphcore.planning.gpu_overhead import LIBRARIES
from graphcore.planning.tier import host_nbytes, ram_nbytes
from graphcore.weights.plan import Plan, Tier

QWEN3 = Path(__file__).parents[3] / "golden" / "tiny" / "qwen3"
GPT_OSS = QWEN3.parent / "gptoss"
GPU = torch.device("cuda", 0)
FREE = {"cuda": 1 << 30, "cpu": 8 << 30}


def plan_on(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *overrides: str, model_folder: Path = QWEN3
) -> tuple[Plan, Tier]:
    """Return the plan of a tiny model whose weights stream, and where they wait."""
    overrides = ("device=cpu", "graph=eager", "context_length=64", "streaming=on", *overrides)
    settings = compose_settings([*overrides])
    settings.model.checkpoint = str(model_folder)
    model = open_model(settings.model, 0, tmp_path, lambda stage, done, total: None)
    if device.type == "cuda":  # the device that is planned for is not here
        monkeypatch.setattr("graphcore.engine.loading.runtime_config.find_backend", lambda *_: (TritonBackend(), ""))
    parts = prepare_model(settings, model)
    monkeypatch.setattr(machine, "free_device_nbytes", lambda device: FREE[device.type])
    monkeypatch.setattr(machine, "physical_device_nbytes", lambda device: FREE[device.type])
    _, plan, tier = plan_run(settings, replace(parts, runtime=replace(parts.runtime, device=device)))
    return plan, tier


def test_ranks_on_one_gpu_plan_their_own_layers_within_their_part_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = compose_settings(["device=cpu", "graph=eager", "context_length=64", "streaming=off"])
    settings.model.checkpoint = str(QWEN3)
    monkeypatch.setattr("graphcore.engine.loading.runtime_config.find_backend", lambda *_: (TritonBackend(), ""))
    monkeypatch.setattr(machine, "free_device_nbytes", lambda device: FREE[device.type])
    monkeypatch.setattr(machine, "physical_device_nbytes", lambda device: FREE[device.type])
    found = []
    for share in (None, Share(0, (0, 1)), Share(1, (0, 1))):
        parts = prepare_model(settings, open_model(settings.model, 0, tmp_path, lambda stage, done, total: None))
        parts = replace(parts, runtime=replace(parts.runtime, device=GPU))
        here = machine.Machine.here(GPU)
        parts, here = (parts, here) if share is None else (with_share(parts, share), here.shared(2, on_device=2))
        found.append(plan_run(settings, parts, here)[1])
    whole, *ranks = found
    assert sum(plan.weight_nbytes for plan in ranks) == whole.weight_nbytes
    assert all(plan.other.overhead_nbytes > LIBRARIES for plan in ranks)
    assert [plan.budget for plan in ranks] == [whole.budget // 2] * 2


def test_a_gpu_s_budget_is_its_own_free_memory_and_reads_take_none_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan, _ = plan_on(GPU, monkeypatch, tmp_path, "streaming.source=disk")
    assert plan.device == "cuda:0"
    assert plan.budget == int(FREE["cuda"] * 0.95)
    assert plan.other.buffer_nbytes == 0
    in_ram, _ = plan_on(torch.device("cpu"), monkeypatch, tmp_path, "streaming.source=disk")
    assert in_ram.other.buffer_nbytes > 0
    assert in_ram.other.overhead_nbytes == 0
    assert plan.weight_nbytes == in_ram.weight_nbytes
    assert plan.other.workspace_nbytes == in_ram.other.workspace_nbytes


def test_what_cuda_itself_takes_is_in_a_gpu_s_plan_with_streaming_and_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan, _ = plan_on(GPU, monkeypatch, tmp_path)
    assert plan.other.overhead_nbytes > LIBRARIES
    rest = plan.weight_nbytes + plan.kv_nbytes + plan.other.workspace_nbytes
    assert plan.total_nbytes == rest + plan.other.overhead_nbytes
    whole, _ = plan_on(GPU, monkeypatch, tmp_path, "streaming=off")
    assert (whole.other.overhead_nbytes, whole.other.workspace_nbytes) == (
        plan.other.overhead_nbytes,
        plan.other.workspace_nbytes,
    )
    most = plan.total_nbytes - 1
    with pytest.raises(PlanError, match="CUDA's libraries and graphs"):
        plan_on(GPU, monkeypatch, tmp_path, f"streaming.memory_budget={most}", "streaming.prefetch=1")


def test_weights_for_a_gpu_wait_in_ram_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert plan_on(GPU, monkeypatch, tmp_path)[1].kind == "host"
    assert plan_on(GPU, monkeypatch, tmp_path, "streaming.source=disk")[1].kind == "disk"


def test_keys_and_values_of_a_gpu_are_not_offloaded_and_the_key_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match="kv_memory_budget is not possible: keys and values on cuda:0 are not offloaded"
    ):
        plan_on(GPU, monkeypatch, tmp_path, "streaming.kv_memory_budget=0")
    plan, _ = plan_on(torch.device("cpu"), monkeypatch, tmp_path, "streaming.kv_memory_budget=0")
    assert plan.offloaded_kv is not None
    with pytest.raises(PlanError):
        plan_on(GPU, monkeypatch, tmp_path, f"streaming.memory_budget={LIBRARIES}", "context_length=512")


@pytest.mark.parametrize(("source", "word"), [("host", "wait there"), ("disk", "on their way to the device")])
def test_ram_that_is_not_enough_for_what_goes_through_it_is_refused_with_what_would_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, word: str
) -> None:
    asked = f"streaming.source={source}", "streaming.host_memory_budget=1kB"
    with pytest.raises(PlanError, match=rf"{word}.*host_memory_budget is 1000 bytes") as error:
        plan_on(GPU, monkeypatch, tmp_path, *asked)
    enough = re.search(r"; (\d+\.\d\d) (KiB|MiB) would do; ", str(error.value))
    assert enough is not None, error.value
    number, unit = enough.groups()
    plan_on(GPU, monkeypatch, tmp_path, asked[0], f"streaming.host_memory_budget={number}{unit}")
    less = f"{float(number) - 0.01:.2f}{unit}"
    with pytest.raises(PlanError):
        plan_on(GPU, monkeypatch, tmp_path, asked[0], f"streaming.host_memory_budget={less}")


def test_weights_packed_at_load_that_do_not_fit_in_ram_are_not_sent_to_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = "quant=q8_0", "streaming.host_memory_budget=1kB"
    with pytest.raises(PlanError, match="streaming=auto, or use a file packed by task=pack"):
        plan_on(torch.device("cpu"), monkeypatch, tmp_path, *asked)


@pytest.mark.parametrize(
    ("overrides", "tier", "are_device_readable"),
    [
        ([], "host", True),
        (["streaming.source=host"], "host", True),
        (["streaming.pinned_memory=false"], "host", False),
        (["streaming.source=disk"], "disk", False),
    ],
    ids=str,
)
def test_experts_for_a_gpu_wait_where_its_kernels_read_them_unless_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overrides: list[str], tier: str, are_device_readable: bool
) -> None:
    plan, found = plan_on(GPU, monkeypatch, tmp_path, *overrides, model_folder=GPT_OSS)
    assert plan.experts is not None
    assert (found.kind, plan.experts.are_device_readable) == (tier, are_device_readable)
    in_ram, _ = plan_on(torch.device("cpu"), monkeypatch, tmp_path, model_folder=GPT_OSS)
    assert in_ram.experts is not None
    assert not in_ram.experts.are_device_readable


def test_slots_that_kernels_fill_need_all_experts_in_ram_and_whole_layers_need_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(PreparedDecoder, "read_nbytes", lambda self, tier: 0)
    asked = "streaming=on", "streaming.source=host"
    plan, tier = plan_on(GPU, monkeypatch, tmp_path, *asked, model_folder=GPT_OSS)
    assert plan.experts is not None
    assert (plan.experts.has_layer_slots, tier.note) == (True, "")
    enough = ram_nbytes(plan, tier, 0)
    monkeypatch.setitem(FREE, "cpu", enough + machine.RESERVE_NBYTES)
    assert plan_on(GPU, monkeypatch, tmp_path, *asked, model_folder=GPT_OSS)[0] == plan
    monkeypatch.setitem(FREE, "cpu", enough - 1 + machine.RESERVE_NBYTES)
    less, tier = plan_on(GPU, monkeypatch, tmp_path, *asked, model_folder=GPT_OSS)
    assert less.experts is not None
    assert (less.experts.are_device_readable, less.experts.has_layer_slots) == (True, False)
    assert less.resident_expert_nbytes > 0
    assert "RAM does not hold those of all layers" in tier.note
    assert f"streaming.source=host needs {in_words(enough)} of RAM" in tier.note


def test_weights_that_do_not_fit_in_ram_are_read_from_files_unless_ram_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(PreparedDecoder, "read_nbytes", lambda self, tier: 0)
    plan, tier = plan_on(GPU, monkeypatch, tmp_path)
    enough = ram_nbytes(plan, tier, 0)
    assert enough - host_nbytes(plan) == ram_nbytes(plan, Tier("disk"), 0) > 0
    monkeypatch.setitem(FREE, "cpu", enough + machine.RESERVE_NBYTES)
    assert plan_on(GPU, monkeypatch, tmp_path)[1].kind == "host"
    monkeypatch.setitem(FREE, "cpu", enough - 1 + machine.RESERVE_NBYTES)
    short, tier = plan_on(GPU, monkeypatch, tmp_path)
    assert (tier.kind, tier.is_direct, short.groups) == ("disk", True, plan.groups)
    assert re.search(
        r"read from files, because they do not fit in RAM: streaming.source=host needs .* free$", tier.note
    )
    with pytest.raises(PlanError, match=r"use streaming\.source=disk"):
        plan_on(GPU, monkeypatch, tmp_path, "streaming.source=host")


def test_experts_that_do_not_fit_in_ram_are_read_from_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = "streaming.expert_cache=0"
    plan, _ = plan_on(GPU, monkeypatch, tmp_path, small, model_folder=GPT_OSS)
    enough = host_nbytes(plan)
    monkeypatch.setitem(FREE, "cpu", enough - 1 + machine.RESERVE_NBYTES)
    monkeypatch.setattr(PreparedDecoder, "read_nbytes", lambda self, tier: 0)
    short, tier = plan_on(GPU, monkeypatch, tmp_path, small, model_folder=GPT_OSS)
    assert short.experts is not None
    assert (tier.kind, short.experts.are_device_readable) == ("disk", False)
    assert "streamed weights are read from files, because they do not fit in RAM" in tier.note
    with pytest.raises(PlanError):
        plan_on(GPU, monkeypatch, tmp_path, small, "streaming.source=host", model_folder=GPT_OSS)
