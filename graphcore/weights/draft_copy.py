"""The draft's decoder: the model's own layers, of which some matrices are copies in a small format.

    some groups stream     their matrices are copied, a streamed head included; all others are the model's own
    nothing streams        every matrix whose copy is smaller is copied: a step of the draft reads fewer bytes

All else is shared: embedding, norms, biases, scales, resident matrices. The rows of a tied embedding, which are
gathered where the head streams, come from the head's copy. A copy is packed at load from the checkpoint, as `quant`
packs (quant/format_choice.py); a matrix that is as small already is copied in its own format.
"""

import copy
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from graphcore.nn.decoder import Decoder, Embedding, Table
from graphcore.nn.linear import Linear, StackedLinear
from graphcore.progress import Progress
from graphcore.weights.groups import Group, GroupWeight, weights_in
from graphcore.weights.layout import aligned
from graphcore.weights.loader import Loader
from graphcore.weights.matching import HEAD
from graphcore.weights.packed_weights import PackingPolicy, WeightPacker
from graphcore.weights.resident_weights import load_groups
from graphcore.weights.slots import bind


@dataclass(frozen=True)
class DraftCopy:
    """A draft's decoder on the meta device, all of whose matrices have the packing of their copy.

    Attributes:
        model: decoder of the model.
        decoder: decoder of the draft; it shares the model's embedding.
        copied_nbytes: bytes of each weight's copy, by its name in the model.
        smaller: names of the matrices whose copies are smaller than they are.
    """

    model: Decoder
    decoder: Decoder
    copied_nbytes: Mapping[str, int]
    smaller: frozenset[str]

    @classmethod
    def of(cls, model: Decoder, loader: Loader, policy: PackingPolicy) -> "DraftCopy":
        """Return the draft of a model on the meta device.

        Args:
            policy: how the copies are packed.
        """
        backends = {id(module.backend): module.backend for module in model.modules() if hasattr(module, "backend")}
        decoder = copy.deepcopy(model, dict(backends))
        for module in decoder.modules():
            unpack(module)
        WeightPacker(loader.sources, loader.checkpoint, replace(policy, repacks=True)).pack(decoder)
        decoder.embed_tokens = model.embed_tokens
        for own, other in pairs_of(model, decoder):
            if other.tensor.nbytes >= own.tensor.nbytes:
                take_packing(own, other)
        pairs = [*pairs_of(model, decoder)]
        smaller = frozenset(own.name for own, copied in pairs if copied.tensor.nbytes < own.tensor.nbytes)
        nbytes = {own.name: aligned(copied.tensor.nbytes) for own, copied in pairs}
        return cls(model, decoder, nbytes, smaller)

    def kept(self, layers: Container[int], has_ends: bool) -> "DraftCopy":
        """Return the draft model of one pipeline stage: some layers and, if `has_ends`, embedding and head."""
        self.decoder.keep(layers, has_ends)
        names = {own.name for own, _ in pairs_of(self.model, self.decoder)}
        nbytes = {name: nbytes for name, nbytes in self.copied_nbytes.items() if name in names}
        return replace(self, copied_nbytes=nbytes, smaller=self.smaller & names)

    def nbytes_of(self, names: Collection[str]) -> int:
        """Return the bytes of the copies of some weights, by their names in the model."""
        return sum(nbytes for name, nbytes in self.copied_nbytes.items() if name in names)

    def load(self, loader: Loader, streamed: Collection[str], on_progress: Progress) -> Decoder:
        """Load the copies, share everything else with the loaded model, and return the draft's decoder.

        Args:
            streamed: names of the model's weights that stream; if none do, the `smaller` ones are copied.
            on_progress: callback, called with "draft", the index of the loaded group, bytes done and bytes in all.

        Raises:
            CheckpointError: the file changed, or holds values that are not valid weights.
        """
        names, groups = streamed or self.smaller, list[Group]()
        for index, (prefix, module) in enumerate(self.decoder.groups()):
            copied = [weight for weight in weights_in(module, prefix) if weight.name in names]
            groups.append(Group(index, prefix, [] if isinstance(module, Embedding) else copied))

        def report(_stage: str, group: int | None, done: int, total: int) -> None:
            on_progress("draft", group, done, total)

        own_errors: Loader = replace(loader, squared_errors={})  # those of the draft are not the model's
        load_groups(own_errors, groups, torch.device("cpu"), report)
        for own, other in pairs_of(self.model, self.decoder):
            if own.name not in names:
                take_packing(own, other)
                bind(other.module, other.leaf, own.tensor)
        if loader.is_tied and HEAD in streamed:
            self.decoder.embed_tokens = self._embedding_of_head()
        return self.decoder

    def _embedding_of_head(self) -> Embedding:
        """Return an embedding that reads the head's copy, because gathering a row takes as long as a draft step."""
        embedding, head = self.model.embed_tokens, self.decoder.head.lm_head
        shared = [embedding.weight, embedding.positions, embedding.per_layer]
        own: Embedding = copy.deepcopy(embedding, {id(one): one for one in shared})
        own.packing = head.packing
        bind(own, "weight", head.weight)
        return own


def pairs_of(model: Decoder, draft: Decoder) -> Iterator[tuple[GroupWeight, GroupWeight]]:
    """Yield each weight of the layers and the head in a model and in its draft."""
    for (prefix, module), (_, drafting) in zip(model.groups(), draft.groups(), strict=True):
        if isinstance(module, Embedding):
            continue
        yield from zip(weights_in(module, prefix), weights_in(drafting, prefix), strict=True)


def unpack(module: nn.Module) -> None:
    """Give a module on the meta device a dense weight in place of a packed one."""
    if isinstance(module, Linear | StackedLinear | Table) and module.packing is not None:
        shape = *module.weight.shape[:-1], module.packing.rows, module.packing.columns
        module.packing, module.weight = None, torch.empty(shape, dtype=torch.float32, device="meta")


def take_packing(own: GroupWeight, other: GroupWeight) -> None:
    """Give a weight of the draft the packing of the model's, and a buffer on the meta device for it."""
    if isinstance(own.module, Linear | StackedLinear) and own.leaf == "weight":
        assert isinstance(other.module, Linear | StackedLinear), "the draft has the model's modules"
        other.module.packing, other.module.rounding = own.module.packing, own.module.rounding
        other.module.weight = torch.empty_like(own.tensor, device="meta")
