"""Consecutive tokens of one request in a decode step: those that are known, then draft tokens to be checked.

    tokens    known  draft  draft  draft
    logits      |      |      |      |
    chosen    draft  draft  other            each choice is compared with the token that has run next
    computed  yes    yes    yes    no        what ran after the first difference counts for nothing

A choice is made from the logits after tokens that are all known by then, exactly as without drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphcore.engine.request import Request
from graphcore.graph.program import Program
from graphcore.kvcache.host_copies import Copies


@dataclass
class DecodeRun:
    """A request's tokens in a step.

    Attributes:
        ids: tokens that run.
        start: position of the first of them.
        num_sure: number of the first ones that were known before the step.
        states: copies of the row's recurrent states from before the step, if draft tokens may spoil them.
        places: program, and its row, of each token.
    """

    request: Request
    ids: Sequence[int]
    start: int
    num_sure: int
    states: Sequence[Copies] = ()
    places: list[tuple[Program, int]] = field(default_factory=list)
    _tried: int = -1  # the last token after which a choice was asked for

    @property
    def num_counted(self) -> int:
        """Tokens that the caches hold after the step, whatever becomes of the drafts."""
        return 0 if self.states else self.num_sure

    def next_place(self) -> tuple[Program, int] | None:
        """Return the place of the logits that the request's next token is to be chosen from; None if they are not here.

        They are if all tokens up to the last known one have run. Each place is returned once.
        """
        last = self.request.num_known - 1 - self.start
        if self.request.has_ended or last == self._tried or not self.num_sure - 1 <= last < len(self.ids):
            return None
        if self.num_right <= last:
            return None
        self.request.add_drafted(0, max(0, last - max(self._tried, self.num_sure - 1)))
        self._tried = last
        return self.places[last]

    @property
    def num_right(self) -> int:
        """Number of the first tokens that are those of the request."""
        pairs = enumerate(self.ids, self.start)
        return next((at - self.start for at, token in pairs if not self.request.is_known(at, token)), len(self.ids))

    @property
    def num_computed(self) -> int:
        """Number of the first tokens whose keys and values count: without drafts, an answer's last one has not run."""
        most = self._tried + 1 if self.request.has_ended else len(self.ids)
        return max(self.num_sure, min(self.num_right, most))
