"""DRY ("don't repeat yourself"): a penalty for tokens that would extend a repeated sequence.

    A B C D ... A B C    the last three tokens stand before D, too: D loses multiplier * base^(3 - allowed length)

Of several places before one token the longest repetition counts. No repetition reaches beyond a sequence breaker, such
as a new line, and no breaker is penalised. Sources: the definition of its author, p-e-w
(github.com/oobabooga/text-generation-webui, pull request 5677), and llama.cpp's sampler of that name
(src/llama-sampling.cpp), which is followed where they differ: repetitions may be longer than 50 tokens, and each token
whose text contains a breaker is one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from graphcore.sampling_params import SamplingParams

MOST_PENALTY = 1e30  # any more changes nothing, and sums with it stay finite in float32


@dataclass
class DryHistory:
    """The tokens of a sequence, with what repeats its last ones. Copies share arrays, which never change in place.

    Attributes:
        ids: [N] int64, tokens.
        lengths: [N] int64, for each token the number of tokens directly before it that equal the sequence's last ones,
            back to the last breaker.
        breakers: token ids that no repetition contains.
    """

    ids: np.ndarray
    lengths: np.ndarray
    breakers: Collection[int]

    @classmethod
    def of(cls, ids: Sequence[int], breakers: Collection[int]) -> "DryHistory":
        """Return the history of tokens."""
        return cls(np.array(ids, np.int64), np.array(repeated_lengths(ids, breakers), np.int64), breakers)

    def append(self, token_id: int) -> None:
        """Append a token: repetitions that it continues are longer by one, and the others end."""
        continues = self.ids == token_id if token_id not in self.breakers else np.zeros(len(self.ids), bool)
        self.lengths = np.concatenate([[0], np.where(continues, self.lengths + 1, 0)])
        self.ids = np.append(self.ids, token_id)

    def penalties(self, params: SamplingParams) -> dict[int, float]:
        """Return what the logits of tokens lose, by token id."""
        begin = 0 if params.dry_penalty_last_n < 0 else max(0, len(self.ids) - params.dry_penalty_last_n)
        ids, lengths = self.ids[begin:], self.lengths[begin:]
        lengths = np.minimum(lengths, np.arange(len(lengths)))  # none begins before the range
        allowed = float(min(params.dry_allowed_length, len(self.ids) + 1))  # none is longer
        at = np.nonzero(lengths >= allowed)[0]
        found, places = np.unique(ids[at], return_inverse=True)
        longest = np.zeros(len(found), np.int64)
        np.maximum.at(longest, places, lengths[at])
        with np.errstate(over="ignore"):
            values = np.minimum(params.dry_multiplier * params.dry_base ** (longest - allowed), MOST_PENALTY)
        losses = zip(found.tolist(), values.tolist(), strict=True)
        return {token_id: value for token_id, value in losses if token_id not in self.breakers}


def repeated_lengths(ids: Sequence[int], breakers: Collection[int]) -> list[int]:
    """Return `DryHistory.lengths` of tokens, with as many comparisons as tokens at most twice.

    Source: the Z-algorithm (Gusfield 1997, "Algorithms on Strings, Trees and Sequences", section 1.4), of the tokens in
    reverse.
    """
    backward, count = list(ids)[::-1], len(ids)
    limit = next((at for at, token_id in enumerate(backward) if token_id in breakers), count)
    same = [0] * count  # from each place on, tokens that are those of the beginning
    begin = end = 0  # of the span known to be so that ends last
    for at in range(1, count):
        length = max(0, min(end - at, same[at - begin]))
        while at + length < count and backward[length] == backward[at + length]:
            length += 1
        if at + length > end:
            begin, end = at, at + length
        same[at] = length
    return [0, *(min(same[count - at], limit) for at in range(1, count))][:count]
