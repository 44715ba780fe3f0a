"""Rank 0's runner: it forwards the calls that all ranks run together, and refuses those that need every layer here."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from graphcore.engine.program_runner import ProgramRunner
from graphcore.errors import ConfigError
from graphcore.kvcache.forward_sequences import ForwardCache, ForwardSequences
from graphcore.parallel.process_group import ProcessGroup
from graphcore.progress import Progress, ignore_progress
from graphcore.sampling_params import SamplingParams


class LeadRunner(ProgramRunner):
    """Rank 0's runner, which forwards each call to the other ranks before it runs it."""

    @property
    def ranks(self) -> ProcessGroup:
        """The process group."""
        assert self.builder.hand_over is not None, "a runner that leads has a process group"
        return self.builder.hand_over.ranks

    def warm_up(self, num_sequences: int, params: SamplingParams | None = None) -> None:
        """As in `ProgramRunner`, with all ranks: those of a pass would wait for one that compiles or captures in it."""
        self.ranks.tell({"call": "warm_up", "sequences": num_sequences})
        with self.ranks.leaving_on_error():
            super().warm_up(num_sequences, params)

    def extend(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], on_progress: Progress = ignore_progress
    ) -> Tensor:
        """As in `ProgramRunner`, with all ranks."""
        self.sizes.check_context(max(start + len(ids) for start, ids in zip(starts, rows, strict=True)))
        self.ranks.tell({"call": "extend", "rows": _plain(rows), "starts": list(starts)})
        with self.ranks.leaving_on_error():
            return super().extend(rows, starts, on_progress)

    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """As in `ProgramRunner`, with all ranks."""
        self.sizes.check_context(max(map(len, rows)))
        self.ranks.tell({"call": "logits", "rows": _plain(rows)})
        with self.ranks.leaving_on_error():
            return super().logits(rows)

    def logit_slices(self, token_ids: Sequence[int], first: int) -> Iterator[Tensor]:
        """As in `ProgramRunner`, with all ranks."""
        self.sizes.check_context(len(token_ids))
        self.ranks.tell({"call": "logit_slices", "token_ids": list(token_ids), "first": first})
        with self.ranks.leaving_on_error():
            yield from super().logit_slices(token_ids, first)

    def last_logits(self, rows: Sequence[Sequence[int]], starts: Sequence[int], count: int) -> list[Tensor]:
        """Refuse."""
        raise _refused("states of sequences")

    def residuals_by_layer(self, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[Tensor]]:
        """Refuse."""
        raise _refused("hidden states of layers")

    def blocks(self, hidden: Tensor, start: int = 0) -> Tensor:
        """Refuse."""
        raise _refused("forward()")

    def extend_state(self, state: ForwardCache, hidden: Tensor, start: int) -> Tensor:
        """Refuse."""
        raise _refused("forward()")

    def new_state(self) -> ForwardSequences:
        """Refuse."""
        raise _refused("forward()")


def _plain(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[int(token_id) for token_id in row] for row in rows]


def _refused(what: str) -> ConfigError:
    return ConfigError(f"parallel=ring: {what} need all layers in one process; load the model with parallel=off")
