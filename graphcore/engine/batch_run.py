"""The decode loop of one batch: prefill, then token by token until every request has ended."""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from graphcore.engine.runner import set_inputs
from graphcore.engine.sampler import Sampler, SamplingParams
from graphcore.engine.sequence import Generation, Timings, TokenEvent
from graphcore.engine.sequence import Sequence as Request
from graphcore.engine.token_runner import TokenRunner
from graphcore.errors import GraphError
from graphcore.progress import Progress, ignore_progress
from graphcore.streaming.scheduler import run_program
from graphcore.streaming.watched import watched


class BatchRun:
    """Requests that run together; iterate `events` to make it happen, then read `generations`.

    Args:
        runner: whose caches' rows the requests take, in order.
        requests: at most the runner's batch size.
        params: of sampling.
        wants_logprobs: record each new token's log probability.
        cached: tokens of the first request's prompt that row 0 of the cache holds already.
        on_progress: called in the stages "prefill" and "generate"; see `graphcore.progress`.
    """

    def __init__(
        self,
        runner: TokenRunner,
        requests: Sequence[Request],
        params: SamplingParams,
        wants_logprobs: bool = False,
        cached: int = 0,
        on_progress: Progress = ignore_progress,
    ) -> None:
        self.runner = runner
        self.requests = requests
        self.wants_logprobs = wants_logprobs
        self.cached = cached
        self.on_progress = on_progress
        self.total = max(request.max_new_tokens for request in requests)
        self.is_greedy = params.temperature == 0.0 and params.repetition_penalty == 1.0
        histories = [request.prompt_ids for request in requests]
        histories += [()] * (runner.width(len(requests)) - len(requests))
        self.sampler = Sampler(params, histories, runner.vocab, runner.device)
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0

    @torch.inference_mode()
    def events(self) -> Iterator[TokenEvent]:
        """Yield each new token as it is made, row by row within a step."""
        number = self.runner.claim()
        began = time.perf_counter()
        width = self.runner.width(len(self.requests))
        starts = [self.cached, *[0] * (len(self.requests) - 1)]
        rows = [request.prompt_ids[start:] for request, start in zip(self.requests, starts, strict=True)]
        logits = self.runner.feed(rows, starts, self.on_progress)
        padded = logits.new_zeros(width, logits.shape[1])
        padded[: len(rows)] = logits
        check_finite(logits)
        chosen = self.sampler.choose(padded)
        token_ids = chosen.tolist()
        self.prefill_seconds = time.perf_counter() - began
        done = 1
        self.on_progress("generate", None, done, self.total)
        yield from self._accept(token_ids, padded)
        program = self.runner.program("decode", width, self.is_greedy)
        state = program.state
        lengths = [len(request.prompt_ids) for request in self.requests]
        set_inputs(state, [[token_id] for token_id in token_ids[: len(rows)]], lengths, width, 1)
        while self._mark_active(state.span.counts):
            self.runner.check_owner(number)
            began = time.perf_counter()
            run_program(program, watched(self.runner.policy, self.on_progress, "generate", done, self.total))
            if self.is_greedy:
                chosen = state.chosen
            else:
                check_finite(state.logits)
                chosen = self.sampler.choose(state.logits)
                state.feed(chosen)
            token_ids = chosen.tolist()  # waits for the device
            self.decode_seconds += time.perf_counter() - began
            done += 1
            self.on_progress("generate", None, done, self.total)
            yield from self._accept(token_ids, state.logits)

    def interrupt(self) -> None:
        """End the requests that still run, keeping what they have."""
        for request in self.requests:
            if request.finish_reason is None:
                request.finish("interrupted")

    def generations(self) -> list[Generation]:
        """Return what each request gave; all must have ended."""
        return [self._generation(request) for request in self.requests]

    def _mark_active(self, counts: Tensor) -> bool:
        """Give ended requests no token in the next step; return whether any still runs."""
        active = [request.finish_reason is None for request in self.requests]
        counts[: len(active)].copy_(torch.tensor(active, dtype=counts.dtype))
        return any(active)

    def _accept(self, token_ids: Sequence[int], logits: Tensor) -> Iterator[TokenEvent]:
        """Give each running request its token."""
        logprobs: list[float] | None = None
        if self.wants_logprobs:
            index = torch.tensor(token_ids, device=logits.device)[:, None]
            logprobs = logits.log_softmax(dim=-1).gather(1, index)[:, 0].tolist()
        for row, request in enumerate(self.requests):
            if request.finish_reason is not None:
                continue
            logprob = logprobs[row] if logprobs is not None else None
            if logprob is not None:
                request.logprobs.append(logprob)
            used = len(request.prompt_ids) + len(request.token_ids) + 1
            text = request.push(token_ids[row], is_context_full=used > self.runner.context)
            yield TokenEvent(row, token_ids[row], text, logprob, request.finish_reason)

    def _generation(self, request: Request) -> Generation:
        assert request.finish_reason is not None, "a request has not ended"
        timings = Timings(
            first_token_seconds=self.prefill_seconds,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            prompt_tokens=len(request.prompt_ids),
            new_tokens=len(request.token_ids),
            batch=len(self.requests),
        )
        logprobs = tuple(request.logprobs) if self.wants_logprobs else None
        return Generation(request.text, tuple(request.token_ids), request.finish_reason, logprobs, timings)


def check_finite(logits: Tensor) -> None:
    """Return if no logit is NaN or infinite.

    Raises:
        GraphError: one is; no choice of a token would mean anything.
    """
    if not bool(logits.isfinite().all()):
        raise GraphError(
            "the model's logits are not finite (NaN or infinity): its weights are damaged, or the dtype is too narrow "
            "for it; try dtype=bf16 or dtype=fp32"
        )
