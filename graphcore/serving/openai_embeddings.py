"""POST /v1/embeddings: embeddings as numbers, or as base64 of little-endian float32, as OpenAI's client asks."""

import asyncio
import base64
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from graphcore.engine.engine import Engine
from graphcore.engine.request_handle import RequestHandle
from graphcore.serving.answering import limits_of
from graphcore.serving.fields import RequestFields, parse_request
from graphcore.serving.openai_completions import Prompts, check_queue_room, prompts_of_field
from graphcore.serving.request_errors import RequestError
from graphcore.serving.served_model import ServedModel, ServingState


class EmbeddingRequest(RequestFields):
    """The fields of a request."""

    input: Prompts
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    user: str | None = None


def read_embedding(body: Mapping[str, Any]) -> tuple[EmbeddingRequest, list[str]]:
    """Return a request, and the names of fields that are ignored.

    Raises:
        RequestError: a field is wrong or cannot be taken; the error names it.
    """
    request, unknown = parse_request(EmbeddingRequest, body)
    if not request.input or not all(prompts_of_field(request.input)):
        raise RequestError("input is empty; give at least one character or token", field="input")
    return request, unknown


async def embedding_body(served: ServedModel, request: EmbeddingRequest) -> dict[str, Any]:
    """Return the body of an answer.

    Raises:
        RequestError: a prompt is refused, or the model has other dimensions than asked for.
    """
    engine = served.engine
    size = engine.config.hidden_size
    if request.dimensions not in (None, size):
        raise RequestError(f"dimensions={request.dimensions}; this model has {size} and no fewer", field="dimensions")
    try:
        handles, tokens = await asyncio.to_thread(_submit, served, engine, request)
        with served.ended_after(handles):
            for handle in handles:
                await handle
            rows = [handle.embedding(request.normalize).numpy().astype("<f4") for handle in handles]
    except Exception as error:
        if served.state is ServingState.DRAINING:
            raise RequestError("the server has ended before the embeddings", status=503, code="not_ready") from error
        raise served.error_of(error) from error
    data = [
        {"object": "embedding", "index": at, "embedding": _encoded(row, request.encoding_format)}
        for at, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": served.name, "usage": usage}


def _submit(served: ServedModel, engine: Engine, request: EmbeddingRequest) -> tuple[list[RequestHandle], int]:
    """Encode all prompts and submit them; return their handles, and the number of their tokens."""
    limits, given, prompts = limits_of(served), prompts_of_field(request.input), list[list[int]]()
    check_queue_room(engine, len(given), "input")
    for prompt in given:
        if isinstance(prompt, str):
            limits.check_text(len(prompt))
        prompts.append(engine.prompts.prompt_ids(prompt))
        limits.check_prompt(len(prompts[-1]))
    return engine.submit_embeddings(prompts, request.pooling), sum(map(len, prompts))


def _encoded(row: np.ndarray, encoding: str) -> list[float] | str:
    return row.tolist() if encoding == "float" else base64.b64encode(row.tobytes()).decode()
