"""Compiles a grammar, and computes some of its masks, where the death of llguidance's native code ends nothing else.

llguidance can end its process: by recursion without an end, by a panic, for lack of memory. So each grammar is first
compiled here, in a process with bounds (bounded_process.py), and only what passes is compiled where requests run.
The masks of a short walk through the grammar are computed, too.

The tokens are the 256 bytes and the model's special tokens, at their ids: what is compiled does not depend on the other
tokens, and their tables would take a second and 100 MB.
"""

import json
import random
import resource
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from llguidance import LLMatcher, LLTokenizer

from graphcore.tokenizer.bounded_worker import REFUSED, TEXT, UNREADABLE
from graphcore.tokenizer.deep_stack import run_in_deep_stack, stack_nbytes

if TYPE_CHECKING:
    from llguidance import TokenizerWrapper

STEPS = 64  # tokens of the walk
WALK_SECONDS = 0.25  # processor time after which the walk ends; a single mask may take all that the process has
STRUCTURE = frozenset(b'{}[]":,\\.-+eE019 \n<>')  # bytes that lead on: among all bytes, a text would never end
ENDLESS = "NoExtensionBias"  # llguidance's message on rules such as `start: start`


class ByteTokens:
    """The tokens of the walk as llguidance takes a tokenizer: special tokens at their ids, and bytes behind them.

    Args:
        vocab: number of tokens V of the model.
        ends: tokens that end an answer.
        specials: bytes of each special token, by id.

    Attributes:
        first: id of the byte 0, a multiple of 8.
        is_tokenizer_wrapper: True, by which llguidance knows such an object.
    """

    def __init__(self, vocab: int, ends: list[int], specials: dict[int, bytes]) -> None:
        self.first = -(-vocab // 8) * 8
        self.eos_token_id, self.bos_token_id = min(ends), None
        self.tokens = [specials.get(token_id, b"") for token_id in range(self.first)]
        self.tokens += [bytes([byte]) for byte in range(256)]
        self.special_token_ids = sorted(specials)
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the ids of a text's bytes."""
        return [self.first + byte for byte in (text if isinstance(text, bytes) else text.encode())]


def grammar_answers(beginning: bytes, room: int) -> Callable[[bytes], tuple[bytes, str]]:
    """Return the function from a grammar, in llguidance's format, to an answer: TEXT if it can be compiled.

    Args:
        beginning: JSON of `ByteTokens`' arguments, bytes as Latin-1.
        room: ignored; an answer is a short reason.
    """
    del room
    given = json.loads(beginning)
    specials = {int(token_id): text.encode("latin-1") for token_id, text in given["specials"].items()}
    tokens = ByteTokens(given["vocab"], given["ends"], specials)
    known = LLTokenizer(cast("TokenizerWrapper", tokens), n_vocab=len(tokens.tokens), eos_token=given["ends"])
    room_nbytes, most = resource.getrlimit(resource.RLIMIT_AS)

    def answer(request: bytes) -> tuple[bytes, str]:
        source = request.decode("utf-8", "surrogatepass")
        try:
            resource.setrlimit(resource.RLIMIT_AS, (room_nbytes + stack_nbytes(len(source)), most))
            matcher = run_in_deep_stack(lambda: LLMatcher(known, source), len(source))
            reason = matcher_refusal(matcher) or _walk(matcher.deep_copy(), tokens.first, random.Random(source))
        except Exception as error:  # noqa: BLE001 - whatever native code raises is the reason
            return UNREADABLE, f"{type(error).__name__}: {error!s:.300}"
        return (REFUSED, reason) if reason else (TEXT, "")

    return answer


def _walk(matcher: LLMatcher, first: int, choice: random.Random) -> str:
    """Compute masks along a random answer; return why the first one cannot be computed, empty if it can.

    An error behind it ends the request that meets it, as a grammar's limits are met by some answers and not by others.
    """
    until = time.process_time() + WALK_SECONDS
    for step in range(STEPS):
        forced = matcher.compute_ff_tokens()
        allowed = b"" if forced else matcher.compute_bitmask()[first // 8 : first // 8 + 32]
        if matcher.is_error():
            return "" if step else matcher_refusal(matcher)
        can_come = [byte for byte in range(256) if allowed and allowed[byte >> 3] >> (byte & 7) & 1]
        leading = [byte for byte in can_come if byte in STRUCTURE]
        if not forced and not can_come:  # only an end or a special token can come
            break
        if can_come:
            forced = [first + choice.choice(leading if leading and choice.random() < 0.7 else can_come)]
        matcher.consume_tokens(forced)
        if matcher.is_error() or matcher.is_stopped() or time.process_time() > until:
            break
    return ""


def matcher_refusal(matcher: LLMatcher) -> str:
    """Return why llguidance refuses a grammar or its tokens, on one line; empty if it does not."""
    if not matcher.is_error():
        return ""
    reason = " ".join(matcher.get_error().partition("<state>")[0].split())  # the parser's state is long
    return "no text matches it, because its rules never end" if reason == ENDLESS else f"{reason:.300}"
