"""A transformers model with the caches that it makes, pass by pass, and the decode step that runs it.

    row 0   [ . . . a b c d ]      rows are padded at the left, as transformers' generate does,
    row 1   [ u v w x y z ! ]      so that every row's last token is in the last column

Each output of the model whose name its forward also takes (past_key_values, cache_params, state, ...) is passed back in
the next pass. So the name of an architecture's cache need not be known here.

Legend: B batch, T tokens, V vocab.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphcore.engine.fallback.compiled_layers import CompiledLayers
from graphcore.engine.fallback.config import refusing, torchs_own_defaults
from graphcore.engine.fallback.layer_hooks import LayerHooks
from graphcore.engine.fallback.skeleton import Skeleton
from graphcore.errors import ConfigError, UnsupportedError
from graphcore.graph.state import StepState
from graphcore.kvcache.forward_sequences import ForwardCache


@dataclass
class CachedModel:
    """A transformers model with its cache; `run` appends columns of tokens.

    Attributes:
        lengths: number of real tokens that each row's cache holds.
        held: number of columns that the cache holds, padding included.
        mask: [B, held], 1 for columns that may be attended to; None where there is no padding.
        compiled: the layers that run compiled in decode steps; None if all run eager.
        carried: outputs of the last pass that are inputs of the next one, by name.
    """

    skeleton: Skeleton
    hooks: LayerHooks
    device: torch.device
    compiled: CompiledLayers | None = None
    lengths: list[int] = field(default_factory=list)
    held: int = 0
    mask: Tensor | None = None
    carried: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.takes = frozenset(inspect.signature(self.skeleton.model.forward).parameters)

    def restart(self, lengths: Sequence[int]) -> None:
        """Empty the cache for new rows of these lengths, padded to the longest.

        Raises:
            ConfigError: lengths differ, and the model cannot leave padding out.
        """
        self.lengths, self.held, self.mask, self.carried = [0] * len(lengths), 0, None, {}
        if len(set(lengths)) == 1:
            return
        if "attention_mask" not in self.takes:
            raise ConfigError(
                f"{type(self.skeleton.model).__name__} takes no attention mask, so rows of different lengths cannot "
                "run together; use batch_size=1"
            )
        longest = max(lengths)
        columns = (
            torch.arange(longest, dtype=torch.int64, device="cpu")[None, :]
            >= longest - torch.tensor(lengths, dtype=torch.int64, device="cpu")[:, None]
        )
        self.mask = columns.long().to(self.device)

    def run(
        self, token_ids: Tensor, positions: Tensor | None = None, all_logits: bool = False, attentions: bool = False
    ) -> Any:
        """Run one pass over the next columns and return the model's outputs; `logits` is [B, T, V].

        Args:
            token_ids: [B, T] int64; padding may be any token.
            positions: [B, T] positions of the tokens in their rows; None numbers the columns from 0, for rows without
                padding.
            all_logits: True returns the logits of every column, False those of the last one.
            attentions: True also returns the attention weights.

        Raises:
            UnsupportedError: the model keeps no cache, does not run its layers in order, or fails over its settings.
        """
        self.prepare(token_ids)
        self.held += token_ids.shape[1]
        inputs: dict[str, object] = {"input_ids": token_ids, "use_cache": True, **self.carried}
        if attentions:
            inputs["output_attentions"] = True
        if not all_logits and "logits_to_keep" in self.takes:
            inputs["logits_to_keep"] = 1
        if self.mask is not None:
            grown = self.held - self.mask.shape[1]
            if grown > 0:
                self.mask = torch.cat([self.mask, self.mask.new_ones(self.mask.shape[0], grown)], dim=1)
            inputs["attention_mask"] = self.mask[:, : self.held]
            if "position_ids" in self.takes:
                inputs["position_ids"] = positions
        model = self.skeleton.model
        with refusing(type(model).__name__, model.config.model_type), torchs_own_defaults():
            output = model(**inputs)
        self.hooks.check_order()
        self.carried = {name: value for name, value in output.items() if name in self.takes}
        if not self.carried:
            raise UnsupportedError(
                f"{type(self.skeleton.model).__name__} returns no cache that its forward takes, so it cannot go on "
                "token by token; model.fallback=transformers needs a model that does"
            )
        return output

    def empty(self) -> "CachedModel":
        """Return the same model with an empty cache."""
        return CachedModel(self.skeleton, self.hooks, self.device, self.compiled)

    def prepare(self, token_ids: Tensor) -> None:
        """Compile the layers for the next pass, of tokens [B, T], if it is a decode step of a new batch size."""
        if token_ids.shape[1] == 1 and self.held > 0:
            self.build(len(token_ids), self.mask is not None)

    def build(self, rows: int, is_padded: bool) -> None:
        """Compile the layers for decode steps of that many rows, by one on a cache of its own; does so once.

        Not by the first real step: its result would depend on which sizes happen to be equal there.
        """
        compiled = self.compiled
        if compiled is None or (rows, is_padded) in compiled.built:
            return
        length = compiled.example_length(self.skeleton.model.config, rows)

        def run() -> None:
            example = self.empty()
            example.restart([length - 2 if is_padded and row == 0 else length - 1 for row in range(rows)])
            places = torch.zeros(rows, length, dtype=torch.int64, device=self.device)
            example.run(places[:, 1:], places[:, 1:])
            example.run(places[:, :1], places[:, :1])

        compiled.build(rows, is_padded, run)


@dataclass
class PassStep:
    """A decode step that runs one token of each row through the whole model."""

    group: int
    state: StepState
    cached: CachedModel

    def replay(self) -> None:
        """Fill `logits`; rows that have ended repeat their last position, and their logits are not used."""
        state, cached = self.state, self.cached
        if not any(state.span.starts.tolist()):
            cached.restart([1] * len(state.token_ids))
        output = cached.run(state.token_ids, state.span.starts[:, None])
        state.logits = output.logits[:, -1].float()


class HeldCache(ForwardCache):
    """The cache of a forward state, with the model's own keys and values.

    Attributes:
        cached: the model with the cache; None if it is empty.
    """

    cached: CachedModel | None = None

    def drop(self) -> None:
        """Do nothing: the cache is freed with this object."""
