"""`LayerLoader` brings a checkpoint's layers into slots and out again: to the bit, side by side, in fixed memory."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.fake_sources import Wrapped
from support.tiny_models import TinyModel
from torch import Tensor, nn

from graphcore import LayerLoader
from graphcore.errors import ConfigError, GraphcoreError

Tiny = Callable[[str], TinyModel]
GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"
SECONDS = 10.0  # in which a thread must have come somewhere


def load(path: Path, *overrides: str, **sizes: int) -> LayerLoader:
    given = ["streaming.source=disk", *overrides]
    return LayerLoader.load(path, dtype="fp32", device="cpu", overrides=given, **sizes)


def stored(folder: Path, prefix: str = "model.") -> dict[str, Tensor]:
    """Return a folder's tensors, as safetensors reads them, without the prefix of their names."""
    found = load_file(folder / "model.safetensors")
    return {name.removeprefix(prefix): tensor.float() for name, tensor in found.items()}


def matrices(layer: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in layer.named_buffers() if tensor.ndim > 1}


def check(loader: LayerLoader, group: int, expected: dict[str, Tensor]) -> int:
    """Compare a group's matrices with those of a file; return how many there were."""
    count = 0
    for index, layer in zip(loader.layers_of(group), loader.load_group(group), strict=True):
        for name, matrix in matrices(layer).items():
            assert torch.equal(matrix, expected[f"layers.{index}.{name}"]), name
            count += 1
    return count


class Gate:
    """Reads of a loader's files wait for it while it is closed."""

    def __init__(self, loader: LayerLoader) -> None:
        self.is_waited_for, self._opened = threading.Event(), threading.Event()
        self._opened.set()
        files = loader._loaded.weight_stream.files
        for path, source in list(files.items()):
            files[path] = Wrapped(source, self._pass)

    def _pass(self, _number: int) -> None:
        if not self._opened.is_set():
            self.is_waited_for.set()
            assert self._opened.wait(SECONDS)

    def close(self) -> None:
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def loader(tiny_model: Tiny) -> Iterator[LayerLoader]:
    with load(tiny_model("llama3").folder) as loader:
        yield loader


