"""task=generate: answer or continue a prompt, or a JSONL file of them, and print the text as it is made."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from omegaconf import MISSING

from graphcore.config.user_path import user_path
from graphcore.engine.batch_run import BatchRun
from graphcore.engine.engine import Engine
from graphcore.engine.sequence import Generation
from graphcore.errors import ConfigError
from graphcore.graph.compile import CompileReport
from graphcore.tasks.answers import AnswerFile
from graphcore.tasks.prompts import Prompt, read_prompts
from graphcore.tasks.request_lines import RequestLine, read_request_lines
from graphcore.tasks.result import compile_record, ran_record
from graphcore.tasks.running import describe, describe_compile, load_engine
from graphcore.tasks.startup import seconds_since_start
from graphcore.tasks.stream_watch import trace
from graphcore.tasks.task import Context, Record, Task
from graphcore.tasks.waves import Job, jobs_of, open_run, waves_of

COUNT_INTERVAL = 10.0  # seconds between two lines about how many answers a file has


@dataclass
class GenerateSettings:
    """conf/task/generate.yaml."""

    name: str = MISSING
    prompts_jsonl: str | None = MISSING
    output: str | None = MISSING
    logprobs: bool = MISSING


@dataclass
class Progress:
    """What has come out so far.

    Attributes:
        streams: print the text as it comes; with several requests each is printed when it is whole.
        wants_logprobs: of each new token.
        answers: the file that answers go into, if they are not printed.
        total: number of answers that this run is to make.
        first_token_at: seconds from the start of the process to the first token; None before it.
        counted_at: time.monotonic() of the last line about how many answers there are.
        status: "ok", or "interrupted" after Ctrl-C.
    """

    streams: bool
    wants_logprobs: bool
    answers: AnswerFile | None
    total: int
    done: list[Generation] = field(default_factory=list)
    first_token_at: float | None = None
    counted_at: float = field(default_factory=time.monotonic)
    status: str = "ok"


def run(context: Context, task: GenerateSettings) -> Record:
    """Generate for every prompt; Ctrl-C keeps what there is."""
    with ExitStack() as stack:
        prompts, answers = _prompts_and_answers(context, task)
        if answers is not None:
            stack.enter_context(answers)
            context.console.note(f"[{answers.path} has {len(answers.answered)} of {_count(len(prompts))}]")
            prompts = [prompt for prompt in prompts if _key(prompt) not in answers.answered]
            if not prompts:
                return {"status": "ok", "answers": _answers_record(answers), "generations": []}
        return _run(context, task, prompts, answers)


def _prompts_and_answers(context: Context, task: GenerateSettings) -> tuple[list[Prompt], AnswerFile | None]:
    """Return what is asked, and the file for the answers, if there is to be one.

    Raises:
        ConfigError: two sources of prompts are given, or one of the files is not what it should be.
        OutputError: the file for the answers cannot be written.
    """
    settings = context.settings
    if task.prompts_jsonl is None:
        if task.output is not None:
            raise ConfigError(f"task.output={task.output} needs task.prompts_jsonl; result.json has a single answer")
        return read_prompts(settings), None
    given = [key for key in ("prompt", "prompt_file", "prompt_ids") if vars(settings)[key] is not None]
    if given:
        raise ConfigError(f"task.prompts_jsonl and {given[0]} are both given; use one")
    lines = read_request_lines(task.prompts_jsonl)
    if task.output is None:
        return list(lines), None
    output = user_path(task.output, "task.output=")
    if output.resolve() == Path(task.prompts_jsonl).expanduser().resolve():
        raise ConfigError(f"task.output={task.output} is the file of the prompts; choose another")
    return list(lines), AnswerFile(output, lines)


def _key(prompt: Prompt) -> str | int:
    assert isinstance(prompt, RequestLine), "answers go into a file only for requests of a file"
    return prompt.key


def _run(context: Context, task: GenerateSettings, prompts: Sequence[Prompt], answers: AnswerFile | None) -> Record:
    settings, console = context.settings, context.console
    began = time.perf_counter()
    with load_engine(context) as engine:
        load_seconds = time.perf_counter() - began
        jobs = jobs_of(context, engine, prompts)
        waves = list(waves_of(jobs, settings.batch_size))
        for wave in waves:
            open_run(engine, wave, task.logprobs)  # refuses what cannot run, before anything does
        console.note(describe(engine, load_seconds))
        compiled = engine.warm_up(max(map(len, waves)), jobs[0].params)
        progress = Progress(len(jobs) == 1 and answers is None, task.logprobs, answers, len(jobs))
        generating_since = time.perf_counter()
        for wave in waves:
            if progress.status == "ok":
                _run_wave(context, engine, wave, progress)
        console.note(speed_line(progress.done))
        console.note(start_line(progress, compiled))
        if settings.trace:
            trace(context, engine, generating_since, time.perf_counter())
        records = [_record(job, done) for job, done in zip(jobs, progress.done, strict=False)]
        return {
            "status": progress.status,
            **ran_record(engine),
            "load_seconds": load_seconds,
            "compile": compile_record(compiled),
            "process_to_first_token_seconds": progress.first_token_at,
            "answers": None if answers is None else _answers_record(answers),
            **_first(records),
            "generations": records if answers is None else [],
        }


def _run_wave(context: Context, engine: Engine, wave: Sequence[Job], progress: Progress) -> None:
    """Run the jobs that fit in one batch."""
    run = open_run(engine, wave, progress.wants_logprobs)
    _take_events(context, run, wave, engine.has_tokenizer, progress)
    for job, generation in zip(wave, run.generations(), strict=True):
        if not progress.streams and progress.answers is None:
            text = generation.text if engine.has_tokenizer else " ".join(map(str, generation.token_ids))
            context.console.line(f"--- {job.request.label}")
            context.console.line(text)
        progress.done.append(generation)


def _take_events(context: Context, run: BatchRun, wave: Sequence[Job], has_text: bool, progress: Progress) -> None:
    """Run to the end, or to Ctrl-C; each answer goes into its file as soon as it has ended."""
    try:
        for event in run.events():
            if progress.first_token_at is None:
                progress.first_token_at = seconds_since_start()
            if progress.streams:
                context.console.text(event.text if has_text else f"{event.token_id} ")
            if event.finish_reason is not None and progress.answers is not None:
                _write(context, progress, wave[event.row], run.generation(event.row))
    except KeyboardInterrupt:
        run.interrupt()
        progress.status = "interrupted"
    if progress.streams:
        context.console.line()


def _write(context: Context, progress: Progress, job: Job, answer: Generation) -> None:
    """Put an answer into its file, and say now and then how many there are."""
    answers = progress.answers
    assert answers is not None, "there is a file for the answers"
    assert job.line is not None, "requests of a file have answers in a file"
    answers.write(job.line, answer)
    now = time.monotonic()
    if answers.made == progress.total or now - progress.counted_at > COUNT_INTERVAL:
        progress.counted_at = now
        context.console.note(f"[{answers.path}: {answers.made} of {_count(progress.total)} made]")


def _count(number: int) -> str:
    return f"{number} answer{'' if number == 1 else 's'}"


def _answers_record(answers: AnswerFile) -> Record:
    return {"path": str(answers.path), "there": len(answers.answered), "made": answers.made}


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


def _record(job: Job, generation: Generation) -> Record:
    timings = generation.timings
    return {
        "id": None if job.line is None else job.line.fields.get("id"),
        "prompt": job.request.text,
        "prompt_ids": job.request.token_ids,
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
