"""A sequence may be told to end at any point, even while it takes a token."""

from graphcore.engine.output import OutputStream
from graphcore.engine.request import RunningRequest, TokenSequence
from graphcore.sampling_params import SamplingParams
from graphcore.tokenizer.text_stream import StopStrings


class EndingDecoder:
    """A decoder in the middle of which a finalizer, or a signal handler, cancels the request."""

    def __init__(self) -> None:
        self.sequences: list[TokenSequence] = []

    def push(self, token_id: int) -> str:
        for sequence in self.sequences:
            sequence.end("interrupted")
        return "a"

    def flush(self) -> str:
        return ""


def test_a_request_that_is_cancelled_inside_a_token_ends_after_it() -> None:
    decoder = EndingDecoder()
    request = RunningRequest((1, 2), 3, frozenset(), decoder, StopStrings([]))  # type: ignore[arg-type]
    sequence = TokenSequence(request, SamplingParams(), OutputStream())
    decoder.sequences.append(sequence)
    sequence.take(7, None, context=9)
    assert sequence.is_unwanted
    assert not sequence.has_ended
    sequence.end("interrupted")
    sequence.feed.wait_to_end(1.0)
    assert sequence.generation().token_ids == (7,)
    assert sequence.generation().finish_reason == "interrupted"
