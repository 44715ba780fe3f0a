"""The host's sampler: the next token of each sequence, from its logits.

Legend: V vocab.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from graphcore.engine.model_runner import ModelRunner
from graphcore.engine.request import Request
from graphcore.errors import ConfigError
from graphcore.kernels.backend import Backend
from graphcore.kernels.ops.draw import Draw, choose_tokens, not_finite


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
    """A sampler on the host that keeps the sampling state of each request."""

    def __init__(self, runner: ModelRunner) -> None:
        self._sizes, self._device = runner.sizes, runner.device
        self._sampler = Sampler(runner.backend)
        self._rows: dict[Request, Draw] = {}

    def choose(
        self, requests: Sequence[Request], logits: Sequence[Tensor], likeliest: Sequence[int] | None = None
    ) -> None:
        """Sample the next token of each request and append it; an error ends only the request that caused it.

        Args:
            logits: [V] float32 of each request.
            likeliest: each request's likeliest token, -1 where a logit is not finite; None where it is not known.
        """
        at, rows = list[int](), list[Draw]()
        for index, request in enumerate(requests):
            row = self._row_or_failure(request)
            if row is not None:
                at.append(index)
                rows.append(row)
        if not rows:
            return
        chosen: Sequence[int | Exception]
        if likeliest is not None and all(row.takes_likeliest for row in rows):
            chosen = [likeliest[index] if likeliest[index] >= 0 else not_finite() for index in at]
        else:
            chosen = self._chosen([logits[index] for index in at], rows)
        for index, row, token in zip(at, rows, chosen, strict=True):
            request = requests[index]
            if isinstance(token, Exception):
                request.fail(token)
                continue
            row.append(token)
            logprob = float(logits[index].log_softmax(dim=-1)[token]) if request.wants_logprobs else None
            request.take(token, logprob, self._sizes.context)

    def forget(self, request: Request) -> None:
        """Free the sampling state of a request."""
        self._rows.pop(request, None)

    def _row_or_failure(self, request: Request) -> Draw | None:
        """Return a request's sampling state; None if the request has ended, or now ends with an error of its mask."""
        try:
            return None if request.has_ended else self._row(request)
        except BaseException as error:  # noqa: BLE001  # sys.exit() too
            request.fail(error)
            return None

    def _row(self, request: Request) -> Draw:
        """Return a request's sampling state, with the mask of its next token."""
        if request not in self._rows:
            history = request.prompt_ids
            self._rows[request] = Draw.after(history, request.params, self._sizes.vocab, self._device)
        row = self._rows[request]
        if request.mask is not None:
            mask = checked_mask(request.mask(tuple(request.token_ids)), self._sizes.vocab)
            row.mask = None if mask is None else mask.to(self._device)
        return row

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


def checked_mask(allowed: object, vocab: int) -> Tensor | None:
    """Return the result of a mask after checking it: [V] bool, or None to allow all tokens.

    Raises:
        ConfigError: the mask returned something else, or allows no token.
    """
    if allowed is None:
        return None
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool or allowed.shape != (vocab,):
        found = f"{allowed.dtype} {list(allowed.shape)}" if isinstance(allowed, Tensor) else type(allowed).__name__
        raise ConfigError(f"mask must return a torch.bool tensor of [{vocab}] or None, found {found}")
    if not bool(allowed.any()):
        raise ConfigError("mask allows no token; allow at least the end token")
    return allowed
