"""Requests with all that their answers depend on, and which of them run together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphcore.engine.batch_run import BatchRun
from graphcore.engine.engine import Engine
from graphcore.engine.sampler import SamplingParams
from graphcore.errors import ConfigError, GraphcoreError
from graphcore.tasks.prompts import Prompt, Request, encode_prompt, encode_prompts
from graphcore.tasks.request_lines import RequestLine
from graphcore.tasks.running import DEFAULT_NEW_TOKENS, sampling_of, stops_of
from graphcore.tasks.sampling_keys import changed_params
from graphcore.tasks.task import Context


@dataclass(frozen=True)
class Job:
    """One request and how it is to be answered.

    Attributes:
        params: of sampling; their seed is the request's own.
        line: of the JSONL file that it comes from; None without one.
    """

    request: Request
    params: SamplingParams
    max_new_tokens: int
    stops: tuple[str, ...]
    line: RequestLine | None = None


def jobs_of(context: Context, engine: Engine, prompts: Sequence[Prompt]) -> list[Job]:
    """Return what is to be answered, each request checked.

    Raises:
        ConfigError: a prompt or a setting of its own is wrong; of a file the message names the line.
    """
    settings = context.settings
    if prompts and isinstance(prompts[0], RequestLine):
        return [_line_job(context, engine, line) for line in prompts if isinstance(line, RequestLine)]
    most = settings.max_new_tokens or DEFAULT_NEW_TOKENS
    requests = encode_prompts(engine, settings, prompts, context.console.note)
    return [Job(request, sampling_of(settings), most, tuple(stops_of(settings))) for request in requests]


def _line_job(context: Context, engine: Engine, line: RequestLine) -> Job:
    """Return a line's job. What it draws depends on its own seed, or else on its number in the file alone."""
    settings = context.settings
    params = sampling_of(settings)
    most = line.max_new_tokens or settings.max_new_tokens or DEFAULT_NEW_TOKENS
    stops = tuple(stops_of(settings) if line.stops is None else line.stops)
    try:
        params = changed_params(replace(params, seed=params.seed + line.number - 1), line.sampling)
        job = Job(encode_prompt(engine, settings, line), params, most, stops, line)
        open_run(engine, [job], logprobs=False)
    except GraphcoreError as error:
        where = "" if str(error).startswith(line.where) else f"{line.where}: "
        raise ConfigError(f"{where}{error}") from error
    return job


def waves_of(jobs: Sequence[Job], batch_size: int) -> Iterator[list[Job]]:
    """Yield the jobs that run together, in order.

    A batch samples in one way, and its rows draw by consecutive seeds; the likeliest token is not drawn.
    """
    wave: list[Job] = []
    for job in jobs:
        if wave and (len(wave) == batch_size or not _runs_behind(job, wave)):
            yield wave
            wave = []
        wave.append(job)
    yield wave


def _runs_behind(job: Job, wave: Sequence[Job]) -> bool:
    first = wave[0]
    seed = first.params.seed + len(wave)
    has_seed = job.params.temperature == 0 or job.params.seed == seed
    alike = replace(job.params, seed=first.params.seed) == first.params
    return has_seed and alike and (job.max_new_tokens, job.stops) == (first.max_new_tokens, first.stops)


def open_run(engine: Engine, wave: Sequence[Job], logprobs: bool) -> BatchRun:
    """Return the run of the jobs that fit in one batch; nothing is computed yet.

    Raises:
        ConfigError: a prompt is too long, or holds an id that is no token.
    """
    token_ids = [job.request.token_ids for job in wave]
    first = wave[0]
    return engine.open_run(token_ids, first.max_new_tokens, first.stops, first.params, logprobs)
