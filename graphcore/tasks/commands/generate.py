"""task=generate: answer or continue a prompt, or a JSONL file of them, and print the text as it is generated."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from omegaconf import MISSING

from graphcore.config.user_path import user_path
from graphcore.engine.engine import Engine
from graphcore.engine.output import Generation
from graphcore.engine.request_handle import RequestHandle
from graphcore.engine.speculation.speculation_record import speculation_record
from graphcore.errors import ConfigError
from graphcore.graph.compile import CompileReport
from graphcore.tasks.report.answer_file import AnswerFile
from graphcore.tasks.report.run_record import compile_record, ran_record
from graphcore.tasks.report.startup import seconds_since_start
from graphcore.tasks.report.stream_watch import write_streaming_trace
from graphcore.tasks.requests.cache_files import cache_record, check_cache_files, load_cache_file, save_cache_file
from graphcore.tasks.requests.generation_requests import (
    GenerationRequest,
    arguments_of,
    check_prompts,
    generation_requests,
)
from graphcore.tasks.requests.prompts import Prompt, notes_on, read_prompts
from graphcore.tasks.requests.request_lines import RequestLine, read_request_lines
from graphcore.tasks.task import Context, Record, Task
from graphcore.tasks.task_engine import describe, describe_compile, load_engine

REPEATED = (
    "[cut: the answer repeated itself for 200 tokens; another sampling or a repetition_penalty may help, and "
    "repetition_detection=false lets it go on]"
)
COUNT_INTERVAL = 10.0  # seconds between two lines with the number of answers in the file


@dataclass
class GenerateSettings:
    """The keys of conf/task/generate.yaml."""

    name: str = MISSING
    prompts_jsonl: str | None = MISSING
    output: str | None = MISSING
    logprobs: bool = MISSING


@dataclass
class Progress:
    """The answers so far, and where they are printed or written.

    Attributes:
        streams: True prints text as it is generated; with several requests, answers are printed when all are complete.
        wants_logprobs: True records the log probability of each new token.
        answers: file that answers go into; None prints them.
        total: number of answers that this run is to make.
        answered: the answers so far, by the number of their request.
        first_token_at: seconds from the start of the process to the first token; None before it.
        counted_at: time.monotonic() of the last line with the number of answers.
        status: "ok", or "interrupted" after Ctrl-C.
    """

    streams: bool
    wants_logprobs: bool
    answers: AnswerFile | None
    total: int
    answered: dict[int, Generation] = field(default_factory=dict)
    first_token_at: float | None = None
    counted_at: float = field(default_factory=time.monotonic)
    status: str = "ok"

    @property
    def done(self) -> list[Generation]:
        """The answers in the order of their requests; once `_answer_all` has returned, those of the first requests."""
        return [self.answered[number] for number in sorted(self.answered)]


def run(context: Context, task: GenerateSettings) -> Record:
    """Answer every prompt; after Ctrl-C the answers so far are kept."""
    settings, console = context.settings, context.console
    with ExitStack() as stack:
        prompts, answers = _prompts_and_answers(context, task)
        check_cache_files(settings)
        if answers is not None:
            stack.enter_context(answers)
            console.note(f"[{answers.path} has {len(answers.answered)} of {_count(len(prompts))}]")
            prompts = [prompt for prompt in prompts if _key(prompt) not in answers.answered]
            if not prompts:
                return {"status": "ok", "answers": _answers_record(answers), "generations": []}
        began = time.perf_counter()
        engine = stack.enter_context(load_engine(context, partial(check_prompts, settings, prompts)))
        load_seconds = time.perf_counter() - began
        requests = generation_requests(context, engine, prompts)
        for request in requests:
            engine.check_request(**arguments_of(request))  # refuses an invalid request before any request runs
        together = min(settings.batching.max_sequences, len(requests))
        console.note(describe(engine, load_seconds))
        console.note(f"[sampling: {engine.loaded.sampling.words}]")
        compiled = engine.warm_up(together, requests[0].params)
        loaded = load_cache_file(context, engine)
        saved = save_cache_file(context, engine, [request.prompt.token_ids for request in requests])
        progress = Progress(len(requests) == 1 and answers is None, task.logprobs, answers, len(requests))
        generating_since = time.perf_counter()
        _answer_all(context, engine, requests, progress)
        if not progress.streams and answers is None:
            _print_all(context, engine, requests, progress)
        if any(answer.finish_reason == "repetition" for answer in progress.done):
            console.note(REPEATED)
        console.note(speed_line(progress.done, time.perf_counter() - generating_since))
        console.note(start_line(progress, compiled))
        if settings.trace:
            write_streaming_trace(context, engine, generating_since, time.perf_counter())
        notes = notes_on([request.prompt for request in requests])
        measured = {"load_seconds": load_seconds, "compile": compile_record(compiled), **cache_record(loaded, saved)}
        measured["speculation"] = speculation_record(engine)
        return {"status": progress.status, **ran_record(engine, notes), **measured, **_answered(requests, progress)}


def _prompts_and_answers(context: Context, task: GenerateSettings) -> tuple[list[Prompt], AnswerFile | None]:
    """Return the prompts, and the file for the answers, or None without one.

    Raises:
        ConfigError: two sources of prompts are given, or a file has wrong content.
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


