"""Which chunks of rows of tokens run together in a forward pass, and steps that observe one.

row 0   ====|====|=       chunks end at multiples of prefill_chunk, so they depend on the row's positions alone
row 1   ==|
pass    0    1    2       a pass takes the next chunk of as many rows as there is room for, first rows first

Requests, logits, hidden states and scoring all run in `ProgramRunner.forward_pass` (program_runner.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from graphcore.graph.program import Program
from graphcore.graph.step import Step
from graphcore.kvcache.chunks import Chunks


@dataclass(frozen=True)
class RowChunk:
    """Consecutive tokens of a row that run together.

    Attributes:
        row: row of the KV cache.
        ids: token ids.
        start: position of the first of them, which is the number of tokens that the row's cache holds.
        is_last: True if the row ends with them, so that its logits are needed.
    """

    row: int
    ids: Sequence[int]
    start: int
    is_last: bool

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.ids)


def chunks_by_pass(
    rows: Sequence[Sequence[int]], starts: Sequence[int], chunks: Chunks, most: int
) -> Iterator[list[RowChunk]]:
    """Yield the chunks of each pass.

    Args:
        rows: token ids of each row.
        starts: position of each row's first token.
        chunks: chunk boundaries.
        most: most tokens in one pass, without those of chunks of one token; one chunk runs even if it is longer.
    """
    reached, ends = list(starts), [start + len(ids) for start, ids in zip(starts, rows, strict=True)]
    while any(begin < end for begin, end in zip(reached, ends, strict=True)):
        found, left = list[RowChunk](), most
        for row, (ids, start, begin) in enumerate(zip(rows, starts, reached, strict=True)):
            end = chunks.end(begin, ends[row])
            tokens = end - begin
            if tokens == 1 or (tokens > 1 and (left == most or tokens <= left)):
                found.append(RowChunk(row, ids[begin - start : end - start], begin, end == ends[row]))
                left -= tokens if tokens > 1 else 0
        for chunk in found:
            reached[chunk.row] = chunk.end
        yield found


Instrument = Callable[[RowChunk, Program], Program]
"""Function from a chunk and its program to the program that runs in its place."""


def not_instrumented(_chunk: RowChunk, program: Program) -> Program:
    """Return the program."""
    return program


@dataclass
class ObservedStep:
    """A step, and a function that is called after it, which may read or write the state."""

    group: int
    step: Step
    observe: Callable[[], None]

    def replay(self) -> None:
        """Run the step, then call the function."""
        self.step.replay()
        self.observe()
