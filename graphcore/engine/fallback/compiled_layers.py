"""The layers of a transformers model for decode steps, each kind compiled whole: one token of each row, over its cache.

    masks, positions, rotary rows     the model's own forward, eager
    each layer                        compiled; layers of a class share one function, its weights are inputs
    prompts                           eager

Keys and values stay in the model's own cache. Its tensors become views of memory with room behind them, in which a
compiled layer writes the new token's place:

    [ k0 k1 k2 . . . . . ]      [S, B, K, E] memory; the view [B, K, L, E] has strides that depend on neither S nor L,
      <- L ->                   so one compiled function serves all lengths

Layers of a class that torch.compile cannot trace whole run eager, and so does a layer with a cache of another kind.

Legend: B batch, L cached tokens, K kv heads, E head dim, S room for tokens.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from graphcore.engine.fallback.config import one_line
from graphcore.engine.fallback.layer_hooks import HIDDEN
from graphcore.graph.compile import call_compiling, compile_whole, mark_length

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.cache_utils import DynamicLayer

LEAST_ROOM = 64  # tokens
NUM_DIMS = 4  # of keys and values
Given = tuple[bool, ...]  # which of a layer's arguments are tensors
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GrownLayer:
    """One layer's cache in a decode step, with the new token's place at its end; for the layer it is the whole cache.

    It takes no notice of the layer's index, so that layers with other indices share a compiled function.

    Attributes:
        keys, values: [B, K, L, E] views, the last place of which `update` fills.
    """

    keys: Tensor
    values: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *_given: object, **_named: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new token's keys and values, [B, K, 1, E] each, and return all."""
        self.keys[:, :, -1:] = key_states
        self.values[:, :, -1:] = value_states
        return self.keys, self.values

    def get_seq_length(self, *_given: object) -> int:
        """Return the number of tokens before the new one."""
        return self.keys.shape[2] - 1


