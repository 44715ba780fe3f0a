"""Keys and values in files: the bits of those in memory, where they go, and what is refused.

test_engine_matrix.py runs every property of sequences with offloaded caches, in its streamed engines.
"""

import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.golden_models import golden_ids, golden_logits, write_checkpoint
from support.packed_matrices import native_kernels

from graphcore import Engine
from graphcore.errors import ConfigError, PlanError
from graphcore.host_pages import file_pages, is_in_ram, is_of_file
from graphcore.weights.plan import Plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="keys and values are offloaded on Linux only")

CONTEXT = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    native_kernels()
    return write_checkpoint("dense", tmp_path_factory.mktemp("offloaded") / "dense")


def load(folder: Path, *settings: str) -> Engine:
    sizes = "prefill_chunk=16", "threads=1", f"context_length={CONTEXT}"
    return Engine.load(folder, dtype="fp32", device="cpu", overrides=[*sizes, *settings])


def offloaded_layers(plan: Plan) -> set[int]:
    return set() if plan.offloaded_kv is None else set(plan.offloaded_kv.layers)


@pytest.mark.parametrize("graph", ["auto", "eager"])
def test_resident_weights_over_offloaded_caches_give_the_bits_of_caches_in_memory(folder: Path, graph: str) -> None:
    ids = golden_ids()
    with load(folder, f"graph={graph}") as inside:
        expected = [inside.logits(ids), inside.logits(ids, by_token=True)]
        answers = inside.generate(ids.tolist(), 9, ignore_eos=True)
    with load(folder, f"graph={graph}", "streaming=auto", "streaming.kv_memory_budget=0") as engine:
        assert offloaded_layers(engine.plan) == {0, 1}
        assert not engine.plan.is_streaming
        found = [engine.logits(ids), engine.logits(ids, by_token=True)]
        again = engine.generate(ids.tolist(), 9, ignore_eos=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert [one.token_ids for one in again] == [one.token_ids for one in answers]
    assert (found[0] - golden_logits("dense")).abs().max() < 3e-5


def test_auto_offloads_only_a_context_that_was_asked_for_and_does_not_fit_otherwise(folder: Path) -> None:
    with pytest.raises(PlanError) as refused:
        load(folder, "streaming=on", "streaming.memory_budget=1kB")
    least = int(str(refused.value).partition(f"works at context_length={CONTEXT} is ")[2].split()[0])
    with load(folder, "streaming=on", f"streaming.memory_budget={least}B") as engine:
        assert offloaded_layers(engine.plan) == {0, 1}
        (note,) = [one for one in engine.notes if "does not fit in the budget" in one]
        assert "that of 2 of 2 layers, " in note
        assert engine.plan.total_nbytes <= least
        one_layer = engine.plan.offloaded_kv.nbytes // 2  # type: ignore[union-attr]
    with load(folder, "streaming=on", f"streaming.memory_budget={least + one_layer}B") as engine:
        assert offloaded_layers(engine.plan) == {1}
    with load(folder, "streaming=on", f"streaming.memory_budget={least + 2 * one_layer}B") as engine:
        assert offloaded_layers(engine.plan) == set()


def test_files_have_no_names_and_their_space_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    reserve = os.posix_fallocate

    def note(file: int, begin: int, nbytes: int) -> None:
        reserved.append(nbytes)
        reserve(file, begin, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", note)
    pages = file_pages(1 << 20, tmp_path)
    assert reserved == [1 << 20]
    assert list(tmp_path.iterdir()) == []
    assert not pages.any()
    pages.fill_(3)
    assert is_of_file(pages)
    assert is_of_file(pages[8:].view(torch.int64)[1:])
    assert not is_of_file(pages.clone())


def test_a_disk_without_room_is_an_error_that_says_where_and_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "streaming=auto", "streaming.kv_memory_budget=0"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda where: shutil._ntuple_diskusage(10**9, 10**9, 1000))
        with pytest.raises(
            PlanError, match=r"needs \d.* in files in .*swapped, and 1000 bytes are free there; set cache_dir"
        ):
            load(folder, *asked)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PlanError, match=r"in files in .*swapped, and No space left on device; set cache_dir"):
        load(folder, *asked)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in RAM is known")
def test_a_file_system_in_ram_is_no_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_in_ram(Path("/dev/shm"))
    assert not is_in_ram(Path("/proc"))
    monkeypatch.setattr("graphcore.engine.loading.plan_run.is_in_ram", lambda folder: True)
    with pytest.raises(PlanError, match="swapped, and that is a file system in RAM; set cache_dir"):
        load(folder, "streaming=auto", "streaming.kv_memory_budget=0")


def test_a_swapped_out_sequence_without_a_copy_runs_again_where_the_disk_is_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = "batching.max_sequences=3", "batching.cache_tokens=112"
    prompts = [[3 + at, *range(5, 40)] for at in range(3)]
    with load(folder, *sizes, "streaming=auto", "streaming.kv_memory_budget=0") as engine:
        alone = [engine.generate([one], 30, ignore_eos=True)[0].token_ids for one in prompts]
        failed: list[int] = []

        def full(file: int, begin: int, nbytes: int) -> None:
            failed.append(nbytes)
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with engine.holding_back():
            handles = [engine.submit(one, 30, ignore_eos=True) for one in prompts]
        assert [one.result(60).token_ids for one in handles] == alone
        assert failed, "nobody was swapped out"


def test_what_cannot_offload_is_refused_by_name(folder: Path) -> None:
    pytest.importorskip("transformers")
    said = "kv_memory_budget is not possible: transformers' classes keep their own caches in memory; leave it out"
    with pytest.raises(ConfigError, match=said):
        load(folder, "streaming=auto", "streaming.kv_memory_budget=0", "model.fallback=transformers")
