"""A machine with less memory measures fewer layers; what fits is compared with the planner's own bytes."""

from pathlib import Path

import pytest
import torch
from suite.fitting import DEVICE_RESERVE, GIB, RAM_RESERVE, Room, layers_that_fit, shape_of
from suite.machine import locked_row, ram_in_words
from suite.peers import PACKED_BESIDE_DENSE
from suite.shapes import TRUE, model_overrides

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import match_model
from graphcore.kernels.backend import TorchBackend
from graphcore.kvcache.sizes import PAGE, CacheSizes, cache_nbytes, page_size
from graphcore.planning.sizes import sizes_of
from graphcore.weights.packed_weights import PackingPolicy

pytestmark = pytest.mark.thorough

H100 = Room(79 * GIB, 120 * GIB)
MODELS = [
    ("llama3_8b", "bf16"),
    ("llama3_8b", "q8_0"),
    ("llama3_8b", "q4_k"),
    ("llama3_70b", "q4_k"),
    ("llama2_7b", "i2_s"),
    ("gpt_oss", "bf16"),
    ("bitnet", "bf16"),
]


def config_of(model: str, format_name: str) -> dict:
    return compose_settings(model_overrides(model, f"random:{format_name}", False)).model.random_config


@pytest.mark.parametrize(("model", "format_name"), MODELS)
def test_bytes_are_the_planners_within_some_percent(model: str, format_name: str) -> None:
    settings = compose_settings(model_overrides(model, f"random:{format_name}", False))
    opened = open_model(settings.model, 0, Path("unused"), lambda *_: None)
    decoder, loader = match_model(opened, torch.bfloat16, PackingPolicy(TorchBackend(), "wide", "stored"))
    shape = shape_of(settings.model.random_config, format_name)
    total = shape.tables + shape.layers * shape.layer
    assert total == pytest.approx(sizes_of(decoder, loader.is_tied).total_nbytes, rel=0.1)
    tokens = PAGE  # fewer than any window; the table has one page, in four bytes
    page = page_size(tokens)  # one is nobody's, and the table has 4 bytes for each of the others
    assert shape.kv * shape.layers * (tokens + page) + 4 * tokens // page == cache_nbytes(
        opened.spec, CacheSizes(1, tokens, torch.bfloat16)
    )


@pytest.mark.parametrize(("model", "format_name"), MODELS)
def test_a_machine_that_the_suite_is_made_for_measures_true_shapes(model: str, format_name: str) -> None:
    shape = shape_of(config_of(model, format_name), format_name)
    assert layers_that_fit(shape, H100, ("off", "on"), TRUE.long_prompt) == shape.layers
    assert layers_that_fit(shape, Room(14 * GIB, 120 * GIB), ("auto",), TRUE.long_prompt) == shape.layers


def test_8b_at_128k_and_beside_its_peers_is_whole_on_80_gb() -> None:
    shape = shape_of(config_of("llama3_8b", "bf16"), "bf16")
    assert layers_that_fit(shape, H100, ("off",), TRUE.context) == shape.layers
    assert layers_that_fit(shape, H100, ("off",), TRUE.prompt + TRUE.new, copies=3) == shape.layers


def test_gpt_oss_is_whole_beside_a_peer_that_unpacks_it_on_80_gb() -> None:
    packed, dense = (shape_of(config_of("gpt_oss", "bf16"), "bf16", is_dense) for is_dense in (False, True))
    assert packed.tables + packed.layers * packed.layer < (PACKED_BESIDE_DENSE - 1) * dense.layers * dense.layer
    tokens = TRUE.prompt + TRUE.new
    assert layers_that_fit(dense, H100, ("off",), tokens, copies=PACKED_BESIDE_DENSE) == dense.layers
    assert layers_that_fit(dense, H100, ("off",), tokens, copies=2) < dense.layers


@pytest.mark.parametrize("way", ["off", "on", "auto"])
def test_as_many_layers_fit_as_there_is_memory_for(way: str) -> None:
    shape = shape_of(config_of("llama3_70b", "q4_k"), "q4_k")
    room = Room(12 * GIB, 20 * GIB)
    layers = layers_that_fit(shape, room, (way,), 1024)
    assert 1 < layers < shape.layers
    device, ram = room.device - DEVICE_RESERVE, room.ram - RAM_RESERVE
    most = {"off": device, "on": ram, "auto": device + ram}[way]

    def nbytes(count: int) -> int:
        kv = 0 if way == "on" else shape.kv * 1024
        return shape.tables + count * (shape.layer + kv)

    assert nbytes(layers) <= most < nbytes(layers + 1)
    assert layers_that_fit(shape, Room(0, 0), (way,), 1024) == 1


class Quota:
    """A machine that locks that many bytes and no more."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self.locked: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> str:
        if nbytes > self.left:
            return "out of memory"
        self.left -= nbytes
        self.locked[address] = nbytes
        return ""

    def unregister(self, address: int) -> None:
        self.left += self.locked.pop(address)

    def device_address(self, address: int) -> int:
        return address


def test_what_can_be_locked_is_found_by_locking_it_and_given_back() -> None:
    chunk, quota = 1 << 20, Quota(5 << 20)
    row = locked_row(quota, 9 << 20, 60.0, chunk)
    assert row.values == [5 / 1024]
    assert "then the machine refused: out of memory" in row.note
    assert not quota.locked
    assert locked_row(Quota(99 << 20), 3 << 20, 60.0, chunk).values == [3 / 1024]
    assert "stopped after 0 s" in locked_row(Quota(99 << 20), 3 << 20, 0.0, chunk).note


def test_ram_is_said_in_gib_and_a_quota_that_is_none_as_no_limit() -> None:
    ram = {"machine": 128 * GIB, "control_group": 96 * GIB, "free": 90 * GIB, "lock_quota": None}
    assert ram_in_words(ram) == (
        "RAM 128.00 GiB, control group 96.00 GiB, free 90.00 GiB; may be locked (ulimit -l) no limit"
    )
