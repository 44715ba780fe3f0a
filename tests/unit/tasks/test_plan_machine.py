"""task=plan for a machine that is not this one, against arithmetic by hand: no GPU, no weights, no file is there."""

from pathlib import Path
from typing import Any

import gguf
import pytest
from support.chat_folders import TINY
from support.files.low_bit_files import SHAPES, low_bit_file
from support.task_runs import RunTask

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.kernels.ops.kv_formats import KVTypes
from graphcore.kvcache.sizes import CacheSizes, cache_nbytes
from graphcore.planning.machine import PRODUCT_SHARE, RESERVE_NBYTES

pytestmark = pytest.mark.thorough

GIB = 1 << 30
SEVENTY = ("task=plan", "model=llama3_70b", "model.checkpoint='random:q4_k'", "dtype=bf16", "context_length=4096")
ANYWHERE = ("device=auto", "graph=auto")
GPU = ("task.device_memory=14GiB", "task.ram=64GiB", "task.link=25GB", "task.bandwidth=1000GB")
# Llama 3 70B: dim 8192, 28672 hidden, 80 layers, 64 heads and 8 kv heads of 128, 128256 tokens. 256 weights take 148
# bytes as kernels hold q4_k (144 in a file), and 210 in q6_k, which is what the head has.
Q4, Q6 = 148 / 256, 210 / 256
LAYER = int((2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192) * Q4)
STORED = LAYER * 144 // 148
TABLE, HEAD = int(128256 * 8192 * Q4), int(128256 * 8192 * Q6)


def plan_of_70b(run_task: RunTask, *overrides: str) -> dict[str, Any]:
    return run_task(*SEVENTY, *ANYWHERE, *overrides).record


def test_a_70b_under_14_gib_of_device_memory_is_planned_without_a_gpu(run_task: RunTask) -> None:
    record = plan_of_70b(run_task, "streaming=auto", *GPU)
    assert (record["device"], record["fits"]) == ("cuda:0", True)
    places = {group["name"]: (group["bytes"], group["place"]) for group in record["groups"]}
    assert places["layers.40"][0] == LAYER == 494_665_728
    assert places["embed_tokens"] == (TABLE, "gathered")
    assert places["head"] == (HEAD, "streamed")
    # A key or value tensor has 8 heads x 4096 tokens x 128 x 2 bytes, 8 MiB: two share one of torch's 20 MiB segments.
    # The table of pages is in one of 2 MiB.
    assert record["memory"]["kv_bytes"] == (80 * 20 + 2) * (1 << 20)
    kept = sum(place == "resident" for name, (_, place) in places.items() if name.startswith("layers."))
    assert record["memory"]["total_bytes"] <= record["budget_bytes"] == int(14 * GIB * 0.95)
    assert record["budget_bytes"] - record["memory"]["total_bytes"] < LAYER  # one more would not fit
    moved = (80 - kept) * LAYER + HEAD
    assert record["streaming"]["bytes_per_token"] == moved
    assert record["streaming"]["source"] == "host"
    predicted = record["predicted"]
    assert predicted["copy_seconds"] == pytest.approx(moved / 25e9)
    assert predicted["compute_seconds"] == pytest.approx((80 * LAYER + HEAD) / (0.8 * 1000e9), rel=1e-3)  # norms
    assert predicted["tokens_per_second"] == pytest.approx(25e9 / moved)
    # What streams waits in RAM, with the table; memory that cannot be locked takes two slots and read buffers more.
    assert moved + TABLE <= record["memory"]["ram_bytes"] < moved + TABLE + 2 * HEAD + (64 << 20)


def test_a_70b_with_128k_tokens_of_4_bit_keys_and_values_is_planned_under_14_gib(run_task: RunTask) -> None:
    record = run_task(*SEVENTY[:-1], *ANYWHERE, "context_length=131072", "kv_dtype=q4_0", "streaming=on", *GPU).record
    assert record["fits"] is True
    assert record["kv_dtype"] == "q4_0"
    assert record["memory"]["total_bytes"] < 14 * GIB
    # 80 layers, keys and values, 131072 tokens, 8 heads of 128 numbers: 18 bytes for 32 of them. Each of 160
    # tensors is in a segment of torch's, which is up to 2 MiB larger; so is the table of pages.
    codes = 80 * 2 * 131072 * 8 * 128 // 32 * 18
    assert codes < record["memory"]["kv_bytes"] < codes + 161 * 2 * (1 << 20) + 1


