"""A checkpoint whose experts are stored one by one, shown with one tensor for all experts of a layer.

    stored   ...experts.0.w1 [F, D]   ...experts.1.w1 [F, D]   ...   ...experts.0.w3 [F, D]   ...
    shown    ...experts.gate_up [X, 2F, D]     part by part along the rows, expert by expert along the first axis

Source of the order: transformers, core_model_loading.py, MergeModulelist and Concatenate.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.quoted import quoted
from graphcore.checkpoint.span import Span
from graphcore.checkpoint.tensor_info import TensorInfo
from graphcore.errors import CheckpointError

Stack = tuple[tuple[str, ...], ...]


class StackedCheckpoint(Checkpoint):
    """The tensors of another checkpoint, some of them as one.

    Args:
        stored: the other checkpoint.
        stacks: name of a tensor to those that it is made of: for each part the experts' tensors, in order.

    Raises:
        CheckpointError: what is to be one tensor differs in shape or type.
    """

    def __init__(self, stored: Checkpoint, stacks: Mapping[str, Stack]) -> None:
        self.source, self.layout, self.files = stored.source, stored.layout, stored.files
        self._stored, self._stacks = stored, stacks
        used = {name for stack in stacks.values() for part in stack for name in part}
        plain = {name: info for name, info in stored.tensors.items() if name not in used}
        self.tensors = MappingProxyType(plain | {name: self._info(name, stack) for name, stack in stacks.items()})

    def _info(self, name: str, stack: Stack) -> TensorInfo:
        """Return the description of a stack; its bytes are no one run, so it has no file."""
        infos = [[self._stored.tensors[one] for one in part] for part in stack]
        first = infos[0][0]
        for part in infos:
            for info in part:
                is_alike = info.encoding == first.encoding and info.shape == part[0].shape and len(info.shape) == 2
                if not is_alike or info.shape[1] != first.shape[1] or len(part) != len(infos[0]):
                    raise CheckpointError(
                        f"{self.source}: tensor {quoted(info.name)} ({info.encoding}, {list(info.shape)}) does not fit "
                        f"with {quoted(first.name)} ({first.encoding}, {list(first.shape)}) in {quoted(name)}; fetch "
                        "the checkpoint again"
                    )
        rows = sum(part[0].shape[0] for part in infos)
        nbytes = sum(info.nbytes for part in infos for info in part)
        return TensorInfo(name, (len(infos[0]), rows, first.shape[1]), first.encoding, None, 0, nbytes)

    def spans(self, name: str) -> tuple[Span, ...]:
        """Return the bytes of every expert's tensor, part by part."""
        if name not in self._stacks:
            return self._stored.spans(name)
        return tuple(span for part in self._stacks[name] for one in part for span in self._stored.spans(one))

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one tensor, stacked if it is stored apart."""
        if name not in self._stacks:
            return self._stored.assemble(name, parts)
        rest = iter(parts)
        stacked = [
            torch.stack([self._stored.assemble(one, [next(rest)]) for one in part]) for part in self._stacks[name]
        ]
        return stacked[0] if len(stacked) == 1 else torch.cat(stacked, dim=1)
