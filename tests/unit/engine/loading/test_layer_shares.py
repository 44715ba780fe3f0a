"""What a rank says of itself, and the shares of layers that follow."""

from pathlib import Path

import pytest
from support.packed_matrices import native_kernels
from support.tiny_models import save_tiny

from graphcore.config.compose import compose_settings
from graphcore.config.settings import Settings
from graphcore.engine.loading.layer_shares import capacity_of, requirements_of, share_layers, shares_note
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import prepare_model
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.parallel.capacity import Requirement
from graphcore.parallel.share import Share
from graphcore.planning.machine import CPU, Machine, Speeds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    made = tmp_path_factory.mktemp("shares")
    save_tiny("llama3", made)
    return made


def prepared(folder: Path, *overrides: str) -> tuple[Settings, PreparedDecoder]:
    """Return settings of a ring and a prepared model."""
    native_kernels()
    settings = compose_settings(["device=cpu", "dtype=fp32", "parallel=ring", "context_length=64", *overrides])
    settings.model.checkpoint = str(folder)
    model = open_model(settings.model, 0, folder, lambda stage, done, total: None)
    return settings, prepare_model(settings, model)


def test_the_rate_of_memory_is_measured_where_machines_may_differ(folder: Path) -> None:
    settings, parts = prepared(folder, "streaming=off")
    capacity = capacity_of(settings, parts, Machine.here(CPU), Speeds(), is_interleaved=False)
    assert capacity.memory is not None
    assert 1e8 < capacity.memory < 1e13
    assert capacity.disk is None
    same = capacity_of(settings, parts, Machine.here(CPU), Speeds(), is_interleaved=False, is_one_machine=True)
    assert (same.memory, same.disk) == (None, None)


def test_nothing_is_measured_for_a_split(folder: Path) -> None:
    for is_interleaved in (False, True):
        settings, parts = prepared(folder, "streaming=auto", "parallel.split=[2,1]")
        capacity = capacity_of(settings, parts, Machine.here(CPU), Speeds(), is_interleaved)
        assert (capacity.memory, capacity.disk) == (None, None)


def test_resident_layers_follow_the_measured_rates(folder: Path) -> None:
    settings, parts = prepared(folder, "streaming=off", "model.num_hidden_layers=3")
    machine = Machine.here(CPU)
    slow, quick = (
        capacity_of(settings, parts, machine, Speeds(bandwidth=rate), is_interleaved=False) for rate in (1e9, 2e11)
    )
    assert share_layers(settings, parts, [slow, quick], is_interleaved=False) == (0, 1, 1)
    assert share_layers(settings, parts, [quick, slow], is_interleaved=False) == (0, 0, 1)
    note = shares_note(Share(0, (0, 1, 1), (slow, quick)), [0, 0])
    assert note == "2 ranks have 1, 2 layers, and a pass has 2 hand-overs; nothing streams, and memory is read at " + (
        "762.9 MiB/s, 149.0 GiB/s"
    )


def test_an_expert_cache_that_is_set_limits_the_experts_of_each_rank(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path)
    machine, speeds = Machine.here(CPU), Speeds(disk=1e9, bandwidth=1e10)
    found = {}
    for cache in ("auto", "0", "1MB"):
        settings, parts = prepared(tmp_path, "streaming=on", f"streaming.expert_cache={cache}")
        found[cache] = capacity_of(settings, parts, machine, speeds, is_interleaved=True)
    assert found["auto"].expert_cache_nbytes is None
    fewest = found["auto"].streaming_nbytes - found["0"].streaming_nbytes
    assert found["0"].expert_cache_nbytes == fewest > 0
    assert found["1MB"].expert_cache_nbytes == 1_000_000
    assert found["1MB"].streaming_nbytes == found["0"].streaming_nbytes


def test_layers_without_caches_of_their_own_need_only_their_weights(tmp_path: Path) -> None:
    save_tiny("gemma4", tmp_path)
    settings, parts = prepared(tmp_path, "streaming=on")
    ends, layers = requirements_of(parts, settings.streaming.keeps)
    lenders = parts.decoder.spec.cache_layers
    own = [layer for layer, lender in enumerate(lenders) if layer == lender]
    assert 1 < len(own) < len(layers)
    least = min(layers[layer].kept_nbytes for layer in own)
    assert all(layers[layer].kept_nbytes < least for layer in range(len(layers)) if layer not in own)
    total = Requirement.sum(layers)
    assert total.read_nbytes + ends.read_nbytes <= total.held_nbytes + ends.held_nbytes
