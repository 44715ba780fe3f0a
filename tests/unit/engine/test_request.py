"""A request ends for the right reason, with the right text, whatever its tokens bring first."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.tiny_models import add_tokenizer

from graphcore.engine.output import Timings
from graphcore.engine.request import Request, TokenTotals
from graphcore.errors import ConfigError
from graphcore.kvcache.chunks import Chunks
from graphcore.tokenizer.text_stream import IncrementalDecoder, StopResult, StopStrings
from graphcore.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per character; token 0 is special."""
    folder = tmp_path_factory.mktemp("tokenizer")
    add_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def push_all(request: Request, ids: Sequence[int]) -> list[str]:
    """Feed tokens until the request ends; return what each made certain."""
    pieces = []
    for token_id in ids:
        pieces.append(request.push(token_id, is_context_full=False))
        if request.finish_reason:
            break
    return pieces


def start(tokenizer: Tokenizer | None, most: int = 100, ends: Sequence[int] = (), stop: Sequence[str] = ()) -> Request:
    decoder = IncrementalDecoder(tokenizer) if tokenizer else None
    return Request([1, 2, 3], most, frozenset(ends), decoder, StopStrings(stop))


def test_it_ends_at_the_last_token_that_was_asked_for(tokenizer: Tokenizer) -> None:
    request = start(tokenizer, most=3)
    assert push_all(request, tokenizer.encode("abcdef")) == ["a", "b", "c"]
    assert (request.finish_reason, request.text) == ("length", "abc")


