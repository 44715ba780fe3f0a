"""Conversion of a model to a GGUF file, one tensor at a time: read, convert to GGUF's form, pack, write.

GGUF source    metadata and tensors under their own names; a tensor of the wanted format is copied byte by byte
any other      metadata made from the config and the tokenizer, tensors by `gguf_tensors`
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch

from graphcore.arch.architecture import TensorSource
from graphcore.arch.checkpoint_config import ROPE_TENSORS
from graphcore.arch.registry import architecture_of
from graphcore.arch.weight_map import weight_shapes
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.file_bytes import FileSpan, read_span
from graphcore.checkpoint.quantized.layout import ORDER, ORDER_ADVICE
from graphcore.config.byte_sizes import in_words
from graphcore.engine.loading.open_model import Model
from graphcore.engine.loading.prepare_model import match_model, notes_on_unread
from graphcore.errors import CheckpointError, PlanError, UnsupportedError, quoted
from graphcore.export.gguf_file import GGUFFile, TensorEntry, replaced_when_whole
from graphcore.export.gguf_tensors import Member, gguf_members, gguf_shape, unfolded
from graphcore.export.llama_cpp import differences, obstacles
from graphcore.export.metadata import Metadata, metadata_of, rope_divisors
from graphcore.kernels.backend import Backend, TorchBackend
from graphcore.nn.decoder import Decoder
from graphcore.planning.loading_peak import packing_nbytes
from graphcore.planning.machine import check_free, free_device_nbytes
from graphcore.planning.workspace import FLOAT32_NBYTES
from graphcore.progress import Progress
from graphcore.quant import FORMATS
from graphcore.quant.format_choice import EMBEDDING, HEAD, NEVER_PACKED, STORED, choose_format, packable_names
from graphcore.quant.packing_error import SquaredError
from graphcore.quant.registry import has_tensor_scale
from graphcore.weights.conversion import first_row
from graphcore.weights.loader import PACKED_WEIGHTS, Loader
from graphcore.weights.matching import WEIGHT
from graphcore.weights.packed_weights import is_stored_packed

GROWTH = 1.01  # of the weights' bytes, from which on a note says so; norms alone become float32
WHOLE_ROW = 256  # a row that is a whole number of blocks of every format


@dataclass(frozen=True)
class PackedTensor:
    """One written tensor and its packing error.

    Attributes:
        entry: name, shape and encoding in the file.
        error: error of the written weights, relative to the source's; see `packing_error`.
    """

    entry: TensorEntry
    error: float


@dataclass(frozen=True)
class Packer:
    """A model with the format that it is to be packed in.

    Attributes:
        model: model of any source.
        asked: format that matrices are packed in, or "stored".
        backend: kernels that quantise.
        requantize: True packs matrices again that are stored packed; False keeps them where GGUF has their type.
        of_card: sampling parameters of the model card, which the file states if the model's own files say nothing.
    """

    model: Model
    asked: str
    backend: Backend = field(default_factory=TorchBackend)
    requantize: bool = False
    of_card: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _matched(self) -> tuple[Decoder, Loader]:
        return match_model(self.model, torch.float32)

    @property
    def _loader(self) -> Loader:
        return self._matched[1]

    @property
    def _sources(self) -> Mapping[str, TensorSource]:
        """Stored tensors and folds of the decoder's weights, without adapters."""
        return (self._loader.beneath or self._loader).sources

    @cached_property
    def _merged(self) -> frozenset[str]:
        """Names of the decoder's weights that an adapter changes."""
        return frozenset(name for name, source in self._loader.sources.items() if source != self._sources[name])

    def check_adapters(self) -> None:
        """Check that adapters can be merged: the matrices that they change are stored dense.

        Raises:
            UnsupportedError: a matrix is stored packed.
        """
        packed = sorted(name for name in self._merged if is_stored_packed(self.model.checkpoint, self._sources[name]))
        if packed:
            raise UnsupportedError(
                f"{self.model.checkpoint.source}: {packed[0]} is {self._encoding_of(packed[0])}, and an adapter is "
                "merged into dense weights only; name the dense base model, or set model.adapter when the "
                "packed file runs"
            )

    def check_llama_cpp(self) -> None:
        """Check that llama.cpp reads the file as the same model; a copy of a GGUF file is what it was.

        Raises:
            UnsupportedError: llama.cpp would refuse the file, or compute another model.
        """
        if self.is_gguf:
            return
        values = {key: field.value for key, field in self.metadata.fields.items()}
        shapes = {entry.name: entry.shape for entry in self.entries}
        unknown = sorted({one.encoding for one in self.entries if has_tensor_scale(one.encoding)})
        found = [*obstacles(self.metadata.architecture, values, shapes), *(f"does not know {one}" for one in unknown)]
        if found:
            raise UnsupportedError(
                f"{self.model.checkpoint.source}: llama.cpp {', '.join(found)}; keep the safetensors, or write a file "
                "that graphcore alone reads with task.for_llama_cpp=false"
            )

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return weight_shapes(self._matched[0])

    @property
    def is_tied(self) -> bool:
        """Whether the head reads the embedding's weight, so that the file has no tensor for the head."""
        return self._sources[HEAD] == self._sources[EMBEDDING]

    @property
    def is_gguf(self) -> bool:
        """Whether tensors and metadata are in GGUF's form already."""
        return self.model.checkpoint.layout == "gguf"

    @cached_property
    def _members(self) -> Mapping[str, tuple[Member, ...]]:
        architecture, config = architecture_of(self.model.config), self.model.config
        names = [name for name in self._sources if not (self.is_tied and name == HEAD) and not name.endswith(ORDER)]
        ordered = next((name for name in names if self._order_of(name) is not None), None)
        if ordered is not None and self.asked == STORED:
            raise UnsupportedError(
                f"{self.model.checkpoint.source}: the columns of {quoted(self._sources[ordered].name)} have an order "
                "(act-order), which no GGUF type has, so it cannot stay as it is stored; quant=q8_0, or another "
                f"format, packs its values, or {ORDER_ADVICE}"
            )
        if self.is_gguf:
            return gguf_members(names, lambda name: self._sources[name])
        return gguf_members(names, lambda name: architecture.gguf_source(name, config))

    @cached_property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The file's tensors: the divisors of rope frequencies first, if there are any, then all in order of use."""
        divisors = rope_divisors(self.model.spec)
        freqs = [TensorEntry(name, (len(values),), "f32") for name, values in divisors.items()]
        return (*freqs, *(self._entry(name, members) for name, members in self._members.items()))

    def _entry(self, name: str, members: tuple[Member, ...]) -> TensorEntry:
        shape = self.model.checkpoint.tensors[name].shape if self.is_gguf else gguf_shape(members, self._shapes)
        if self._stays_packed(members):
            return TensorEntry(name, shape, self._ggml_encoding(members[0].name))
        chosen = choose_format(members[0].name, shape, self._wanted(members[0].name), self.is_tied)
        return TensorEntry(name, shape, chosen or self._unpacked_encoding(members[0].name, shape))

    def _wanted(self, name: str) -> str:
        """Return the format to pack a weight in: the requested one, or for "stored" its own if it must be repacked."""
        stored = self._encoding_of(name)
        is_repacked = self.asked == STORED and not self.is_gguf and stored in packable_names()
        return stored if is_repacked and not FORMATS[stored].is_dense else self.asked

    def _encoding_of(self, name: str) -> str:
        return self.model.checkpoint.tensors[self._sources[name].name].encoding

    def _ggml_encoding(self, name: str) -> str:
        """Return the encoding of a packed weight, which is a type of GGUF files.

        Raises:
            UnsupportedError: they have no such type.
        """
        stored = self._encoding_of(name)
        if FORMATS[stored].ggml_id is None:
            raise UnsupportedError(
                f"{self.model.checkpoint.source}: weight {quoted(name)} is {stored}, which GGUF files do not have; "
                "pack its values as another format, such as quant=q8_0"
            )
        return stored

    def _stays_packed(self, members: tuple[Member, ...]) -> bool:
        """Return whether a tensor that is stored packed stays so in the file, perhaps with rows in another order."""
        encodings = {self._encoding_of(member.name) for member in members}
        encoding = next(iter(encodings))
        if len(encodings) > 1 or encoding not in FORMATS or FORMATS[encoding].is_dense:
            return False
        if self.asked != STORED and (
            self.requantize or FORMATS[encoding].ggml_id is None or has_tensor_scale(encoding)
        ):
            return False  # llama.cpp does not know formats with one scale for a tensor
        if self.is_gguf:
            return True
        folds = [fold for member in members for fold in (*member.folds, *self._sources[member.name].folds)]
        is_plain = len(members) == 1 and not members[0].folds
        can_move = not has_tensor_scale(encoding) and all(len(self._shapes[member.name]) == 2 for member in members)
        is_ordered = any(self._order_of(member.name) is not None for member in members)
        return (is_plain or can_move) and not is_ordered and all(fold.works_packed for fold in folds)

    def notes(self) -> Iterator[str]:
        """Yield notes on what is left out, on matrices that are not in the format asked for, and on growth."""
        yield from notes_on_unread(self.model, self._loader)
        reasons: dict[tuple[str, str], int] = {}
        for name, members in self._members.items() if self.asked != STORED else ():
            entry = self._entry(name, members)
            if len(entry.shape) > 1 and entry.encoding != self.asked:
                key = entry.encoding, self._why_not(entry, members)
                reasons[key] = reasons.get(key, 0) + 1
        for (encoding, reason), count in reasons.items():
            yield f"quant={self.asked}: {count} {'matrix is' if count == 1 else 'matrices are'} {encoding}: {reason}"
        stored = {source.name for source in self._sources.values()}
        before = sum(self.model.checkpoint.tensors[name].nbytes for name in stored)
        after = sum(entry.nbytes for entry in self.entries)
        if after > GROWTH * before:
            yield f"the file's weights take {in_words(after)}, the source's {in_words(before)}"
        if not self.is_gguf:
            values = {key: field.value for key, field in self.metadata.fields.items()}
            yield from differences(self.metadata.architecture, values)

    def _why_not(self, entry: TensorEntry, members: tuple[Member, ...]) -> str:
        """Return the reason why a matrix is not in the format asked for."""
        if self._stays_packed(members):
            return "packed already, and kept; task.requantize=true packs again, and loses precision twice"
        name, row = members[0].name, entry.shape[-1]
        usual = choose_format(name, (1, WHOLE_ROW), self.asked, self.is_tied)
        if usual is None:
            return "routers, convolutions, positions and the like are never packed"
        if row % FORMATS[usual].block_elements:
            return f"rows of {row} are no multiple of {FORMATS[usual].block_elements}, the block of {usual}"
        return f"the usual format of the {'head' if name == HEAD or self.is_tied else 'embedding'} beside {self.asked}"

    def _unpacked_encoding(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the encoding of a tensor that is not packed: the stored one where llama.cpp reads it."""
        stored = self._encoding_of(name)
        if self.is_gguf:
            return stored
        if len(shape) < 2 or any(part in name for part in NEVER_PACKED):
            return "f32"  # llama.cpp adds and scales with these in float32 only
        return stored if stored in FORMATS and FORMATS[stored].is_dense else "f32"

    @cached_property
    def metadata(self) -> Metadata:
        """The file's metadata, checked to describe the same model."""
        shapes = {entry.name: entry.shape for entry in self.entries}
        packed = (self._entry(*one) for one in self._members.items() if not self._stays_packed(one[1]))
        kind = self.asked if self.asked in {entry.encoding for entry in packed} else STORED
        return metadata_of(self.model, shapes, kind, {entry.encoding for entry in self.entries}, self.of_card)

    def pack(self, path: Path, on_progress: Progress) -> Iterator[PackedTensor]:
        """Write the file, yielding each tensor after its bytes are written; the file appears after the last one.

        Args:
            path: path of the file; an existing file is replaced.
            on_progress: callback with "pack", None, tensors done and all tensors.

        Raises:
            CheckpointError: a tensor cannot be packed, or an adapter not be merged.
            UnsupportedError: a weight has a format that GGUF files do not have, and is to stay in it.
            PlanError: the memory or the disk is too small.
            OSError: the disk is full, or the folder cannot be written to.
        """
        self.check_adapters()
        metadata = self.metadata
        instead = "a checkpoint whose tensors are stored row by row (not random:, not folded) takes less"
        check_free("packing the largest tensor", self.peak_nbytes, free_device_nbytes(torch.device("cpu")), instead)
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
            raise PlanError(f"{path}: the packed model takes {in_words(nbytes)}, the disk has {in_words(free)} free")

    def _packed(self, entry: TensorEntry) -> tuple[torch.Tensor, float]:
        """Return a tensor's bytes, [nbytes] uint8, and its relative error."""
        if entry.name in ROPE_TENSORS:
            values = rope_divisors(self.model.spec)[entry.name]
            divisors = torch.tensor(values, dtype=torch.float32, device="cpu")
            return divisors.view(torch.uint8), 0.0
        checkpoint = self.model.checkpoint
        is_merged = self._changes(entry)
        if self.is_gguf and not is_merged and checkpoint.tensors[entry.name].encoding == entry.encoding:
            return checkpoint.read(entry.name).reshape(-1).view(torch.uint8), 0.0
        if not self.is_gguf and self._stays_packed(self._members[entry.name]):
            return self._moved_rows(entry), 0.0
        raw, error, at = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu"), SquaredError(), 0
        try:
            for dense in self._dense_parts(entry):
                part, parts_error = self.backend.quantize(entry.encoding, dense)
                raw[at : at + len(part)] = part
                error, at = error + parts_error, at + len(part)
        except CheckpointError as refusal:
            raise type(refusal)(f"{checkpoint.source}: tensor '{entry.name}': {refusal}") from refusal
        return raw, error.relative

    def _dense_parts(self, entry: TensorEntry) -> Iterator[torch.Tensor]:
        """Yield the dense tensor in GGUF's form, some rows at a time where the checkpoint stores it row by row."""
        plain = self._plain_rows(entry)
        if plain is None:
            yield self._dense(entry.name)
            return
        checkpoint, (stored, first) = self.model.checkpoint, plain
        info, (span,) = checkpoint.tensors[stored], checkpoint.spans(stored)
        row_nbytes = span.nbytes // info.shape[0]
        for begin in range(0, entry.shape[0], self._rows_at_once(entry)):
            count = min(self._rows_at_once(entry), entry.shape[0] - begin)
            part = FileSpan(span.file, span.offset + (first + begin) * row_nbytes, count * row_nbytes)
            raw, shape = read_span(part, checkpoint.files[span.file], stored), (count, info.shape[1])
            if info.encoding in DENSE_DTYPES:
                yield raw.view(DENSE_DTYPES[info.encoding]).view(shape)
            else:
                yield FORMATS[info.encoding].dequantize(raw, shape)

    def _rows_at_once(self, entry: TensorEntry) -> int:
        return max(1, PACKED_WEIGHTS // entry.shape[-1])

    def _plain_rows(self, entry: TensorEntry) -> tuple[str, int] | None:
        """Return the stored tensor that holds the entry's rows unchanged, and their first row; None if none does."""
        if self._changes(entry):
            return None
        if self.is_gguf:
            source = TensorSource(entry.name)
        else:
            (member, *more) = self._members[entry.name]
            source = self._sources[member.name]
            if more or member.folds:
                return None
        info = self.model.checkpoint.tensors[source.name]
        first = first_row(self._loader, source, info, None)
        return None if first is None or len(entry.shape) != 2 else (source.name, first)

    @cached_property
    def peak_nbytes(self) -> int:
        """Peak bytes of packing: those of one written tensor, and of the tensors that it is made from."""
        return max(map(self._packing_nbytes, self.entries))

    def _packing_nbytes(self, entry: TensorEntry) -> int:
        if entry.name in ROPE_TENSORS:
            return entry.nbytes
        if self._plain_rows(entry) is not None:
            return entry.nbytes + packing_nbytes(entry.num_elements)
        names = [entry.name] if self.is_gguf else [self._sources[one.name].name for one in self._members[entry.name]]
        stored = [self.model.checkpoint.tensors[name] for name in names]
        read = sum(info.nbytes for info in stored)
        is_dense = all(info.encoding in DENSE_DTYPES for info in stored)
        dense = read if is_dense else FLOAT32_NBYTES * entry.num_elements
        is_folded = self._changes(entry) or (
            not self.is_gguf and any(self._folds_of(one) for one in self._members[entry.name])
        )
        return (
            entry.nbytes
            + packing_nbytes(entry.num_elements)
            + read
            + (0 if is_dense else dense)
            + (2 * dense if is_folded else 0)
        )

    def _changes(self, entry: TensorEntry) -> bool:
        """Return whether an adapter changes a written tensor."""
        return any(member.name in self._merged for member in self._members.get(entry.name, ()))

    def _folds_of(self, member: Member) -> bool:
        return bool(member.folds or self._sources[member.name].folds or self._order_of(member.name))

    def _moved_rows(self, entry: TensorEntry) -> torch.Tensor:
        """Return a quantised tensor with its rows in GGUF's order, without quantising again: [nbytes] uint8."""
        scales: list[float] = []

        def rows_of(name: str) -> torch.Tensor:
            source = self._sources[name]
            info = self.model.checkpoint.tensors[source.name]
            rows, scale = FORMATS[info.encoding].split_rows(self.model.checkpoint.read(source.name), info.shape)
            for fold in source.folds:
                rows, scale = fold.apply_packed(rows, scale)
            scales.append(scale)
            return rows

        rows = unfolded(self._members[entry.name], rows_of, entry.name)
        return FORMATS[entry.encoding].join_rows(rows, scales[0])

    def _dense(self, name: str) -> torch.Tensor:
        """Return the dense tensor in GGUF's form."""
        if self.is_gguf and not any(member.name in self._merged for member in self._members[name]):
            return self._stored(name)
        return unfolded(self._members[name], self._decoder_weight, name)

    def _decoder_weight(self, name: str) -> torch.Tensor:
        if name in self._merged:
            return self._loader.dense(name, torch.float32)
        source = self._sources[name]
        weight = self._stored(source.name)
        for fold in source.folds:
            weight = fold.apply(weight)
        order = self._order_of(name)
        return weight if order is None else weight[:, self._stored(order).argsort()]

    def _order_of(self, name: str) -> str | None:
        """Return the name of the stored input order of a weight; None if its columns are in the usual order."""
        order = self._sources.get(name.removesuffix(WEIGHT) + ORDER)
        return None if order is None else order.name

    def _stored(self, name: str) -> torch.Tensor:
        info, stored = self.model.checkpoint.tensors[name], self.model.checkpoint.read(name)
        if info.encoding in DENSE_DTYPES:
            return stored
        return FORMATS[info.encoding].dequantize(stored, info.shape)