@dataclass
class CompiledLayers:
    """Compiled layers of a model, in place of their own forward for decode steps.

    Attributes:
        layers: all layers, in order of use.
        context: most tokens of a sequence.
        folder: folder of the compiled-code cache; None uses Inductor's default.
        on_compile: function called with the name of each function before it is compiled.
        on_eager: function called with a line about each class of layers that runs eager.
        num_compiled: number of graphs compiled so far.
        built: numbers of rows that functions were compiled for, each with whether rows were padded.
        eager: classes of layers that torch.compile could not trace whole.
        said: lines that `on_eager` got.
    """

    layers: Sequence[nn.Module]
    context: int
    folder: Path | None
    on_compile: Callable[[str], None]
    on_eager: Callable[[str], None] = _log.warning
    num_compiled: int = 0
    built: set[tuple[int, bool]] = field(default_factory=set)
    eager: set[type[nn.Module]] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    _is_building: bool = False
    _have_run: set[tuple[int, int, Given]] = field(default_factory=set)  # layers, rows and arguments
    _functions: dict[tuple[type[nn.Module], int, Given], Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        self._cache_class, self._store_classes = DynamicCache, (DynamicLayer, DynamicSlidingWindowLayer)
        for index, layer in enumerate(self.layers):
            numbers = {vars(part).get("layer_idx", index) for part in layer.modules()}
            run = partial(self._run, index, numbers == {index}, layer, layer.forward)
            layer.forward = run  # its hooks stay around it

    @property
    def is_any_compiled(self) -> bool:
        """Whether a layer that has run a decode step ran it compiled, and still would."""
        return any(type(self.layers[index]) not in self.eager for index, _, _ in self._have_run)

    def build(self, rows: int, is_padded: bool, run: Callable[[], None]) -> None:
        """Compile the layers for that many rows while `run` makes an example of a decode step."""
        self.built.add((rows, is_padded))
        self._is_building = True
        try:
            run()
        finally:
            self._is_building = False

    def example_length(self, config: "PreTrainedConfig", rows: int) -> int:
        """Return a number of cached tokens that is no other size, so that torch.compile cannot take one for another."""
        stated = {value for value in config.to_dict().values() if isinstance(value, int)}
        sizes = stated | {size for weight in self.layers[0].parameters() for size in weight.shape} | {rows}
        return next(length for length in (11, 13, 17, 19, 23, 29, 31, 37, 41, 43) if length not in sizes)

    def _run(
        self,
        index: int,
        has_own_cache: bool,
        layer: nn.Module,
        eager: Callable[..., Any],
        *given: object,
        **named: object,
    ) -> object:
        """Run a layer: compiled in a decode step, eager in a prompt and where it cannot be compiled."""
        hidden = given[0] if given else named[HIDDEN]
        assert isinstance(hidden, Tensor), f"a residual stream of {type(hidden).__name__}"
        if hidden.shape[1] != 1 or type(layer) in self.eager:
            return eager(*given, **named)
        store, obstacle = self._store_of(index, (*given, *named.values()))
        if not has_own_cache:
            store, obstacle = None, "its cache has another number than the layer"
        if store is not None and store.get_seq_length() > 0:  # after the first token: a size of 1 is never symbolic
            try:
                return self._decode(index, layer, hidden, store, given, named)
            except _failures() as error:
                self.eager.add(type(layer))
                obstacle = one_line(error)
        line = f"{type(layer).__name__} runs eager, not compiled: {obstacle}"
        if obstacle and line not in self.said:
            self.said.append(line)
            self.on_eager(line)
        return eager(*given, **named)

    def _store_of(self, index: int, arguments: Iterable[object]) -> tuple["DynamicLayer | None", str]:
        """Return the layer's KV cache among the arguments, or None and why compiled decode cannot use it."""
        caches = [value for value in arguments if isinstance(value, self._cache_class)]
        if len(caches) != 1:
            return None, "it gets no cache of a kind that is known"
        stores = caches[0].layers
        if index >= len(stores):
            return None, f"its cache ({type(caches[0]).__name__}) has {len(stores)} layers"
        store: Any = stores[index]
        if type(store) not in self._store_classes:
            return None, f"its cache ({type(store).__name__}) holds more than keys and values"
        if store.get_seq_length() > 0 and keys_and_values(store)[0].dim() != NUM_DIMS:
            return None, f"its keys have {keys_and_values(store)[0].dim()} dimensions instead of {NUM_DIMS}"
        return store, ""

    def _decode(
        self,
        index: int,
        layer: nn.Module,
        hidden: Tensor,
        store: "DynamicLayer",
        given: tuple[object, ...],
        named: dict[str, object],
    ) -> object:
        """Run a layer compiled, with the new token's place in its cache, and keep what its next step needs."""
        grown = GrownLayer(*(with_room(states, self.context) for states in keys_and_values(store)))
        length = grown.keys.shape[2]

        def exchanged(value: object) -> object:
            return grown if isinstance(value, self._cache_class) else value

        arguments = [exchanged(value) for value in given]
        by_name = {name: exchanged(value) for name, value in named.items()}
        tensors = [value if isinstance(value, Tensor) else None for value in (*arguments, *by_name.values())]
        given_tensors = tuple(value is not None for value in tensors)
        function = self._function(type(layer), len(hidden), given_tensors)
        if (index, len(hidden), given_tensors) in self._have_run:
            output: object = function(layer, *arguments, **by_name)
        else:
            self._have_run.add((index, len(hidden), given_tensors))
            self._mark_lengths(length, [grown.keys, grown.values], tensors)
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            output = call_compiling(self.folder, function, layer, *arguments, **by_name)
            self.num_compiled += torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        store.keys, store.values = grown.keys, grown.values
        if isinstance(store, self._store_classes[1]):
            kept = slice(1 - store.sliding_window, None)
            store.keys, store.values = grown.keys[:, :, kept], grown.values[:, :, kept]
            store.cumulative_length += 1
        return output

    def _mark_lengths(self, length: int, cached: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
        """Make the number of cached tokens dynamic in the graph that may be compiled next, also that of masks.

        In an example it must stay dynamic. In another step, whose arguments no example has, it may equal another size.
        """
        lengths = [(value, 2) for value in cached]
        lengths += [(each, each.dim() - 1) for each in tensors if each is not None and each.dim() > 1]
        for value, dim in lengths:
            if value.shape[dim] == length and self._is_building:
                mark_length(value, dim=dim)
            elif value.shape[dim] == length:
                torch._dynamo.maybe_mark_dynamic(value, dim)

    def _function(self, kind: type[nn.Module], rows: int, given: Given) -> Callable[..., object]:
        """Return the function of a class of layers; Dynamo compiles it, once for each set of what its layers differ in.

        Its guards are kept, unlike those of graphcore's own blocks: what other code depends on is not known here.
        """
        key = kind, rows, given
        if key not in self._functions:
            name = f"{kind.__name__}_decode_{rows}"
            self.on_compile(name)
            self._functions[key] = compile_whole(kind.forward, name)
        return self._functions[key]


def _failures() -> tuple[type[Exception], ...]:
    """Return the errors with which torch.compile refuses a layer. (Dynamo is not imported before it is needed.)"""
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    dynamo = torch._dynamo.exc
    return dynamo.TorchDynamoException, dynamo.FailOnRecompileLimitHit, ConstraintViolationError


def keys_and_values(store: "DynamicLayer") -> tuple[Tensor, Tensor]:
    """Return the keys and values that a layer's cache holds after the first token."""
    assert isinstance(store.keys, Tensor), "keys of a cache that holds tokens"
    assert isinstance(store.values, Tensor), "values of a cache that holds tokens"
    return store.keys, store.values


def with_room(states: Tensor, context: int) -> Tensor:
    """Return keys or values with an undefined place at the end, in the same memory if it has room behind them.

    Without room they are copied to memory for twice as many tokens, which `context` limits.

    Args:
        states: [B, K, L, E].

    Returns:
        [B, K, L + 1, E] view of [S, B, K, E] memory.
    """
    rows, heads, length, width = states.shape
    place = rows * heads * width
    strides = heads * width, width, place, 1
    end = (states.storage_offset() + (length + 1) * place) * states.itemsize
    if states.stride() != strides or end > states.untyped_storage().nbytes():
        room = max(length + 1, min(max(LEAST_ROOM, 2 * length), context))
        memory = torch.empty(room, rows, heads, width, dtype=states.dtype, device=states.device)
        memory[:length] = states.permute(2, 0, 1, 3)
        states = memory.permute(1, 2, 0, 3)
    return states.as_strided((rows, heads, length + 1, width), strides, states.storage_offset())
