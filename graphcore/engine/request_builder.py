"""Builds requests from the checked arguments of a call."""

import time
from collections.abc import Sequence
from typing import Any

from graphcore.engine.arguments import (
    Prompt,
    check_bool,
    check_count,
    check_stops,
    most_new_tokens,
    params_from,
    prompts_of,
    sampling_params,
    seconds_left,
)
from graphcore.engine.loading.load_model import LoadedModel
from graphcore.engine.model_runner import RunnerSizes
from graphcore.engine.output import OutputStream
from graphcore.engine.prompt_encoder import PromptEncoder
from graphcore.engine.request import Mask, Request
from graphcore.errors import ConfigError
from graphcore.tokenizer.text_stream import IncrementalDecoder, StopStrings


class RequestBuilder:
    """Builds the requests of one engine's calls; arguments and errors are those of `Engine.submit`."""

    def __init__(self, loaded: LoadedModel, prompts: PromptEncoder, sizes: RunnerSizes) -> None:
        self._loaded, self._prompts, self._sizes = loaded, prompts, sizes

    def one(self, name: str, prompt: Prompt, n: int = 1, **settings: Any) -> list[Request]:
        """Return the requests of one prompt's n answers, which write to one output.

        Args:
            name: the called method's name, for messages.
        """
        check_count("n", n)
        rows = prompts_of(prompt)
        if len(rows) != 1:
            raise ConfigError(f"{name} takes one prompt, found {len(rows)}; use generate for several")
        ids, output = self._prompts.prompt_ids(rows[0]), OutputStream(n)
        return [self._request(ids, output, number, **settings) for number in range(n)]

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
        stop: str | Sequence[str] = (),
        logprobs: bool = False,
        ignore_eos: bool = False,
        deadline: float | None = None,
        mask: Mask | None = None,
        reuse_cache: bool = False,
        **sampling: float | int,
    ) -> Request:
        check_bool("logprobs", logprobs, "gives the log probability of each new token, and of no others")
        most = most_new_tokens(max_new_tokens, self._sizes.context)
        seconds = None if deadline is None else seconds_left(deadline)
        self._sizes.check_context(len(ids))
        stops, tokenizer = check_stops(stop), self._loaded.prompts.known
        if stops and tokenizer is None:
            raise ConfigError("stop needs a tokenizer, and the checkpoint has none; leave stop out")
        return Request(
            ids,
            most,
            frozenset() if ignore_eos else self._loaded.end_ids,
            IncrementalDecoder(tokenizer) if tokenizer else None,
            StopStrings(stops),
            params_from(sampling_params(sampling), number),
            output,
            row=number,
            wants_logprobs=logprobs,
            mask=mask,
            deadline=None if seconds is None else time.perf_counter() + seconds,
            reuses_cache=reuse_cache,
        )
