"""A transformers model that goes on where its last pass ended: its own cache, and a mask where rows are padded.

    row 0   [ . . . a b c d ]      rows are padded at the left, as transformers' generate does,
    row 1   [ u v w x y z ! ]      so that every row's last token is in the last column

What the model returns under a name that its forward takes (past_key_values, cache_params, state, ...) is what it
wants back in the next pass: whatever an architecture calls its cache, it need not be known here.

Legend: B batch, T tokens, V vocab.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphcore.arch.transformers_fallback import Skeleton
from graphcore.engine.layer_brackets import LayerBrackets
from graphcore.errors import ConfigError, UnsupportedError


@dataclass
class CachedModel:
    """Runs passes over tokens.

    Attributes:
        lengths: real tokens that each row's cache holds.
        held: columns that the cache holds, padding included.
        mask: [B, held], 1 for what may be attended; None where nothing is padded.
        carried: what the last pass returned for the next one.
    """

    skeleton: Skeleton
    brackets: LayerBrackets
    device: torch.device
    lengths: list[int] = field(default_factory=list)
    held: int = 0
    mask: Tensor | None = None
    carried: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.takes = frozenset(inspect.signature(self.skeleton.model.forward).parameters)

    def restart(self, lengths: Sequence[int]) -> None:
        """Forget everything; rows of these many tokens are to come, padded to the longest.

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
        columns = torch.arange(longest)[None, :] >= longest - torch.tensor(lengths)[:, None]
        self.mask = columns.long().to(self.device)

    def run(
        self, token_ids: Tensor, positions: Tensor | None = None, all_logits: bool = False, attentions: bool = False
    ) -> Any:
        """Run one pass over the next columns and return what the model gives: logits [B, T, V] among it.

        Args:
            token_ids: [B, T] int64; padding may be any token.
            positions: [B, T] of the tokens in their rows; None is columns counted from 0, which only unpadded rows may
                use.
            all_logits: the logits of every column are wanted, not only the last one's.
            attentions: the attention weights are wanted.

        Raises:
            UnsupportedError: the model keeps no cache, or does not run its layers in order.
        """
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
        output = self.skeleton.model(**inputs)
        self.brackets.check_order()
        self.carried = {name: value for name, value in output.items() if name in self.takes}
        if not self.carried:
            raise UnsupportedError(
                f"{type(self.skeleton.model).__name__} returns no cache that its forward takes, so it cannot go on "
                "token by token; model.fallback=transformers needs a model that does"
            )
        return output
