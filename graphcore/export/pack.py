"""A model packed into a GGUF file: each tensor read, brought to GGUF's form, packed, written; one at a time.

GGUF source    metadata and tensors under their own names; what has its format already is copied byte by byte
any other      metadata made from the config and the tokenizer, tensors by `gguf_form`
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import disk_usage

import torch

from graphcore.arch.architecture import TensorSource
from graphcore.arch.registry import architecture_of
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.engine.assembly import match_model
from graphcore.engine.model import ROPE_FREQS, Model
from graphcore.errors import CheckpointError, PlanError
from graphcore.export.gguf_file import GGUFFile, TensorEntry, replaced_when_whole
from graphcore.export.gguf_form import Member, gguf_members, gguf_shape, unfolded
from graphcore.export.metadata import Metadata, metadata_of
from graphcore.export.model_fields import rope_divisors
from graphcore.progress import Progress
from graphcore.quant import FORMATS
from graphcore.quant.choice import EMBEDDING, HEAD, NEVER_PACKED, STORED, choose_format
from graphcore.quant.packing_error import packing_error
from graphcore.weights.plan import gib

WRITTEN_DENSE = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class PackedTensor:
    """What became of one tensor.

    Attributes:
        entry: its name, shape and encoding in the file.
        error: of the written weights, relative to the source's; see `packing_error`.
    """

    entry: TensorEntry
    error: float


@dataclass(frozen=True)
class Packer:
    """A model on its way into a file.

    Attributes:
        model: from any source.
        asked: what matrices are packed as, or "stored".
    """

    model: Model
    asked: str

    @cached_property
    def _sources(self) -> Mapping[str, TensorSource]:
        return match_model(self.model, torch.float32)[1].sources

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        decoder = match_model(self.model, torch.float32)[0]
        return {
            prefix + name: tuple(buffer.shape)
            for prefix, module in decoder.groups()
            for name, buffer in module.named_buffers()
        }

    @property
    def is_tied(self) -> bool:
        """Whether the head reads the embedding's weight, so that the file has no tensor for it."""
        return self._sources[HEAD] == self._sources[EMBEDDING]

    @property
    def is_gguf(self) -> bool:
        """Whether tensors and metadata are in GGUF's form already."""
        return self.model.checkpoint.layout == "gguf"

    @cached_property
    def _members(self) -> Mapping[str, tuple[Member, ...]]:
        architecture, config = architecture_of(self.model.config), self.model.config
        names = [name for name in self._sources if not (self.is_tied and name == HEAD)]
        if self.is_gguf:
            return gguf_members(names, lambda name: self._sources[name])
        return gguf_members(names, lambda name: architecture.gguf_source(name, config))

    @cached_property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The file's tensors: first the frequencies' divisors, if the model has any, then in order of use."""
        divisors = rope_divisors(self.model.spec)
        freqs = [] if divisors is None else [TensorEntry(ROPE_FREQS, (len(divisors),), "f32")]
        return (*freqs, *(self._entry(name, members) for name, members in self._members.items()))

    def _entry(self, name: str, members: tuple[Member, ...]) -> TensorEntry:
        shape = self.model.checkpoint.tensors[name].shape if self.is_gguf else gguf_shape(members, self._shapes)
        chosen = choose_format(members[0].name, shape, self.asked, self.is_tied)
        if self.asked == STORED and self._stays_packed(members):
            return TensorEntry(name, shape, self._encoding_of(members[0].name))
        return TensorEntry(name, shape, chosen or self._unpacked_encoding(members[0].name, shape))

    def _encoding_of(self, name: str) -> str:
        return self.model.checkpoint.tensors[self._sources[name].name].encoding

    def _stays_packed(self, members: tuple[Member, ...]) -> bool:
        """Return whether a packed tensor of another container is, but for the order of its rows, the file's."""
        name = members[0].name
        is_packed = self._encoding_of(name) in FORMATS and FORMATS[self._encoding_of(name)].block_elements > 1
        moves_rows = all(fold.works_packed for fold in self._sources[name].folds)
        return not self.is_gguf and is_packed and moves_rows and len(members) == 1 and not members[0].folds

    def _unpacked_encoding(self, name: str, shape: tuple[int, ...]) -> str:
        """Return what a tensor that is not packed is written as: as stored, where llama.cpp takes that."""
        stored = self._encoding_of(name)
        if self.is_gguf:
            return stored
        if len(shape) < 2 or any(part in name for part in NEVER_PACKED):
            return "f32"  # llama.cpp adds and scales with these, which it does in float32 alone
        return stored if stored in WRITTEN_DENSE else "f32"

    def metadata(self) -> Metadata:
        """Return the file's metadata, checked to say what the model is."""
        shapes = {entry.name: entry.shape for entry in self.entries}
        return metadata_of(self.model, shapes, self.asked, {entry.encoding for entry in self.entries})

    def pack(self, path: Path, on_progress: Progress) -> Iterator[PackedTensor]:
        """Write the file, yielding each tensor when its bytes are written; the file is there when all have been.

        Args:
            path: of the file; one that is there is replaced.
            on_progress: called with "pack", None, tensors done and tensors in all.

        Raises:
            CheckpointError: a tensor cannot be packed.
            PlanError: the disk is too small.
            OSError: the disk is full after all, or the folder cannot be written to.
        """
        metadata = self.metadata()
        with replaced_when_whole(path) as beside:
            self._check_room(path)
            with GGUFFile(beside, metadata.architecture, metadata.fields, self.entries) as file:
                for index, entry in enumerate(self.entries):
                    raw, error = self._packed(entry)
                    file.write(raw)
                    on_progress("pack", None, index + 1, len(self.entries))
                    yield PackedTensor(entry, error)

    def _check_room(self, path: Path) -> None:
        nbytes, free = sum(entry.nbytes for entry in self.entries), disk_usage(path.parent).free
        if nbytes > free:
            raise PlanError(f"{path}: the packed model takes {gib(nbytes)}, the disk has {gib(free)} free")

    def _packed(self, entry: TensorEntry) -> tuple[torch.Tensor, float]:
        """Return a tensor's bytes, [nbytes] uint8, and its relative error."""
        if entry.name == ROPE_FREQS:
            divisors = torch.tensor(rope_divisors(self.model.spec), dtype=torch.float32)
            return divisors.view(torch.uint8), 0.0
        checkpoint = self.model.checkpoint
        if self.is_gguf and checkpoint.tensors[entry.name].encoding == entry.encoding:
            return checkpoint.read(entry.name).reshape(-1).view(torch.uint8), 0.0
        if self.asked == STORED and not self.is_gguf and self._stays_packed(self._members[entry.name]):
            return self._moved_rows(self._members[entry.name][0].name), 0.0
        try:
            dense = self._dense(entry.name)
            raw = FORMATS[entry.encoding].quantize(dense)
        except CheckpointError as error:
            raise type(error)(f"{checkpoint.source}: tensor '{entry.name}': {error}") from error
        return raw, packing_error(dense, raw, FORMATS[entry.encoding], entry.shape)

    def _moved_rows(self, name: str) -> torch.Tensor:
        """Return the bytes of a packed tensor, its rows in the decoder's order: [nbytes] uint8."""
        source = self._sources[name]
        info = self.model.checkpoint.tensors[source.name]
        one = FORMATS[info.encoding]
        rows, scale = one.split_rows(self.model.checkpoint.read(source.name), info.shape)
        for fold in source.folds:
            rows, scale = fold.apply_packed(rows, scale)
        return one.join_rows(rows, scale)

    def _dense(self, name: str) -> torch.Tensor:
        """Return the dense tensor in GGUF's form."""
        if self.is_gguf:
            return self._stored(name)
        return unfolded(self._members[name], self._decoder_weight, name)

    def _decoder_weight(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        weight = self._stored(source.name)
        for fold in source.folds:
            weight = fold.apply(weight)
        return weight

    def _stored(self, name: str) -> torch.Tensor:
        info, stored = self.model.checkpoint.tensors[name], self.model.checkpoint.read(name)
        if info.encoding in DENSE_DTYPES:
            return stored
        return FORMATS[info.encoding].dequantize(stored, info.shape)