def _answer_all(context: Context, engine: Engine, requests: Sequence[GenerationRequest], progress: Progress) -> None:
    """Answer all requests, or those that end before Ctrl-C; each answer is written to the file when it is complete.

    A few more requests are submitted than run concurrently, so that the batch never waits for this thread.
    """
    batching = context.settings.batching
    ahead = min(2 * batching.max_sequences, batching.max_waiting)
    handles: list[RequestHandle] = []
    ended: SimpleQueue[int] = SimpleQueue()
    try:
        while len(progress.answered) < len(requests):
            with engine.holding_back():
                while len(handles) < min(len(requests), len(progress.answered) + ahead):
                    handle = engine.submit(
                        logprobs=progress.wants_logprobs,
                        repetition_detection=context.settings.repetition_detection,
                        **arguments_of(requests[len(handles)]),
                    )
                    handle.call_at_end(partial(ended.put, len(handles)))
                    handles.append(handle)
            if progress.first_token_at is None:
                _print_first(context, engine, handles[0], progress)
            number = ended.get()
            _put_out(context, requests[number], number, handles[number].result(), progress)
    except KeyboardInterrupt:
        progress.status = "interrupted"
        for handle in handles:
            handle.cancel()
        for number, handle in enumerate(handles):
            if number not in progress.answered:
                _put_out(context, requests[number], number, handle.result(), progress)


def _print_first(context: Context, engine: Engine, handle: RequestHandle, progress: Progress) -> None:
    """Wait for the first request's first token and, if its text is streamed, for the whole answer."""
    try:
        for event in handle:
            progress.first_token_at = progress.first_token_at or seconds_since_start()
            if not progress.streams:
                return
            context.console.text(event.text if engine.has_tokenizer else f"{event.token_id} ")
    finally:
        if progress.streams:
            context.console.line()


def _put_out(context: Context, request: GenerationRequest, number: int, answer: Generation, progress: Progress) -> None:
    """Keep an answer, and write a complete one to the file."""
    progress.answered[number] = answer
    if progress.answers is not None and answer.finish_reason != "interrupted":
        _write(context, progress, request, answer)


def _print_all(context: Context, engine: Engine, requests: Sequence[GenerationRequest], progress: Progress) -> None:
    """Print the answers in the order of their requests."""
    for request, answer in zip(requests, progress.done, strict=False):
        context.console.line(f"--- {request.prompt.label}")
        context.console.line(answer.text if engine.has_tokenizer else " ".join(map(str, answer.token_ids)))


def _write(context: Context, progress: Progress, request: GenerationRequest, answer: Generation) -> None:
    """Write an answer to the file, and print the number of answers now and then."""
    answers = progress.answers
    assert answers is not None, "there is a file for the answers"
    assert request.line is not None, "requests of a file have answers in a file"
    answers.write(request.line, answer)
    now = time.monotonic()
    if answers.made == progress.total or now - progress.counted_at > COUNT_INTERVAL:
        progress.counted_at = now
        context.console.note(f"[{answers.path}: {answers.made} of {_count(progress.total)} made]")


def _count(number: int) -> str:
    return f"{number} answer{'' if number == 1 else 's'}"


def _answers_record(answers: AnswerFile) -> Record:
    return {"path": str(answers.path), "there": len(answers.answered), "made": answers.made}


def speed_line(done: Sequence[Generation], seconds: float) -> str:
    """Return one line about speed.

    Args:
        seconds: seconds from the first request's start to the last one's end; not used for a single answer, whose own
            timings are more exact.
    """
    timings = [generation.timings for generation in done]
    prompt_tokens, new_tokens = sum(t.prompt_tokens for t in timings), sum(t.new_tokens for t in timings)
    ended = f"ended by: {', '.join(sorted({g.finish_reason for g in done}))}"
    if len(done) > 1:
        counts = f"{prompt_tokens} prompt tokens and {new_tokens} new ones in {seconds:.2f} s"
        return f"[{counts}, {new_tokens / seconds:.1f} new tokens/s; {ended}]"
    (timing,) = timings
    rate_of_one = timing.decode_tokens_per_second
    known = f" ({timing.cached_tokens} of them cached)" if timing.cached_tokens else ""
    took = f"in {timing.prefill_seconds:.2f} s" if new_tokens else "not finished"
    rate = f"{rate_of_one:.1f} tokens/s" if rate_of_one else "no decode step"
    if timing.draft_tokens:
        rate += f", {timing.accepted_tokens} of {timing.draft_tokens} draft tokens accepted"
    return f"[{prompt_tokens} prompt tokens{known} {took}; {new_tokens} new tokens, {rate}; {ended}]"


def start_line(progress: Progress, compiled: CompileReport) -> str:
    """Return one line about the time to the first token and about compiling."""
    reached = f"{progress.first_token_at:.1f} s after the process began" if progress.first_token_at else "not reached"
    return f"[first token {reached}; {describe_compile(compiled)}]"


def _record(request: GenerationRequest, generation: Generation) -> Record:
    timings = generation.timings
    return {
        "id": None if request.line is None else request.line.fields.get("id"),
        "prompt": request.prompt.text,
        "prompt_ids": request.prompt.token_ids,
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


def _answered(requests: Sequence[GenerationRequest], progress: Progress) -> Record:
    """Return the records of all answers, with the fields of the first also at the top."""
    records = [_record(request, done) for request, done in zip(requests, progress.done, strict=False)]
    first, answers = records[0], progress.answers
    return {
        "process_to_first_token_seconds": progress.first_token_at,
        "answers": None if answers is None else _answers_record(answers),
        **{key: first[key] for key in ("text", "token_ids", "finish_reason", "timings")},
        "first_token_seconds": first["timings"]["first_token_seconds"],
        "generations": records if answers is None else [],
    }


GENERATE = Task("generate", GenerateSettings, run)
