"""task=perplexity: measure how well the model predicts a text file, in sliding windows."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from omegaconf import MISSING
from torch import Tensor

from graphcore.config.settings import Settings
from graphcore.config.validate import PROMPT_KEYS, at_least, refuse_unused_settings, unknown_choice
from graphcore.engine.engine import Engine
from graphcore.engine.loading.runtime_config import DEFAULT_CONTEXT
from graphcore.engine.prompt_encoder import PromptEncoder
from graphcore.engine.scoring import PATHS, token_losses, warm_up
from graphcore.errors import ConfigError, TokenizerError
from graphcore.kernels.ops.draw import check_finite
from graphcore.tasks.measuring.likelihood import LEVEL, Likelihood, exponential
from graphcore.tasks.measuring.sliding_windows import TokenizedText, Window, cut_windows
from graphcore.tasks.report.run_record import compile_record, ran_record
from graphcore.tasks.requests.text_input import LONGEST_FILE, read_text
from graphcore.tasks.task import Context, Record, Task
from graphcore.tasks.task_engine import describe, describe_compile, load_engine

DEFAULT_WINDOW = 1024  # tokens


@dataclass
class PerplexitySettings:
    """The keys of conf/task/perplexity.yaml."""

    name: str = MISSING
    text: str | None = MISSING
    window: int | None = MISSING
    stride: int | None = MISSING
    path: str = MISSING


@dataclass(frozen=True)
class WindowedText:
    """A text cut into windows.

    Attributes:
        length, stride: tokens of a window, and from one window's start to the next; defaults resolved.
    """

    text: TokenizedText
    length: int
    stride: int
    windows: Sequence[Window]

    @property
    def tokens_run(self) -> int:
        """Number of tokens that run through the model: all of each window, its context included, but the last."""
        return sum(len(self.text.ids_of(window)[0]) - 1 for window in self.windows)


def run(context: Context, task: PerplexitySettings) -> Record:
    """Score the text window by window and report the perplexity."""
    settings = perplexity_settings(context.settings, task)
    text = read_scored(task)
    began = time.perf_counter()
    with load_engine(replace(context, settings=settings), partial(check_tokenizer, settings)) as engine:
        load_seconds = time.perf_counter() - began
        cut = cut_text(engine, task, text)
        context.console.note(describe(engine, load_seconds))
        compiled = warm_up(engine.runner, task.path)
        context.console.note(f"[{len(cut.windows)} windows of {cut.length} tokens; {describe_compile(compiled)}]")
        began = time.perf_counter()
        losses = score(context, engine, cut, task.path)
        seconds = time.perf_counter() - began
        likelihood = Likelihood.of(losses)
        record = {
            **ran_record(engine),
            "load_seconds": load_seconds,
            "compile": compile_record(compiled),
            **cut_record(cut, task.path, text),
            **likelihood_record(likelihood, len(text.encode())),
            "scoring_seconds": seconds,
            "tokens_per_second": cut.tokens_run / seconds,
        }
    show(context, record)
    return record


def perplexity_settings(settings: Settings, task: PerplexitySettings) -> Settings:
    """Return the settings with a context that holds a window.

    Raises:
        ConfigError: a key of the task is wrong, or another setting has no effect.
    """
    refuse_unused_settings(settings, "perplexity", PROMPT_KEYS)
    at_least(2, "task.", task, ("window",))
    at_least(1, "task.", task, ("stride",))
    if task.path not in PATHS:
        raise unknown_choice("task.path", task.path, PATHS)
    if settings.context_length is None and task.window is not None and task.window > DEFAULT_CONTEXT:
        return replace(settings, context_length=task.window)
    return settings


def read_scored(task: PerplexitySettings) -> str:
    """Return the text to score.

    Raises:
        ConfigError: no file was named, or it is empty or cannot be read.
    """
    if task.text is None:
        raise ConfigError("task=perplexity needs a text to score; name a UTF-8 file with task.text=/path/to/text.txt")
    text = read_text(task.text, "task.text", LONGEST_FILE)
    if not text:
        raise ConfigError(f"task.text={task.text} is empty; name a file with text in it")
    return text


def check_tokenizer(settings: Settings, encoder: PromptEncoder) -> None:
    """Check that a checkpoint has a tokenizer.

    Raises:
        TokenizerError: the checkpoint has no tokenizer.
    """
    if encoder.known is None:
        raise TokenizerError(
            f"{settings.model.display_name} has no tokenizer, and task=perplexity scores text; choose a checkpoint "
            "with one"
        )


def cut_text(engine: Engine, task: PerplexitySettings, text: str) -> WindowedText:
    """Return the text cut into windows.

    Raises:
        ConfigError: the text is too short, or the window or the stride do not fit.
    """
    tokens = TokenizedText.of(engine.tokenizer, text)
    if tokens.num_scored < 1:
        raise ConfigError(
            f"task.text={task.text} is too short: {len(tokens.token_ids)} token, with none before it to predict it "
            "from; give a longer text"
        )
    length = task.window or min(engine.choices.context_length, DEFAULT_WINDOW)
    engine.runner.sizes.check_context(length)
    stride = task.stride or max(1, length // 2)
    return WindowedText(tokens, length, stride, cut_windows(tokens, length, stride))


def score(context: Context, engine: Engine, cut: WindowedText, path: str) -> list[Tensor]:
    """Return each window's losses.

    Raises:
        GraphError: the losses are not finite.
    """
    losses = []
    for index, window in enumerate(cut.windows):
        context.console.progress(f"perplexity {path}", None, index, len(cut.windows))
        token_ids, first = cut.text.ids_of(window)
        with engine.while_idle():  # the ranks of a ring are asked for nothing else meanwhile
            losses.append(token_losses(engine.runner, token_ids, first, path))
        check_finite(losses[-1])
    context.console.progress(f"perplexity {path}", None, len(cut.windows), len(cut.windows))
    return losses


def cut_record(cut: WindowedText, path: str, text: str) -> Record:
    """Return the text's and the windows' entries of result.json."""
    return {
        "path": path,
        "window": cut.length,
        "stride": cut.stride,
        "windows": len(cut.windows),
        "prefix_ids": cut.text.prefix,
        "text_bytes": len(text.encode()),
        "text_tokens": len(cut.text.token_ids),
        "tokens_run": cut.tokens_run,
    }


def likelihood_record(found: Likelihood, text_bytes: int) -> Record:
    """Return the perplexity, the same in other units, and its confidence interval."""
    interval = None
    if found.nll_interval is not None:
        low, high = found.nll_interval
        interval = {
            "level": LEVEL,
            "method": "window means",
            "standard_error": found.standard_error,
            "nll_low": low,
            "nll_high": high,
            "perplexity_low": exponential(low),
            "perplexity_high": exponential(high),
        }
    return {
        "tokens": found.tokens,
        "nll_mean": found.nll_mean,
        "perplexity": found.perplexity,
        "bits_per_token": found.bits_per_token,
        "bits_per_byte": found.bits_per_token * found.tokens / text_bytes,
        "interval": interval,
    }


def show(context: Context, record: Record) -> None:
    """Print the perplexity with its confidence interval, and the speed."""
    interval, line = record["interval"], context.console.line
    sure = "no interval from one window"
    if interval is not None:
        sure = f"95 % interval {interval['perplexity_low']:.4g} to {interval['perplexity_high']:.4g}"
    line(f"perplexity {record['perplexity']:.5g} ({sure})")
    line(
        f"{record['tokens']} tokens in {record['windows']} windows: {record['nll_mean']:.4f} nats, "
        f"{record['bits_per_token']:.4f} bits per token, {record['bits_per_byte']:.4f} bits per byte"
    )
    line(f"{record['path']}: {record['tokens_per_second']:.1f} tokens/s, context included")


PERPLEXITY = Task("perplexity", PerplexitySettings, run)
