"""task=generate: answer or continue a prompt, or a JSONL file of them, and print the text as it is made."""

import time
from dataclasses import asdict, dataclass

from omegaconf import MISSING

from graphcore.engine.batch_run import BatchRun
from graphcore.engine.engine import Engine
from graphcore.engine.sequence import Generation
from graphcore.errors import ConfigError
from graphcore.tasks.prompts import Request, read_requests
from graphcore.tasks.result import ran_record
from graphcore.tasks.running import describe, load_engine, sampling_of
from graphcore.tasks.task import Context, Record, Task


@dataclass
class GenerateSettings:
    """conf/task/generate.yaml."""

    name: str = MISSING
    prompts_jsonl: str | None = MISSING
    logprobs: bool = MISSING


def run(context: Context, task: GenerateSettings) -> Record:
    """Generate for every prompt; Ctrl-C keeps what there is."""
    settings, console = context.settings, context.console
    began = time.perf_counter()
    with load_engine(context) as engine:
        load_seconds = time.perf_counter() - began
        requests = read_requests(engine, settings, task.prompts_jsonl, console.note)
        console.note(describe(engine, load_seconds))
        compiled = engine.warm_up(min(len(requests), settings.batch_size))
        done: list[Generation] = []
        status = "ok"
        for at in range(0, len(requests), settings.batch_size):
            wave = requests[at : at + settings.batch_size]
            run_of_wave = engine.open_run(
                [request.token_ids for request in wave],
                settings.max_new_tokens,
                settings.stop,
                sampling_of(settings),
                task.logprobs,
            )
            status = _print_events(context, run_of_wave, streams=len(requests) == 1, has_text=engine.has_tokenizer)
            done += run_of_wave.generations()
            if len(requests) > 1:
                _print_wave(context, wave, run_of_wave.generations(), engine)
            if status != "ok":
                break
        console.note(speed_line(done))
        records = [_record(request, generation) for request, generation in zip(requests, done, strict=False)]
        return {
            "status": status,
            **ran_record(engine),
            "load_seconds": load_seconds,
            "compile": asdict(compiled),
            **_summary(records),
        }


def _print_events(context: Context, run: BatchRun, streams: bool, has_text: bool) -> str:
    """Run to the end, printing a single request's text as it comes; return "ok" or "interrupted"."""
    try:
        for event in run.events():
            if streams:
                context.console.text(event.text if has_text else f"{event.token_id} ")
    except KeyboardInterrupt:
        run.interrupt()
        context.console.line()
        return "interrupted"
    if streams:
        context.console.line()
    return "ok"


def _print_wave(context: Context, wave: list[Request], done: list[Generation], engine: Engine) -> None:
    for request, generation in zip(wave, done, strict=True):
        text = generation.text if engine.has_tokenizer else " ".join(map(str, generation.token_ids))
        context.console.line(f"--- {request.label}")
        context.console.line(text)


def speed_line(done: list[Generation]) -> str:
    """Return one line about how fast it went."""
    if not done:
        raise ConfigError("there is no prompt; give at least one")
    timings = [generation.timings for generation in done]
    prompt_tokens, new_tokens = sum(t.prompt_tokens for t in timings), sum(t.new_tokens for t in timings)
    # requests of one batch share its time
    seconds = {id(t): (t.prefill_seconds / t.batch, t.decode_seconds / t.batch) for t in timings}
    prefill, decode = (sum(pair[part] for pair in seconds.values()) for part in (0, 1))
    later = new_tokens - len(done)
    rate = f"{later / decode:.1f} tokens/s" if decode and later else "no decode step"
    first = timings[0].first_token_seconds
    return (
        f"[{prompt_tokens} prompt tokens in {prefill:.2f} s; {new_tokens} new tokens, {rate}; "
        f"first token after {first:.2f} s; ended by: {', '.join(sorted({g.finish_reason for g in done}))}]"
    )


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


def _summary(records: list[Record]) -> Record:
    """Return the fields of the first generation at the top, and all of them in a list."""
    first = records[0]
    top = {key: first[key] for key in ("text", "token_ids", "finish_reason", "timings")}
    return {**top, "first_token_seconds": first["timings"]["first_token_seconds"], "generations": records}


GENERATE = Task("generate", GenerateSettings, run)
