"""Generation requests: encoded prompts with their sampling parameters and limits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from graphcore.config.settings import Settings
from graphcore.engine.engine import Engine
from graphcore.engine.prompt_encoder import PromptEncoder
from graphcore.errors import ConfigError, GraphcoreError
from graphcore.sampling_params import SamplingParams
from graphcore.tasks.requests.prompts import (
    EncodedPrompt,
    Prompt,
    check_prompt,
    encode_prompt,
    encode_prompts,
    notes_on,
)
from graphcore.tasks.requests.request_lines import RequestLine
from graphcore.tasks.requests.sampling_keys import changed_params
from graphcore.tasks.task import Context
from graphcore.tasks.task_engine import default_max_new_tokens, default_params, stops_of


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt with the settings of its answer.

    Attributes:
        params: sampling parameters, with the request's own seed.
        line: the request's line of a JSONL file; None if it does not come from one.
    """

    prompt: EncodedPrompt
    params: SamplingParams
    max_new_tokens: int
    stops: tuple[str, ...]
    line: RequestLine | None = None


def check_prompts(settings: Settings, prompts: Sequence[Prompt], encoder: PromptEncoder) -> None:
    """Check that a checkpoint can encode the prompts, before its weights are read; errors are those of `check_prompt`.

    Args:
        encoder: encoder with the checkpoint's tokenizer.
    """
    for prompt in prompts:
        with _named(prompt):
            check_prompt(encoder, settings, prompt)


def generation_requests(context: Context, engine: Engine, prompts: Sequence[Prompt]) -> list[GenerationRequest]:
    """Return the checked requests of the prompts.

    Raises:
        ConfigError: a prompt or one of its own settings is wrong; the message names the line of a file.
    """
    settings = context.settings
    if prompts and isinstance(prompts[0], RequestLine):
        requests = [_request_of_line(context, engine, line) for line in prompts if isinstance(line, RequestLine)]
        for note in notes_on([request.prompt for request in requests]):
            context.console.note(note)
        return requests
    encoded = encode_prompts(engine, settings, prompts, context.console.note)
    params = default_params(engine)
    stops = tuple(stops_of(settings))
    return [
        GenerationRequest(prompt, params, default_max_new_tokens(engine, prompt.is_chat), stops) for prompt in encoded
    ]


def _request_of_line(context: Context, engine: Engine, line: RequestLine) -> GenerationRequest:
    """Return a line's request; its draws depend only on its own seed or, without one, on its number in the file."""
    settings = context.settings
    params = default_params(engine)
    stops = tuple(stops_of(settings) if line.stops is None else line.stops)
    with _named(line):
        params = changed_params(replace(params, seed=params.seed + line.number - 1), line.sampling)
        prompt = encode_prompt(engine, settings, line)
        most = line.max_new_tokens or default_max_new_tokens(engine, prompt.is_chat)
        request = GenerationRequest(prompt, params, most, stops, line)
        engine.check_request(**arguments_of(request))
    return request


@contextmanager
def _named(prompt: Prompt) -> Iterator[None]:
    """Let errors begin with the line of a file that the prompt comes from."""
    try:
        yield
    except GraphcoreError as error:
        if not isinstance(prompt, RequestLine) or str(error).startswith(prompt.where):
            raise
        raise ConfigError(f"{prompt.where}: {error}") from error


def arguments_of(request: GenerationRequest) -> dict[str, Any]:
    """Return a request as arguments of `Engine.submit` and `Engine.check_request`."""
    limits = {"max_new_tokens": request.max_new_tokens, "stop": request.stops}
    return {"prompt": request.prompt.token_ids, **limits, **asdict(request.params)}
