"""Builds requests from the checked arguments of a call."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, count
from threading import Lock
from typing import Any

from graphcore.engine.arguments import (
    Prompt,
    Stop,
    check_bool,
    check_count,
    check_token_ids,
    check_top_logprobs,
    most_new_tokens,
    params_from,
    prompts_of,
    seconds_left,
    stop_condition,
)
from graphcore.engine.loading.load_model import LoadedModel
from graphcore.engine.masks import Mask, MaskThreads, masks_of
from graphcore.engine.model_runner import RunnerSizes, StaticRunner
from graphcore.engine.output import OutputStream, PromptLogprob
from graphcore.engine.pooling import POOLINGS, Pooled
from graphcore.engine.prompt_encoder import PromptEncoder
from graphcore.engine.request import Request, TokenTotals
from graphcore.errors import ConfigError
from graphcore.sampling_params import DRY_BREAKERS, SamplingParams
from graphcore.tokenizer.text_stream import IncrementalDecoder, StopCondition

BREAKER_LISTS = 16  # sequence breakers of DRY whose tokens are kept; finding them looks at the whole vocabulary


class RequestBuilder:
    """Builds the requests of one engine's calls; arguments and errors are those of `Engine.submit`.

    Args:
        totals: the engine's cumulative counters, which the requests update.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: PromptEncoder,
        sizes: RunnerSizes,
        threads: MaskThreads,
        totals: TokenTotals,
    ) -> None:
        self._loaded, self._prompts, self._sizes = loaded, prompts, sizes
        self._new_request = partial(Request, totals=totals)
        self._mask_threads, self._numbers = threads, count(1)
        self._token_texts: Sequence[str] | None = None  # for DRY, when the first request asks for it
        self._breakers: dict[tuple[str, ...], frozenset[int]] = {}  # of DRY, by their texts: the latest BREAKER_LISTS
        self._breakers_lock = Lock()

    def one(self, name: str, prompt: Prompt, n: int = 1, mask: Mask | None = None, **settings: Any) -> list[Request]:
        """Return the requests of one prompt's n answers, which write to one output.

        Args:
            name: the called method's name, for messages.
        """
        check_count("n", n)
        rows = prompts_of(prompt)
        if len(rows) != 1:
            raise ConfigError(f"{name} takes one prompt, found {len(rows)}; use generate for several")
        ids, output = self._prompts.prompt_ids(rows[0]), OutputStream(n)
        settings = {**settings, "request_id": self._checked_id(settings.get("request_id"))}
        requests = [self._request(ids, output, number, **settings) for number in range(n)]
        if mask is not None:
            takes_forced = not (requests[0].wants_logprobs or requests[0].num_top_logprobs or self._is_static)
            masks = masks_of(mask, n, self._sizes.vocab, self._mask_threads, takes_forced)
            for request, each in zip(requests, masks, strict=True):
                request.mask = each
        return requests

    def embeddings(self, prompts: Prompt | Sequence[Prompt], pooling: str) -> list[Request]:
        """Return the requests of prompts' embeddings; arguments and errors are those of `Engine.embed`."""
        if pooling not in POOLINGS:
            raise ConfigError(f"pooling={pooling!r:.40} must be one of: {', '.join(POOLINGS)}")
        self._refuse_static("embed")
        requests = self.several(prompts, max_new_tokens=1)
        for request in requests:
            request.pooled = Pooled(pooling)
        return requests

    @property
    def _is_static(self) -> bool:
        return isinstance(self._loaded.runner, StaticRunner)

    def _refuse_static(self, name: str) -> None:
        if self._is_static:
            raise ConfigError(f"{name} needs graphcore's own programs; leave out model.fallback")

    def several(self, prompts: Prompt | Sequence[Prompt], **settings: Any) -> list[Request]:
        """Return the request of each prompt, each with an output of its own; request i samples with seed + i."""
        rows = [self._prompts.prompt_ids(prompt) for prompt in prompts_of(prompts)]
        self._sizes.check_context(max(map(len, rows), default=0))
        requests = [self._request(ids, OutputStream(), number, **settings) for number, ids in enumerate(rows)]
        for request in requests:
            request.row = 0
        return requests

    def _request(
        self,
        ids: Sequence[int],
        output: OutputStream,
        number: int,
        max_new_tokens: int = 64,
        stop: Stop = (),
        logprobs: bool = False,
        top_logprobs: int = 0,
        prompt_logprobs: int | None = None,
        skip_special_tokens: bool = True,
        ignore_eos: bool = False,
        deadline: float | None = None,
        reuse_cache: bool = False,
        speculation: str | None = None,
        repetition_detection: bool = False,
        request_id: str | None = None,
        **sampling: Any,
    ) -> Request:
        self._check_logprobs(logprobs, prompt_logprobs)
        check_bool("repetition_detection", repetition_detection, "ends an answer that repeats one span")
        params = self._params(sampling, number)
        until = None if deadline is None else time.perf_counter() + seconds_left(deadline)
        self._sizes.check_context(len(ids))
        return self._new_request(
            ids,
            most_new_tokens(max_new_tokens, self._sizes.context),
            frozenset() if ignore_eos else self._loaded.end_ids,
            self._decoder(skip_special_tokens),
            self._stop_condition(stop),
            params,
            output,
            row=number,
            request_id=self._checked_id(request_id),
            wants_logprobs=bool(logprobs),
            num_top_logprobs=check_top_logprobs("top_logprobs", top_logprobs),
            num_prompt_logprobs=prompt_logprobs,
            prompt_logprobs=[PromptLogprob(ids[0], None, ())],
            deadline=until,
            reuses_cache=reuse_cache,
            dry_breakers=self._dry_breakers(params.dry_sequence_breakers) if params.has_dry else frozenset(),
            speculates=self._speculates(speculation),
            detects_repetition=bool(repetition_detection),
        )

    def _params(self, sampling: Mapping[str, Any], number: int) -> SamplingParams:
        """Return the checked sampling parameters of request `number` of a call."""
        params = self._loaded.sampling.params_with(sampling)
        check_token_ids(params, self._sizes.vocab)
        return params_from(params, number)

    def _dry_breakers(self, texts: tuple[str, ...]) -> frozenset[int]:
        """Return the ids of the tokens whose text contains a sequence breaker; the vocabulary is decoded once.

        Raises:
            ConfigError: no token contains one of the texts, which are not the default.
        """
        tokenizer = self._loaded.prompts.known
        if tokenizer is None:
            return frozenset()
        with self._breakers_lock:  # requests are built in several threads
            if self._token_texts is None:
                self._token_texts = tokenizer.token_texts(self._sizes.vocab)
            if texts not in self._breakers:
                found = {text: [at for at, own in enumerate(self._token_texts) if text in own] for text in texts}
                missing = next((text for text, ids in found.items() if not ids), None)
                if missing is not None and texts != DRY_BREAKERS:
                    raise ConfigError(
                        f"dry_sequence_breakers: no single token contains {missing!r}; give a shorter text, such as "
                        "'\\n'"
                    )
                if len(self._breakers) == BREAKER_LISTS:
                    del self._breakers[next(iter(self._breakers))]
                self._breakers[texts] = frozenset(chain.from_iterable(found.values()))
            return self._breakers[texts]

    def _speculates(self, kind: str | None) -> bool:
        """Return whether draft tokens may be checked for a request that asks for a kind of them."""
        asked, runs = self._loaded.settings.speculation.kind, self._loaded.runtime.speculation
        if kind not in (None, "off", asked, runs):
            raise ConfigError(
                f'speculation={kind!r:.40} must be "off" or the engine\'s own, {runs}; load the engine with '
                f"speculation={kind if kind in ('auto', 'lookup', 'self') else 'lookup'} for others"
            )
        return kind != "off"

    def _check_logprobs(self, logprobs: object, count: int | None) -> None:
        check_bool("logprobs", logprobs, "gives the log probability of each new token; see top_logprobs for others")
        if count is not None:
            check_top_logprobs("prompt_logprobs", count)
            self._refuse_static("prompt_logprobs")

    def _decoder(self, skip_special_tokens: bool) -> IncrementalDecoder | None:
        check_bool("skip_special_tokens", skip_special_tokens, "leaves special tokens out of the text")
        tokenizer = self._loaded.prompts.known
        return None if tokenizer is None else IncrementalDecoder(tokenizer, skip_special_tokens is not False)

    def _checked_id(self, request_id: object) -> str:
        """Return the id of a request; None numbers it."""
        if request_id is None:
            return str(next(self._numbers))
        if not isinstance(request_id, str) or not request_id:
            raise ConfigError(f"request_id={request_id!r:.40} must be a text")
        return request_id

    def _stop_condition(self, stop: Stop) -> StopCondition:
        found = stop_condition(stop)
        if stop and self._loaded.prompts.known is None:
            raise ConfigError("stop needs a tokenizer, and the checkpoint has none; leave stop out")
        return found
