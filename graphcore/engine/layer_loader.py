"""Loads a model's layer groups into slots of a device one by one, when the caller says so.

    slot A   load 0       evict 0  prefetch 2       load 2      group g has slot g mod num_slots; the weights of
    slot B   prefetch 1            load 1      evict 1          its layers are views of that slot

An `Engine` does the same by itself (streaming/streamed.py), over the same fillers; this is for programs that run layers
in an order of their own.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from graphcore.device import dtype_name
from graphcore.engine.arguments import check_count, is_whole, load_settings
from graphcore.engine.loading.load_model import LoadedModel, load_model
from graphcore.engine.program_runner import ProgramRunner
from graphcore.errors import ConfigError
from graphcore.nn.block import Block
from graphcore.progress import Progress, ignore_progress
from graphcore.streaming.filler import SlotFill
from graphcore.streaming.streamed import Streamed


class LayerLoader:
    """The layer groups of a model, of which a few at a time have their weights on the device.

    `LayerLoader.load` opens one; `close`, or the end of a `with` block, frees its memory. One thread may call it. The
    slots are allocated once, so device memory does not grow. Vectors, such as norms and biases, are always on the
    device; the experts of a mixture are in no group, because an `Engine` fetches them one by one.

    Attributes:
        num_groups: int, number of layer groups.
        layers_per_group: int, layers of a group; the last group may have fewer.
        num_slots: int, groups that can be loaded at once; group g has slot g mod num_slots.
    """

    def __init__(self, loaded: LoadedModel, layers_per_group: int) -> None:
        policy, runner = loaded.weight_stream.policy, loaded.runner
        assert isinstance(policy, Streamed), "with streaming=on all groups move"
        assert isinstance(runner, ProgramRunner), "LayerLoader.load refuses other models"
        self._loaded, self._ring = loaded, policy.ring
        self._layers = [block for block in runner.builder.decoder.layers if isinstance(block, Block)]
        self._groups = loaded.weight_stream.moving.layer_groups
        self.num_groups, self.layers_per_group = len(self._groups), layers_per_group
        self.num_slots = self._ring.num_slots
        self._held: dict[int, SlotFill] = {}  # by group, from its first prefetch until it is evicted
        self._last: dict[int, SlotFill] = {}  # by slot
        self._is_closed = False

    @classmethod
    def load(
        cls,
        source: str | Path,
        dtype: str | torch.dtype = "auto",
        quant: str = "stored",
        layers_per_group: int = 1,
        num_slots: int = 2,
        device: str = "auto",
        overrides: str | Sequence[str] = (),
        on_progress: Progress | None = None,
    ) -> Self:
        """Open a checkpoint. Its layers are read when they are loaded.

        Args:
            source, dtype, quant, device, overrides, on_progress: as for `Engine.load`.
            layers_per_group: consecutive layers that are loaded together.
            num_slots: groups that can be loaded at once, 1 to 9; 2 lets one come while another is used.

        Raises:
            GraphcoreError: a setting, the checkpoint or the machine stands in the way; the message says what to do.
        """
        check_count("layers_per_group", layers_per_group)
        check_count("num_slots", num_slots)
        options = {"dtype": dtype_name(dtype), "quant": quant, "streaming": "on", "device": device, "graph": "eager"}
        given = [overrides] if isinstance(overrides, str) else list(overrides)
        groups = [f"streaming.layer_group_size={layers_per_group}", f"streaming.prefetch={num_slots - 1}"]
        smallest = "context_length=16"  # no token runs, so that the KV cache is never used
        settings = load_settings(source, options, [smallest, *groups, *given])
        if settings.model.fallback is not None:
            raise ConfigError("LayerLoader: a transformers model loads its layers by itself; leave out model.fallback")
        return cls(load_model(settings, on_progress or ignore_progress), layers_per_group)

    def layers_of(self, group: int) -> range:
        """Return the numbers of a group's layers.

        Raises:
            ConfigError: there is no such group.
        """
        if not is_whole(group) or not 0 <= group < self.num_groups:
            raise ConfigError(f"there is no layer group {group!r}; give 0 to {self.num_groups - 1}")
        return self._groups[group].layers

    def load_group(self, group: int) -> list[Block]:
        """Return the layers of a group once all later work on the device finds their weights.

        A prefetched group is waited for, one that is loaded already is returned as it is.

        Args:
            group: number of the group, from 0 on.

        Returns:
            Modules whose matrices are views of the group's slot, with Hugging Face's leaf names (q_proj.weight). They
            hold these weights until `evict_group`.

        Raises:
            ConfigError: there is no such group, another one is in its slot, or the loader is closed.
            CheckpointError: a file changed, or cannot be read.
            StreamingError: no thread can read any more, or the device has failed.
        """
        self.prefetch_async(group)
        self._wait(group)
        return [self._layers[layer] for layer in self.layers_of(group)]

    def prefetch_async(self, group: int) -> None:
        """Begin to load a group, and return at once; `load_group` or `sync` waits for it.

        Raises:
            ConfigError: as for `load_group`.
        """
        self._check_open()
        self.layers_of(group)
        if group in self._held:
            return
        slot = group % self.num_slots
        other = next((held for held in self._held if held % self.num_slots == slot), None)
        if other is not None:
            raise ConfigError(
                f"layer group {group} needs the slot of layer group {other}, which is loaded; call "
                f"evict_group({other}) first, or load with num_slots above {self.num_slots}"
            )
        number = group + 1  # group 0 of the ring's numbers is the embedding
        filling = self._ring.filler.begin(number, self._ring.work[number], self._last.get(slot))
        self._held[group] = self._last[slot] = filling

    def sync(self) -> None:
        """Wait for all groups that were prefetched.

        Raises:
            ConfigError: the loader is closed.
            CheckpointError, StreamingError: as for `load_group`.
        """
        self._check_open()
        for group in list(self._held):
            self._wait(group)

    def evict_group(self, group: int) -> None:
        """Free a group's slot for the next group, behind all work on the device so far; nothing if it is not loaded.

        Raises:
            ConfigError: there is no such group, or the loader is closed.
        """
        self._check_open()
        self.layers_of(group)
        filling = self._held.pop(group, None)
        if filling is None:
            return
        if filling.is_full:
            self._ring.filler.release(filling)
        else:
            self._ring.filler.cancel([filling])

    def close(self) -> None:
        """Stop reading and free the slots; the loader and its layers cannot be used any more."""
        self._is_closed = True
        self._held.clear()
        self._loaded.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, group: int) -> None:
        filling = self._held[group]
        try:
            self._ring.filler.wait(filling)
        except BaseException:  # Ctrl-C too: the group can be loaded anew
            self._held.pop(group)
            self._ring.filler.cancel([filling])
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this layer loader is closed; load it again")