def test_an_end_token_is_kept_and_not_printed(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc")
    request = start(tokenizer, ends=ids[2:])
    push_all(request, ids)
    assert (request.finish_reason, request.text, request.token_ids) == ("end", "ab", ids)


def test_an_end_token_counts_even_where_the_length_is_reached(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc")
    request = start(tokenizer, most=3, ends=ids[2:])
    push_all(request, ids)
    assert request.finish_reason == "end"


@pytest.mark.parametrize(
    ("text", "stop", "printed", "reason"),
    [
        ("one. two", [". t"], "one", "stop"),
        ("one. two", ["o. ", " tw", "two"], "one.", "stop"),  # the first to be complete
        ("one. two", ["two!"], "one. two", "length"),  # held back to the end, then printed
        ("aab", ["ab"], "a", "stop"),  # a beginning inside a beginning
        ("one", ["o"], "", "stop"),
        ("one", [], "one", "length"),
    ],
)
def test_stop_strings(tokenizer: Tokenizer, text: str, stop: list[str], printed: str, reason: str) -> None:
    ids = tokenizer.encode(text)
    request = start(tokenizer, most=len(ids), stop=stop)
    pieces = push_all(request, ids)
    assert "".join(pieces) == request.text == printed
    assert request.finish_reason == reason
    assert request.token_ids == ids[: len(pieces)]


def test_text_that_waits_for_a_stop_string_is_printed_when_something_else_ends_the_request(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode("ab<")
    for how in ("end", "context", "interrupted"):
        request = start(tokenizer, ends=[0], stop=["<|x|>"])
        assert push_all(request, ids) == ["a", "b", ""]
        if how == "end":
            assert request.push(0, is_context_full=False) == "<"
        elif how == "context":
            assert request.push(ids[0], is_context_full=True) == "<a"
        else:
            assert request.finish(how) == "<"
        assert request.finish_reason == how
        assert request.text.startswith("ab<")


def test_a_special_token_is_counted_and_not_printed(tokenizer: Tokenizer) -> None:
    request = start(tokenizer, most=3)
    push_all(request, [*tokenizer.encode("a"), 0, *tokenizer.encode("b")])
    assert (request.text, len(request.token_ids)) == ("ab", 3)


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    request = start(None, most=2)
    assert push_all(request, [5, 6, 7]) == ["", ""]
    assert (request.text, request.token_ids, request.finish_reason) == ("", [5, 6], "length")


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="stop"):
        start(tokenizer, stop=["x", ""])


def test_rates_are_tokens_over_their_own_time() -> None:
    timings = Timings(
        first_token_seconds=0.5, prefill_seconds=0.5, decode_seconds=2.0, prompt_tokens=100, new_tokens=9, batch=1
    )
    assert timings.prefill_tokens_per_second == 200
    assert replace(timings, cached_tokens=60).prefill_tokens_per_second == 80
    assert timings.decode_tokens_per_second == 4  # the first new token is the prefill's
    idle = Timings(0.0, 0.0, 0.0, 1, 1, 1)
    assert (idle.prefill_tokens_per_second, idle.decode_tokens_per_second) == (0, 0)


class EndingDecoder:
    """A decoder in the middle of which a finalizer, or a signal handler, cancels the request."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def push(self, token_id: int) -> str:
        for request in self.requests:
            request.end("interrupted")
        return "a"

    def flush(self) -> str:
        return ""


def test_a_request_that_is_cancelled_inside_a_token_ends_after_it() -> None:
    decoder = EndingDecoder()
    request = Request((1, 2), 3, frozenset(), decoder, StopStrings([]))  # type: ignore[arg-type]
    decoder.requests.append(request)
    request.take(7, None, context=9)
    assert request.is_unwanted
    assert not request.has_ended
    request.end("interrupted")
    request.output.wait_to_end(1.0)
    assert request.generation().token_ids == (7,)
    assert request.generation().finish_reason == "interrupted"


def test_tokens_that_the_cache_lacks_come_chunk_by_chunk_and_then_one_by_one() -> None:
    chunks = Chunks(size=4, min_invariant=4)
    request = Request(range(10), 3, frozenset(), None, StopStrings([]))
    request.begin(0, cached=2)
    for ids in ([2, 3], [4, 5, 6, 7], [8, 9]):
        assert request.is_in_prompt
        assert (request.next_ids(chunks), request.next_id) == (ids, ids[0])
        request.add_computed(len(ids))
    assert request.next_ids(chunks) == []
    for token_id in (21, 22):
        request.take(token_id, None, context=99)
    assert (request.next_ids(chunks), request.next_id, request.num_uncomputed) == ([21], 21, 2)
    request.add_computed(1)
    assert (request.next_ids(chunks), request.num_uncomputed) == ([22], 1)
    request.discard_computed()
    assert request.status(pages=0, shared_pages=0).computed_tokens == 0
    assert request.totals == TokenTotals(requests=1, prompt_tokens=8, cached_tokens=2, new_tokens=2)


def test_a_request_that_other_processes_run_too_is_cancelled_between_two_passes() -> None:
    request, alone = start(None), start(None)
    request.ends_between_passes = True
    for one in (request, alone):
        one.cancel()
    assert (request.finish_reason, alone.finish_reason) == (None, "interrupted")
    assert request.is_unwanted  # the queue ends it before the next pass
    request.take(7, None, 100)
    assert request.token_ids == [7]
    request.end("interrupted")
    assert request.finish_reason == "interrupted"


class BrokenStop(StopStrings):
    """A stop condition of a caller that raises."""

    def __init__(self, fails_at: str) -> None:
        super().__init__([])
        self._fails_at = fails_at

    def push(self, text: str) -> StopResult:
        if self._fails_at in text:
            raise KeyError("no such thing")
        return super().push(text)


def test_a_stop_condition_that_raises_ends_its_request_alone(tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    taking, ending = (Request([1, 2, 3], 100, frozenset(), decoder, BrokenStop(at)) for at in ("b", ""))
    for token_id in tokenizer.encode("abc"):
        taking.take(token_id, None, context=100)
    ending.end("interrupted")
    for request in (taking, ending):
        assert request.finish_reason == "error"
        with pytest.raises(KeyError, match="no such thing"):
            request.output.wait_to_end(1.0)