def test_an_8b_shape_holds_128k_tokens_of_8_bit_keys_and_values_in_8_6_gib(tmp_path: Path) -> None:
    settings = compose_settings(["model=llama3_8b", "model.checkpoint='random:q4_k'"])
    spec = open_model(settings.model, 0, tmp_path, lambda *_: None).spec
    codes = 32 * 2 * 131072 * 8 * 128 // 32 * 34
    nbytes = cache_nbytes(spec, CacheSizes(1, 131072, KVTypes("q8_0", "q8_0")))
    pages = 131072 // 64
    assert nbytes == codes + codes // pages + pages * 4 < 8.6 * GIB  # with a page to spare, and the table


def test_files_feed_a_gpu_no_faster_than_the_disk(run_task: RunTask) -> None:
    record = plan_of_70b(run_task, "streaming=on", "streaming.source=disk", "task.disk=2GB", *GPU)
    read = 80 * STORED + HEAD
    assert record["streaming"]["source"] == "disk"
    assert record["predicted"]["copy_seconds"] == pytest.approx(read / 2e9)
    assert record["memory"]["ram_bytes"] < 3 * HEAD


def test_ram_that_is_too_small_is_refused_with_what_it_takes_where_it_is_asked_for(run_task: RunTask) -> None:
    sizes = (*SEVENTY, *ANYWHERE, "streaming=auto", "task.device_memory=14GiB", "task.ram=16GiB")
    assert run_task(*sizes).record["streaming"]["source"] == "disk"
    run = run_task(*sizes, "streaming.source=host")
    assert run.status == 1
    assert "streaming.source=host needs" in str(run.error)
    assert "use streaming.source=disk" in str(run.error)


def test_a_machine_without_a_gpu_streams_from_its_disk(run_task: RunTask) -> None:
    asked = ("streaming=on", "task.ram=8GiB", "task.disk=3GB", "task.bandwidth=50GB/s")
    record = plan_of_70b(run_task, *asked)
    assert (record["device"], record["streaming"]["source"]) == ("cpu", "disk")
    assert record["memory"]["overhead_bytes"] == 0
    # 64 pages of 64 positions, one that is nobody's, and a table of 4 bytes for each
    assert record["memory"]["kv_bytes"] == 80 * 2 * 8 * (4096 + 64) * 128 * 2 + 64 * 4
    assert record["free_bytes"] == 8 * GIB - RESERVE_NBYTES
    moved = record["streaming"]["bytes_per_token"]
    assert moved == pytest.approx(80 * LAYER + HEAD, rel=1e-3)  # the kernels' form pads rows
    assert record["predicted"]["tokens_per_second"] == pytest.approx(3e9 / (80 * STORED + HEAD), rel=1e-3)


# Qwen3-30B-A3B: 48 layers of 128 experts, 8 a token. Three matrices of 768 x 2048 in q4_k, of which
# the kernels keep 148 bytes for 256.
EXPERT = 3 * 768 * 2048 * 148 // 256
MIXTURE = ("task=plan", "model=qwen3_moe", "model.checkpoint='random:q4_k'", "dtype=bf16", "context_length=4096")
DISK_ONLY = ("streaming=auto", "streaming.source=disk", "task.ram=16GiB", "task.bandwidth=50GB")


