"""task=generate: answer or continue a prompt, or a JSONL file of them, and print the text as it is made."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from omegaconf import MISSING

from graphcore.engine.batch_run import BatchRun
from graphcore.engine.engine import Engine
from graphcore.engine.inputs import params_from
from graphcore.engine.sequence import Generation
from graphcore.graph.compile import CompileReport
from graphcore.tasks.prompts import Request, encode_prompts, read_prompts
from graphcore.tasks.result import compile_record, ran_record
from graphcore.tasks.running import describe, describe_compile, load_engine, sampling_of, stops_of
from graphcore.tasks.startup import seconds_since_start
from graphcore.tasks.stream_watch import trace
from graphcore.tasks.task import Context, Record, Task


@dataclass
class GenerateSettings:
    """conf/task/generate.yaml."""

    name: str = MISSING
    prompts_jsonl: str | None = MISSING
    logprobs: bool = MISSING


@dataclass
class Progress:
    """What has come out so far.

    Attributes:
        streams: print the text as it comes; with several requests each is printed when it is whole.
        first_token_at: seconds from the start of the process to the first token; None before it.
        status: "ok", or "interrupted" after Ctrl-C.
    """

    streams: bool
    done: list[Generation] = field(default_factory=list)
    first_token_at: float | None = None
    status: str = "ok"


def run(context: Context, task: GenerateSettings) -> Record:
    """Generate for every prompt; Ctrl-C keeps what there is."""
    settings, console = context.settings, context.console
    prompts = read_prompts(settings, task.prompts_jsonl)
    began = time.perf_counter()
    with load_engine(context) as engine:
        load_seconds = time.perf_counter() - began
        requests = encode_prompts(engine, settings, prompts, console.note)
        waves = [requests[at : at + settings.batch_size] for at in range(0, len(requests), settings.batch_size)]
        for wave in waves:
            open_run(context, engine, wave, task.logprobs, 0)  # refuses what cannot run, before anything does
        console.note(describe(engine, load_seconds))
        compiled = engine.warm_up(max(map(len, waves)), sampling_of(settings))
        progress, generating_since = Progress(streams=len(requests) == 1), time.perf_counter()
        for wave in waves:
            if progress.status == "ok":
                _run_wave(context, engine, wave, task.logprobs, progress)
        console.note(speed_line(progress.done))
        console.note(start_line(progress, compiled))
        if settings.trace:
            trace(context, engine, generating_since, time.perf_counter())
        records = [_record(request, done) for request, done in zip(requests, progress.done, strict=False)]
        return {
            "status": progress.status,
            **ran_record(engine),
            "load_seconds": load_seconds,
            "compile": compile_record(compiled),
            "process_to_first_token_seconds": progress.first_token_at,
            **_first(records),
            "generations": records,
        }


def open_run(context: Context, engine: Engine, wave: Sequence[Request], logprobs: bool, first: int) -> BatchRun:
    """Return the run of the requests that fit in one batch; nothing is computed yet.

    Args:
        first: number of the wave's first request among all; what a request draws depends on its number.

    Raises:
        ConfigError: a prompt is too long, or holds an id that is no token.
    """
    settings = context.settings
    token_ids = [request.token_ids for request in wave]
    params = params_from(sampling_of(settings), first)
    return engine.open_run(token_ids, settings.max_new_tokens, stops_of(settings), params, logprobs)


def _run_wave(context: Context, engine: Engine, wave: Sequence[Request], logprobs: bool, progress: Progress) -> None:
    """Run the requests that fit in one batch."""
    run = open_run(context, engine, wave, logprobs, first=len(progress.done))
    _print_events(context, run, engine.has_tokenizer, progress)
    for request, generation in zip(wave, run.generations(), strict=True):
        if not progress.streams:
            text = generation.text if engine.has_tokenizer else " ".join(map(str, generation.token_ids))
            context.console.line(f"--- {request.label}")
            context.console.line(text)
        progress.done.append(generation)


def _print_events(context: Context, run: BatchRun, has_text: bool, progress: Progress) -> None:
    """Run to the end, or to Ctrl-C."""
    try:
        for event in run.events():
            if progress.first_token_at is None:
                progress.first_token_at = seconds_since_start()
            if progress.streams:
                context.console.text(event.text if has_text else f"{event.token_id} ")
    except KeyboardInterrupt:
        run.interrupt()
        progress.status = "interrupted"
    if progress.streams:
        context.console.line()


def speed_line(done: Sequence[Generation]) -> str:
    """Return one line about how fast it went; requests of one batch share its time."""
    timings = [generation.timings for generation in done]
    prompt_tokens, new_tokens = sum(t.prompt_tokens for t in timings), sum(t.new_tokens for t in timings)
    prefill = sum(t.prefill_seconds / t.batch for t in timings)
    decode = sum(t.decode_seconds / t.batch for t in timings)
    later = new_tokens - len(done)
    rate = f"{later / decode:.1f} tokens/s" if decode and later > 0 else "no decode step"
    took = f"in {prefill:.2f} s" if new_tokens else "not finished"
    return (
        f"[{prompt_tokens} prompt tokens {took}; {new_tokens} new tokens, {rate}; "
        f"ended by: {', '.join(sorted({g.finish_reason for g in done}))}]"
    )


def start_line(progress: Progress, compiled: CompileReport) -> str:
    """Return one line about what had to happen before the first token."""
    reached = f"{progress.first_token_at:.1f} s after the process began" if progress.first_token_at else "not reached"
    return f"[first token {reached}; {describe_compile(compiled)}]"


def _record(request: Request, generation: Generation) -> Record:
    timings = generation.timings
    return {
        "prompt": request.text,
        "prompt_ids": request.token_ids,
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "logprobs": list(generation.logprobs) if generation.logprobs is not None else None,
        "timings": {
            **asdict(timings),
            "prefill_tokens_per_second": timings.prefill_tokens_per_second,
            "decode_tokens_per_second": timings.decode_tokens_per_second,
        },
    }


def _first(records: list[Record]) -> Record:
    """Return the fields of the first generation that stand at the top."""
    first = records[0]
    top = {key: first[key] for key in ("text", "token_ids", "finish_reason", "timings")}
    return {**top, "first_token_seconds": first["timings"]["first_token_seconds"]}


GENERATE = Task("generate", GenerateSettings, run)
