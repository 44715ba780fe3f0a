"""Checkpoints with one tensor per expert, presented with one tensor for all experts of a layer.

    stored      ...experts.0.w1 [F, D]   ...experts.1.w1 [F, D]   ...   ...experts.0.w3 [F, D]   ...
    presented   ...experts.gate_up [X, 2F, D]     parts along the rows, experts along the first axis

`with_stacked_experts` presents files that number their experts in this way, each projection separately. GGUF files of
2023 number them, too: blk.0.ffn_gate.7.weight is expert 7 of blk.0.ffn_gate_exps.weight.
Source of the order: transformers, core_model_loading.py, MergeModulelist and Concatenate.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType

import torch

from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.checkpoint.quantized.layout import ORDER, ORDER_ADVICE
from graphcore.errors import CheckpointError, UnsupportedError, quoted

Stack = tuple[tuple[str, ...], ...]
EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(.+)")
GGUF_EXPERT = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)(\.weight)")


class StackedCheckpoint(Checkpoint):
    """A view of another checkpoint in which some tensors are stacked into one.

    Args:
        stored: checkpoint to present.
        stacks: names of the tensors to stack, by the stacked tensor's name: the experts' tensors of each part, in
            order.

    Raises:
        CheckpointError: tensors of one stack differ in shape or encoding.
    """

    def __init__(self, stored: Checkpoint, stacks: Mapping[str, Stack]) -> None:
        self.source, self.layout, self.files = stored.source, stored.layout, stored.files
        self.notes = stored.notes
        self.faults = stored.faults_of_parts({name: chain.from_iterable(stack) for name, stack in stacks.items()})
        self._stored, self._stacks = stored, stacks
        used = {name for stack in stacks.values() for part in stack for name in part}
        plain = {name: info for name, info in stored.tensors.items() if name not in used}
        self.tensors = MappingProxyType(plain | {name: self._info(name, stack) for name, stack in stacks.items()})

    def _info(self, name: str, stack: Stack) -> TensorInfo:
        """Return the description of a stacked tensor; it has no file, because its bytes are not one run."""
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

    def spans(self, name: str) -> tuple[FileSpan, ...]:
        """Return the spans of a tensor's bytes; for a stacked one those of all experts' tensors, part by part."""
        if name not in self._stacks:
            return self._stored.spans(name)
        return tuple(span for part in self._stacks[name] for one in part for span in self._stored.spans(one))

    def matrix_spans(self, name: str, index: int) -> tuple[FileSpan, ...]:
        """Return the spans of one matrix of a tensor [X, R, C]; for a stacked one that of the expert's own tensor."""
        if name not in self._stacks:
            return self._stored.matrix_spans(name, index)
        (part,) = self._stacks[name]
        return self._stored.spans(part[index])

    def has_row_runs(self, name: str) -> bool:
        """Return whether rows are runs of bytes; of a stacked tensor those of all experts' tensors."""
        parts = chain.from_iterable(self._stacks.get(name, ((name,),)))
        return all(self._stored.has_row_runs(one) for one in parts)

    def is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor that is not stacked is a bias that changes nothing."""
        return name not in self._stacks and self._stored.is_zero_bias(name)

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one tensor, stacked if it is stored as several."""
        if name not in self._stacks:
            return self._stored.assemble(name, parts)
        rest = iter(parts)
        stacked = [torch.stack([self._assembled(one, rest) for one in part]) for part in self._stacks[name]]
        whole = stacked[0] if len(stacked) == 1 else torch.cat(stacked, dim=1)
        return whole if self.tensors[name].encoding in DENSE_DTYPES else whole.flatten()  # packed: an expert's rows

    def _assembled(self, name: str, parts: Iterator[torch.Tensor]) -> torch.Tensor:
        """Return an expert's tensor from the next parts, as many as it has spans."""
        return self._stored.assemble(name, list(islice(parts, len(self._stored.spans(name)))))


def with_stacked_experts(stored: Checkpoint) -> Checkpoint:
    """Return the checkpoint with each projection's experts stacked, under their common name without the number.

    Raises:
        CheckpointError: an expert is missing, or the experts of one projection differ in shape or encoding.
        UnsupportedError: the columns of an expert have an order of their own.
    """
    found: dict[str, dict[int, str]] = {}
    for name in stored.tensors:
        match = EXPERT.fullmatch(name) or GGUF_EXPERT.fullmatch(name)
        if match is not None and name.endswith(ORDER):
            raise UnsupportedError(
                f"{stored.source}: the columns of expert {quoted(name.removesuffix(ORDER))} have an order of their own "
                f"(act-order), which is not supported for experts; {ORDER_ADVICE}"
            )
        if match is not None and not stored.is_zero_bias(name):
            infix = "_exps" if match.re is GGUF_EXPERT else ""
            found.setdefault(f"{match[1]}{infix}{match[3]}", {})[int(match[2])] = name
    for stacked, experts in found.items():
        absent = next((index for index in range(max(experts)) if index not in experts), None)
        if absent is not None:
            name = stacked.replace(".experts.", f".experts.{absent}.").replace("_exps.", f".{absent}.")
            raise CheckpointError(f"{stored.source}: Missing required tensor: {quoted(name)}; the files are incomplete")
    if not found:
        return stored
    stacks = {name: (tuple(experts[index] for index in range(len(experts))),) for name, experts in found.items()}
    return StackedCheckpoint(stored, stacks)