def test_experts_that_are_not_hit_take_the_disk_s_time(run_task: RunTask) -> None:
    cache = f"streaming.expert_cache={6144 // 4 * EXPERT}"  # a quarter of all experts
    record = run_task(*MIXTURE, *ANYWHERE, *DISK_ONLY, cache, "task.disk=3GB").record
    assert (record["streaming"]["groups"], record["streaming"]["expert_slots"]) == (0, 6144 // 4)
    assert record["streaming"]["bytes_per_token"] == 48 * 8 * EXPERT
    assert record["streaming"]["expert_hit_rate"] == pytest.approx(0.77)
    fetched = 48 * 8 * EXPERT * 144 / 148 * 0.23 / 3e9
    assert record["predicted"]["fetch_seconds"] == pytest.approx(fetched)
    speed = record["predicted"]["tokens_per_second"]
    assert 1 / speed == pytest.approx(fetched + record["predicted"]["compute_seconds"])


def test_experts_in_files_need_the_disk_s_rate(run_task: RunTask, capsys: pytest.CaptureFixture[str]) -> None:
    record = run_task(*MIXTURE, *ANYWHERE, *DISK_ONLY).record
    assert record["predicted"]["tokens_per_second"] is None
    assert "give task.disk" in capsys.readouterr().err


def test_without_rates_the_plan_is_made_and_the_speed_left_out(
    run_task: RunTask, capsys: pytest.CaptureFixture[str]
) -> None:
    record = plan_of_70b(run_task, "streaming=auto", "task.device_memory=14GiB", "task.ram=64GiB")
    assert record["fits"] is True
    assert record["predicted"]["tokens_per_second"] is None
    assert "tokens/s are left out: give task.bandwidth and task.link" in capsys.readouterr().err
    assert record["planned_for"] == {
        "this_machine": False,
        "device_memory_bytes": 14 * GIB,
        "ram_bytes": 64 * GIB - RESERVE_NBYTES,
        "link_bytes_per_second": None,
        "disk_bytes_per_second": None,
        "bandwidth_bytes_per_second": None,
    }


def test_what_fits_streams_nothing_and_needs_the_bandwidth_alone(run_task: RunTask) -> None:
    record = plan_of_70b(run_task, "streaming=off", "task.device_memory=80GiB", "task.bandwidth=2000GB")
    assert record["streaming"]["bytes_per_token"] == 0
    read = 80 * LAYER + HEAD
    assert record["predicted"]["tokens_per_second"] == pytest.approx(0.8 * 2000e9 / read, rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["device=cpu", "task.device_memory=14GiB"], "device=cpu contradicts the machine that task=plan describes"),
        (["device=cuda", "task.ram=14GiB"], "give task.gpu or task.device_memory, too"),
        (["device=auto", "task.device_memory=0"], "task.device_memory=0 must be more than 0 bytes"),
        (["task.ram=8GiB", "streaming=on", "streaming.memory_budget=9GiB"], "8.00 GiB in all"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(run_task: RunTask, overrides: list[str], said: str) -> None:
    assert said in str(run_task("task=plan", f"model.checkpoint={TINY / 'llama3'}", *overrides).error)


def test_a_plan_reads_the_file_s_bytes_at_the_disk_s_rate(tmp_path: Path, run_task: RunTask) -> None:
    """Slots hold three bits and a half for each weight, where the file has two."""
    _, path = low_bit_file(tmp_path / "model.gguf", ["iq2_xxs"], SHAPES[1], seed=3)
    speeds = ("task.disk=1MB", "task.bandwidth=10GB")
    options = ("device=cpu", "streaming=on", "streaming.source=disk", "context_length=64")
    record = run_task("task=plan", f"model.checkpoint={path}", *options, *speeds).record
    sizes = {one.name: int(one.n_bytes) for one in gguf.GGUFReader(path).tensors}
    read = sum(nbytes for name, nbytes in sizes.items() if name.startswith("blk.") and nbytes > 4096)
    read += sizes["output.weight"]
    assert record["predicted"]["copy_seconds"] == pytest.approx(read / 1e6, rel=1e-3)
    assert record["streaming"]["bytes_per_token"] > 1.5 * read


def test_a_plan_for_a_gpu_moves_the_file_s_bytes_and_counts_the_buffer_that_they_arrive_in(
    tmp_path: Path, run_task: RunTask
) -> None:
    """A block of iq2_xxs has 66 bytes in the file, in RAM and on the link, and 114 in a slot."""
    _, path = low_bit_file(tmp_path / "model.gguf", ["iq2_xxs"], SHAPES[1], seed=3)
    sizes = {one.name: int(one.n_bytes) for one in gguf.GGUFReader(path).tensors}
    read = sum(nbytes for name, nbytes in sizes.items() if name.startswith("blk.") and nbytes > 4096)
    head = sizes["output.weight"] * 114 // 66  # whose rows move in slices, as they are in slots
    options = ("streaming=on", "context_length=64", "task.disk=1MB", "streaming.prefetch=0", *ANYWHERE, *GPU)
    records = {
        source: run_task("task=plan", f"model.checkpoint={path}", f"streaming.source={source}", *options).record
        for source in ("disk", "host")
    }
    layer = read // 2
    for record in records.values():
        assert record["streaming"]["bytes_per_token"] == pytest.approx(read + head, rel=1e-2)
        assert record["memory"]["slot_bytes"] == pytest.approx(layer * 114 / 66 + layer, rel=1e-2)
    assert records["disk"]["predicted"]["copy_seconds"] == pytest.approx(
        (read + sizes["output.weight"]) / 1e6, rel=1e-2
    )
    expanded = read * (1 + 114 / 66) / (PRODUCT_SHARE * 1000e9)
    copied = records["host"]["predicted"]["copy_seconds"]
    assert copied == pytest.approx((read + head) / 25e9 + expanded, rel=1e-2)
