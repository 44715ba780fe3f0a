"""Hooks that acquire each layer group and the head of a transformers model before it runs, and release it afterwards.

The model's own forward makes masks, positions and caches, and calls its layers; hooks around the layers tell the policy
which group runs next. The order is checked after every pass, because a model that calls its layers in another order
would read slots that hold other groups.

Legend: B batch, T tokens, D model dim.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from graphcore.errors import UnsupportedError
from graphcore.streaming.policy import Policy

HIDDEN = "hidden_states"  # name of the residual stream among a layer's arguments, if it is not the first


@dataclass
class LayerHooks:
    """Hooks on a model that tell a policy which group runs.

    Attributes:
        layer_groups: the layers of each group, in order of use.
        heads: the head, or its slices, in order of use.
        policy: streaming policy of the groups: 0 (held for the whole pass), 1 .. G (layers) and G + 1 ... (heads).
        entered: groups that the current pass, or else the last one, has reached.
    """

    model: nn.Module
    layer_groups: Sequence[Sequence[nn.Module]]
    heads: Sequence[nn.Module]
    policy: Policy
    entered: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        groups = [[self.model], *self.layer_groups, *([head] for head in self.heads)]
        for index, modules in enumerate(groups):
            modules[0].register_forward_pre_hook(self._enter(index))
            modules[-1].register_forward_hook(self._leave(index))

    def _enter(self, group: int) -> Callable[[nn.Module, object], None]:
        def enter(_module: nn.Module, _given: object) -> None:
            if group == 0:
                self.entered.clear()
            self.entered.append(group)
            self.policy.acquire(group)

        return enter

    def _leave(self, group: int) -> Callable[[nn.Module, object, object], None]:
        def leave(_module: nn.Module, _given: object, _out: object) -> None:
            self.policy.release(group)

        return leave

    def check_order(self) -> None:
        """Check that the last pass went through every group once, in order.

        Raises:
            UnsupportedError: the model went through its groups in another way.
        """
        expected = list(range(1 + len(self.layer_groups) + len(self.heads)))
        if self.entered != expected:
            raise UnsupportedError(
                f"{type(self.model).__name__} went through its layer groups as {self.entered} instead of {expected}; "
                "model.fallback=transformers needs a model that runs its layers once each, in order"
            )

    @property
    def layers(self) -> list[nn.Module]:
        """All layers, in order of use."""
        return [layer for group in self.layer_groups for layer in group]

    @contextmanager
    def starting_from(self, hidden: Tensor) -> Iterator[None]:
        """Replace the first layer's input by `hidden` [B, T, D] inside the block."""

        def substitute(
            _layer: nn.Module, given: tuple[object, ...], named: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            if given:
                return (hidden, *given[1:]), named
            return given, {**named, HIDDEN: hidden}

        with _removed([self.layers[0].register_forward_pre_hook(substitute, with_kwargs=True)]):
            yield


@contextmanager
def recording(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the residual stream before the first layer and after each: [B, T, D] tensors."""
    seen: list[Tensor] = []
    handles = [layers[0].register_forward_pre_hook(_recorder_of_input(seen), with_kwargs=True)]
    handles += [layer.register_forward_hook(_recorder_of_output(seen)) for layer in layers]
    with _removed(handles):
        yield seen


def _recorder_of_input(seen: list[Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...], dict[str, Tensor]], None]:
    def record(_layer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        seen.append(given[0] if given else named[HIDDEN])

    return record


def _recorder_of_output(seen: list[Tensor]) -> Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]:
    def record(_layer: nn.Module, _given: object, out: Tensor | tuple[Tensor, ...]) -> None:
        seen.append(out if isinstance(out, Tensor) else out[0])

    return record


@contextmanager
def _removed(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the block, also after an error."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
