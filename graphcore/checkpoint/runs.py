"""Spans, merged into the runs of bytes that one read can bring."""

from collections.abc import Iterable

from graphcore.checkpoint.span import Span


def runs_of(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the bytes of all spans as the fewest spans, by file and offset.

    Spans that touch or overlap become one, so that what several spans share is in one run once. A layer's tensors need
    not be one run: files are sorted by dtype (all scales, then all blocks), by name (layers 0, 1, 10, 11, 2), or cut
    into shards in the middle of a layer.
    """
    runs: list[Span] = []
    for span in sorted(span for span in spans if span.nbytes):
        if runs and runs[-1].file == span.file and span.offset <= runs[-1].end:
            last = runs.pop()
            span = Span(last.file, last.offset, max(last.end, span.end) - last.offset)
        runs.append(span)
    return tuple(runs)