@pytest.mark.parametrize("layers_per_group", [1, 2])
@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2", "qwen3", "gemma3"])
def test_groups_hold_what_the_files_say_in_any_order(name: str, layers_per_group: int, tiny_model: Tiny) -> None:
    folder = tiny_model(name).folder
    num_layers = tiny_model(name).reference.config.num_hidden_layers
    with load(folder, layers_per_group=layers_per_group) as loader:
        assert loader.num_groups == -(-num_layers // layers_per_group)
        assert loader.layers_per_group == layers_per_group
        layers = [layer for group in range(loader.num_groups) for layer in loader.layers_of(group)]
        assert layers == list(range(num_layers))
        for group in [*range(loader.num_groups), *reversed(range(loader.num_groups)), 0, 0]:
            assert check(loader, group, stored(folder)) == 7 * len(loader.layers_of(group))
            loader.evict_group(group)


def test_groups_of_a_gguf_file_hold_what_the_folder_says() -> None:
    with load(GOLDEN / "llama3.gguf") as loader:
        for group in range(loader.num_groups):
            assert check(loader, group, stored(GOLDEN / "llama3")) == 7
            loader.evict_group(group)


def test_a_group_comes_while_another_one_is_used(loader: LayerLoader, tiny_model: Tiny) -> None:
    expected, gate = stored(tiny_model("llama3").folder), Gate(loader)
    loader.load_group(0)
    gate.close()
    loader.prefetch_async(1)  # returns, although nothing can be read
    assert gate.is_waited_for.wait(SECONDS)
    assert check(loader, 0, expected)
    waiting = threading.Thread(target=loader.sync)
    waiting.start()
    assert not loader._held[1].is_full
    gate.open()
    waiting.join(SECONDS)
    assert not waiting.is_alive()
    gate.close()
    assert check(loader, 1, expected)  # nothing is read any more


def test_eviction_gives_the_slot_to_the_next_group(loader: LayerLoader, tiny_model: Tiny) -> None:
    expected = stored(tiny_model("llama3").folder)
    first, second = loader.load_group(0)[0], loader.load_group(1)[0]
    for call in (loader.load_group, loader.prefetch_async):
        with pytest.raises(ConfigError, match=r"group 2 needs the slot of layer group 0.*evict_group\(0\)"):
            call(2)
    assert check(loader, 0, expected)
    assert check(loader, 1, expected)
    loader.evict_group(0)
    third = loader.load_group(2)[0]
    places = [[matrix.data_ptr() for matrix in matrices(layer).values()] for layer in (first, second, third)]
    assert places[2] == places[0] != places[1]
    assert check(loader, 1, expected)
    loader.evict_group(0)  # it is no longer there
    assert check(loader, 2, expected)


def test_device_memory_does_not_grow(tiny_model: Tiny) -> None:
    folder = tiny_model("gemma3").folder
    with load(folder, num_slots=3) as loader:
        assert loader.num_slots == 3
        storages = set()
        for number in range(40):
            group = number % loader.num_groups
            for layer in loader.load_group(group):
                storages |= {matrix.untyped_storage().data_ptr() for matrix in matrices(layer).values()}
            if number % loader.num_groups == loader.num_groups - 1:
                for held in range(loader.num_groups):
                    loader.evict_group(held)
            elif group >= 2:
                loader.evict_group(group - 2)
        memory = matrices(layer)["mlp.up_proj.weight"].untyped_storage()
        assert storages == {memory.data_ptr()}  # one allocation, made at load
        largest = sum(tensor.nbytes for name, tensor in stored(folder).items() if name.startswith("layers.0."))
        assert memory.nbytes() < 3.2 * largest


def test_a_prefetch_that_is_evicted_leaves_its_slot_to_another(loader: LayerLoader, tiny_model: Tiny) -> None:
    gate = Gate(loader)
    gate.close()
    loader.prefetch_async(0)
    assert gate.is_waited_for.wait(SECONDS)
    gate.open()
    loader.evict_group(0)
    assert check(loader, 2, stored(tiny_model("llama3").folder))


def test_a_group_that_could_not_be_read_is_read_again(loader: LayerLoader, tiny_model: Tiny) -> None:
    files = loader._loaded.weight_stream.files
    sources = dict(files)
    for path, source in sources.items():
        files[path] = Wrapped(source, lacking=1)
    with pytest.raises(GraphcoreError):
        loader.load_group(1)
    files.update(sources)
    assert check(loader, 1, stored(tiny_model("llama3").folder))


def test_a_group_may_be_a_number_of_numpys(loader: LayerLoader) -> None:
    assert loader.load_group(np.int64(1)) == loader.load_group(1)
    loader.evict_group(np.int32(1))


@pytest.mark.parametrize("group", [-1, 3, np.int64(3), np.bool_(True), True, "0", 1.0, None])
def test_a_group_that_is_none_is_refused(group: object, loader: LayerLoader) -> None:
    for call in (loader.load_group, loader.prefetch_async, loader.evict_group, loader.layers_of):
        with pytest.raises(ConfigError, match=r"there is no layer group .*; give 0 to 2"):
            call(group)


def test_a_closed_loader_says_so(tiny_model: Tiny) -> None:
    before = set(threading.enumerate())
    with load(tiny_model("llama3").folder) as loader:
        loader.prefetch_async(0)
    loader.close()
    assert set(threading.enumerate()) <= before
    for call in (lambda: loader.load_group(0), lambda: loader.prefetch_async(0), lambda: loader.evict_group(0),
                 loader.sync):  # fmt: skip
        with pytest.raises(ConfigError, match="this layer loader is closed"):
            call()


def test_what_a_loader_cannot_do_is_refused(tiny_model: Tiny) -> None:
    folder = tiny_model("llama3").folder
    with pytest.raises(ConfigError, match="layers_per_group=0"):
        load(folder, layers_per_group=0)
    with pytest.raises(ConfigError, match="num_slots=0"):
        load(folder, num_slots=0)
    with pytest.raises(ConfigError, match="LayerLoader: a transformers model"):
        load(folder, "model.fallback=transformers")
    with pytest.raises(ConfigError, match="contradicts streaming='on'"):
        load(folder, "streaming=off")


def test_loading_reports_progress(tiny_model: Tiny) -> None:
    seen: list[str] = []
    with LayerLoader.load(
        tiny_model("llama3").folder, device="cpu", on_progress=lambda stage, *_: seen.append(stage)
    ) as loader:
        assert loader.load_group(0)
    assert "load" in seen
