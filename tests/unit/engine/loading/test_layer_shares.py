"""What a rank says of itself, and the shares of layers that follow."""

from pathlib import Path

import pytest
from packed_matrices import native_kernels
from tiny_models import save_tiny

from graphcore.config.compose import compose_settings
from graphcore.config.settings import Settings
from graphcore.engine.loading.layer_shares import offer_of, share_layers, shares_note
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import prepare_model
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.parallel.deal import Share
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
    offer = offer_of(settings, parts, Machine.here(CPU), Speeds(), in_turn=False)
    assert offer.memory is not None
    assert 1e8 < offer.memory < 1e13
    assert offer.disk is None
    same = offer_of(settings, parts, Machine.here(CPU), Speeds(), in_turn=False, is_one_machine=True)
    assert (same.memory, same.disk) == (None, None)


def test_nothing_is_measured_for_a_split(folder: Path) -> None:
    for in_turn in (False, True):
        settings, parts = prepared(folder, "streaming=auto", "parallel.split=[2,1]")
        offer = offer_of(settings, parts, Machine.here(CPU), Speeds(), in_turn)
        assert (offer.memory, offer.disk) == (None, None)


def test_resident_layers_follow_the_measured_rates(folder: Path) -> None:
    settings, parts = prepared(folder, "streaming=off", "model.num_hidden_layers=3")
    machine = Machine.here(CPU)
    slow, quick = (offer_of(settings, parts, machine, Speeds(bandwidth=rate), in_turn=False) for rate in (1e9, 2e11))
    assert share_layers(settings, parts, [slow, quick], in_turn=False) == (0, 1, 1)
    assert share_layers(settings, parts, [quick, slow], in_turn=False) == (0, 0, 1)
    note = shares_note(Share(0, (0, 1, 1), (slow, quick)), [0, 0])
    assert note == "2 ranks have 1, 2 layers, and a pass has 2 hand-overs; nothing streams, and memory is read at " + (
        "800 MB/s, 160 GB/s"
    )
