"""The host's sampler: the next token of each sequence, from its logits.

Legend: V vocab.
"""

from collections.abc import Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, wait

import torch
from torch import Tensor

from graphcore.engine.model_runner import ModelRunner
from graphcore.engine.output import TokenLogprob
from graphcore.engine.request import Request
from graphcore.kernels.backend import Backend
from graphcore.kernels.ops.draw import Draw, choose_tokens, not_finite

GRACE = 0.002  # seconds that a step waits for masks that are not there when it has run


class Sampler:
    """Sampler on the host; each call may have other rows.

    Args:
        backend: kernels that sample; torch samples if they have no kernel for that.
    """

    def __init__(self, backend: Backend) -> None:
        self._kernel = backend.draw_kernel()

    def choose(self, logits: Sequence[Tensor], rows: Sequence[Draw]) -> list[int]:
        """Return each row's next token; neither the logits nor the rows change.

        Args:
            logits: [V] float32 of each row.
            rows: settings of each row.

        Raises:
            GraphError: a logit is NaN or infinite, or a mask allows no token.
        """
        return choose_tokens(logits, rows) if self._kernel is None else self._kernel.choose(logits, rows)


class SequenceSampler:
    """A sampler on the host that keeps the sampling state of each request.

    A request whose mask is not there yet keeps its logits here, and gets its token from `choose_pending`.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._sizes, self._device = runner.sizes, runner.device
        self._sampler = Sampler(runner.backend)
        self._rows: dict[Request, Draw] = {}
        self._hidden_ends: dict[Request, Tensor] = {}  # [V] bool, False for what min_tokens hides
        self._pending: dict[Request, Tensor] = {}

    def take_likeliest(self, requests: Sequence[Request], token_ids: Sequence[int]) -> None:
        """Append the likeliest token to each request that always takes it; -1 says that a logit is not finite."""
        for request, token_id in zip(requests, token_ids, strict=True):
            if token_id < 0:
                request.fail(not_finite())
            else:
                request.take(token_id, None, self._sizes.context)

    def choose(self, requests: Sequence[Request], logits: Sequence[Tensor]) -> None:
        """Sample the next token of each request and append it; an error ends only the request that caused it.

        Args:
            logits: [V] float32 of each request.
        """
        self._await_masks(requests, GRACE)
        at, rows = list[int](), list[Draw]()
        for index, request in enumerate(requests):
            row = self._row_or_none(request, logits[index])
            if row is not None:
                at.append(index)
                rows.append(row)
        if not rows:
            return
        chosen = self._chosen([logits[index] for index in at], rows)
        for index, row, token in zip(at, rows, chosen, strict=True):
            if isinstance(token, Exception):
                requests[index].fail(token)
            else:
                row.append(token)
                self._take(requests[index], token, logits[index])

    @property
    def has_pending(self) -> bool:
        """Whether requests that have not ended wait for their masks."""
        return any(not request.has_ended for request in self._pending)

    def choose_pending(self, seconds: float = 0.0) -> bool:
        """Sample the tokens that waited for their masks; return whether any request got one.

        Args:
            seconds: most seconds to wait for one of the masks.
        """
        if not self._pending:
            return False
        self._await_masks([*self._pending], seconds, return_when=FIRST_COMPLETED)
        ready = [request for request in self._pending if request.has_ended or is_masked(request)]
        if not ready:
            return False
        self.choose(ready, [self._pending.pop(request) for request in ready])
        return True

    def supersede(self, requests: Sequence[Request]) -> None:
        """Drop the logits that requests keep for their masks, because their tokens have run again."""
        for request in requests:
            self._pending.pop(request, None)

    def take_forced(self, requests: Sequence[Request]) -> None:
        """Append the tokens that masks force after the last known ones, as far as that is known now.

        Args:
            requests: requests none of whose logits are still to be passed to `choose`.
        """
        self.choose_pending()
        for request in requests:
            is_waiting = request in self._pending or request.has_ended or request.is_in_prompt
            if request.mask is not None and not is_waiting and is_masked(request):
                self._take_forced(request)

    def share(self) -> None:
        """Let the other ranks have the tokens that were sampled since the last call; nothing without other ranks."""

    def forget(self, request: Request) -> None:
        """Free the sampling state of a request."""
        self._rows.pop(request, None)
        self._hidden_ends.pop(request, None)
        self._pending.pop(request, None)
        if request.mask is not None:
            request.mask.abandon()

    def _await_masks(self, requests: Sequence[Request], seconds: float, return_when: str = ALL_COMPLETED) -> None:
        futures = [one.mask.future for one in requests if one.mask is not None and not one.has_ended]
        if futures and seconds and not all(future.done() for future in futures):
            wait(futures, seconds, return_when)

    def _take(self, request: Request, token: int, logits: Tensor) -> None:
        """Append a sampled token with the log probabilities that the request records."""
        logprob: float | None = None
        top: tuple[TokenLogprob, ...] = ()
        if request.wants_logprobs or request.num_top_logprobs:
            logprobs = logits.log_softmax(dim=-1)
            logprob = float(logprobs[token]) if request.wants_logprobs else None
            top = likeliest_of(logprobs, request.num_top_logprobs)
        request.take(token, logprob, self._sizes.context, top)
        self._begin_mask(request, [token])

    @staticmethod
    def _begin_mask(request: Request, token_ids: Sequence[int]) -> None:
        """Start computing the mask after new tokens; if no thread can be started, that ends this request alone."""
        if request.mask is None or request.has_ended:
            return
        try:
            request.mask.begin(token_ids)
        except RuntimeError as error:
            request.fail(error)

    def _take_forced(self, request: Request) -> bool:
        """Append the tokens that a mask's result forces; return whether it forces any. Errors end the request."""
        assert request.mask is not None, "a request with a mask"
        try:
            forced = request.mask.future.result().forced
        except BaseException as error:  # noqa: BLE001  # sys.exit() too
            request.fail(error)
            return False
        if not forced:
            return False
        row = self._row(request)
        for token in forced:
            if not request.has_ended:
                row.append(token)
                request.take(token, None, self._sizes.context)
        self._begin_mask(request, forced)
        return True

    def _row_or_none(self, request: Request, logits: Tensor) -> Draw | None:
        """Return a request's sampling state with the mask of its next token.

        None if the request has ended, or now ends with an error of its mask, or its token is forced, or its mask is not
        there yet.
        """
        self._pending.pop(request, None)  # older logits: its tokens ran again
        if request.has_ended:
            return None
        if request.mask is not None and not is_masked(request):
            self._pending[request] = logits.clone()
            return None
        try:
            if request.mask is not None and self._take_forced(request):
                return None
            return None if request.has_ended else self._masked_row(request)
        except BaseException as error:  # noqa: BLE001  # sys.exit() too
            request.fail(error)
            return None

    def _row(self, request: Request) -> Draw:
        """Return a request's sampling state."""
        if request not in self._rows:
            known = request.prompt_ids, request.params, self._sizes.vocab, self._device, request.token_ids
            self._rows[request] = Draw.after(*known, request.dry_breakers)
        return self._rows[request]

    def _masked_row(self, request: Request) -> Draw:
        """Return a request's sampling state, with the mask of its next token."""
        row = self._row(request)
        allowed = None if request.mask is None else request.mask.future.result().allowed
        row.mask = None if allowed is None else allowed.to(self._device)
        if len(request.token_ids) < request.params.min_tokens:
            others = self._without_ends(request)
            both = others if row.mask is None else row.mask & others
            row.mask = both if bool(both.any()) else row.mask  # a mask that allows an end alone goes first
        return row

    def _without_ends(self, request: Request) -> Tensor:
        """Return which tokens do not end a request, [V] bool."""
        if request not in self._hidden_ends:
            others = torch.ones(self._sizes.vocab, dtype=torch.bool, device=self._device)
            ends = sorted(request.end_ids.union(request.params.stop_token_ids))
            others[torch.tensor(ends, dtype=torch.int64, device=self._device)] = False
            self._hidden_ends[request] = others
        return self._hidden_ends[request]

    def _chosen(self, logits: Sequence[Tensor], rows: Sequence[Draw]) -> Sequence[int | Exception]:
        """Return each row's next token, or its error."""
        try:
            return self._sampler.choose(logits, rows)
        except Exception:  # noqa: BLE001  # a row's error ends that row
            return [self._alone(one, row) for one, row in zip(logits, rows, strict=True)]

    def _alone(self, logits: Tensor, row: Draw) -> int | Exception:
        try:
            return self._sampler.choose([logits], [row])[0]
        except Exception as error:  # noqa: BLE001  # it is raised for the row's reader
            return error


def is_masked(request: Request) -> bool:
    """Return whether the mask of a request's next token is computed; True without a mask."""
    return request.mask is None or request.mask.future.done()


def likeliest_of(logprobs: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    """Return the `count` likeliest tokens of log probabilities [V], the likeliest first, of equals lower ids first."""
    if not count:
        return ()
    values, ids = logprobs.topk(min(count, len(logprobs)))
    pairs = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(TokenLogprob(*pair) for pair in pairs)
