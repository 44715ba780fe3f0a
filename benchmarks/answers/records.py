"""Values that are the same in every run of the same code, as JSON has them."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from answers.cases import Record
from graphcore.errors import GraphcoreError


def digest(tensor: Tensor) -> str:
    """Return shape, dtype and sha256 of a tensor."""
    plain = tensor.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{list(plain.shape)} {plain.dtype} {hashlib.sha256(content).hexdigest()}"


def generation(found: Any) -> Record:
    """Return what a Generation says, without its seconds."""
    logprobs = None if found.logprobs is None else list(found.logprobs)
    return {
        "token_ids": list(found.token_ids),
        "text": found.text,
        "finish_reason": found.finish_reason,
        "logprobs": logprobs,
        "prompt_tokens": found.timings.prompt_tokens,
        "cached_tokens": found.timings.cached_tokens,
    }


def asked(ask: Callable[[], Record], folder: Path) -> Record:
    """Return an answer, or the error of graphcore's own that came instead."""
    try:
        return ask()
    except GraphcoreError as error:
        return {"error": f"{type(error).__name__}: {error}".replace(str(folder), "<work>")}


def steady(stats: dict[str, Any]) -> Record:
    """Return an engine's stats without seconds and rates."""
    return {key: value for key, value in stats.items() if not isinstance(value, float)}
