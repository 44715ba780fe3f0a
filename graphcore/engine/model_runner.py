"""The interface between an engine and a model: token ids in, logits out, over caches that the runner owns.

It has two implementations: `ProgramRunner` (graphcore's own programs) and `TransformersRunner` (a transformers model).

Legend: B batch, T tokens, D model dim, H heads, V vocab.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.errors import ConfigError
from graphcore.graph.gpu.capture import Captures
from graphcore.graph.program import Program
from graphcore.kernels.backend import Backend, TorchBackend
from graphcore.kvcache.forward_sequences import ForwardCache
from graphcore.progress import Progress, ignore_progress
from graphcore.sampling_params import SamplingParams
from graphcore.streaming.policy import Policy


@dataclass(frozen=True)
class RunnerSizes:
    """Limits of a runner: batch, chunk, vocabulary and context.

    Attributes:
        batch_size: most sequences in one call.
        prefill_chunk: most tokens of a sequence in one pass.
        vocab: size of the vocabulary.
        context: tokens that a row's cache holds; at most `longest`.
        longest: most tokens that the model was trained for.
    """

    batch_size: int
    prefill_chunk: int
    vocab: int
    context: int
    longest: int

    def check_context(self, tokens: int) -> None:
        """Check that a sequence of that many tokens fits in the cache.

        Raises:
            ConfigError: it does not fit; the message says how to get a longer context.
        """
        if tokens > self.context:
            advice = f"set context_length to at least {tokens}"
            if tokens > self.longest:
                advice = f"the model was made for {self.longest}"
            raise ConfigError(f"{tokens} tokens do not fit in context_length={self.context}; {advice}")


class ModelRunner(ABC):
    """Runner of a model; the cache of each row of the batch is kept between calls.

    Attributes:
        policy: streaming policy of the weights.
        sizes: limits of batch, chunk, vocabulary and context.
        scored_tokens: tokens of a prompt whose logits are made at once; the plan has room for them.
        backend: kernels that compute the model; the host samples with theirs.
        can_rewind: True if tokens can be run again in a row from an earlier position than its end.
    """

    policy: Policy
    sizes: RunnerSizes
    scored_tokens: int
    device: torch.device
    backend: Backend = TorchBackend()
    can_rewind = True
    lends_for_states = True  # whether the caches have to be lent for `extend_state`

    def enter_thread(self) -> None:
        """Make the runner's GPU the calling thread's current device, because Triton launches kernels there."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    @abstractmethod
    def num_compiled(self) -> int:
        """Number of graphs compiled so far."""

    @property
    def captures(self) -> Captures | None:
        """The captured CUDA graphs of decode steps; None where there are none."""
        return None

    @abstractmethod
    def width(self, num_sequences: int) -> int:
        """Return the number of rows of the programs for that many sequences."""

    @abstractmethod
    def program(self, phase: str, width: int, is_greedy: bool = False) -> Program:
        """Return the program of a phase; every runner has "decode", one token of each row.

        Args:
            width: number of rows.
            is_greedy: True for a program that chooses the likeliest next token and feeds it to itself.
        """

    @abstractmethod
    def num_passes(self, lengths: Sequence[int], start: int = 0) -> int:
        """Return the number of passes over the weights in which `extend` runs rows of these lengths from `start` on."""

    def reserve(self, row: int, begin: int, end: int) -> None:  # noqa: B027  # most caches grow by themselves
        """Allocate a row's cache for positions begin .. end - 1; calls that run tokens do this by themselves."""

    @abstractmethod
    def release(self) -> None:
        """Free programs and captured graphs; the model cannot run any more."""

    @abstractmethod
    def warm_up(self, num_sequences: int, params: SamplingParams | None = None) -> None:
        """Build the programs for that many sequences, compiled or loaded from the cache on disk.

        Args:
            params: sampling parameters that will be used; None is greedy.
        """

    @abstractmethod
    def extend(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], on_progress: Progress = ignore_progress
    ) -> Tensor:
        """Append tokens to the rows' caches and return the logits after each row's last, [len(rows), V] float32.

        Args:
            rows: new tokens of each sequence, at least one.
            starts: number of tokens that each row's cache already holds.
            on_progress: callback with "prefill", group or None, and tokens of the longest row, done and total.
        """

    @abstractmethod
    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return teacher-forced logits of rows of one length, from empty caches: [B, T, V] float32 on the CPU."""

    @abstractmethod
    def logit_slices(self, token_ids: Sequence[int], first: int) -> Iterator[Tensor]:
        """Yield teacher-forced logits of a sequence, from an empty cache, slice by slice: [t, V] float32.

        Args:
            first: index of the first token whose logits are needed.
        """

    @abstractmethod
    def hidden_states(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Return the residual stream after the embedding and after each block, from empty caches: [B, T, D] each."""

    @abstractmethod
    def attentions(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Return each layer's attention weights, [B, H, T, T].

        Raises:
            ConfigError: this runner never has them; the message says which one does.
        """

    @abstractmethod
    def blocks(self, hidden: Tensor, start: int = 0) -> Tensor:
        """Run hidden states [B, T, D] through all blocks, after the first `start` positions; returns [B, T, D]."""

    @abstractmethod
    def new_state(self) -> ForwardCache:
        """Return an empty state for `extend_state`."""

    @abstractmethod
    def extend_state(self, state: ForwardCache, hidden: Tensor, start: int) -> Tensor:
        """Run hidden states [B, T, D] through all blocks after the tokens of a state, and update the state.

        Args:
            state: state that `new_state` returned; unchanged if the call fails.
            start: number of tokens of the state.
        """


class StaticRunner(ModelRunner):
    """Runner of static batches: their sequences share one cache, which only grows and which no sequence can join."""

    can_rewind = False

    @abstractmethod
    def lend_cache(self, rows: Sequence[int], tokens: int) -> Callable[[], None]:
        """Lend the cache, in which these rows hold up to `tokens` tokens, until the returned function is called."""

    @property
    def needs_equal_lengths(self) -> bool:
        """Whether prompts that begin together must have one length."""
        return False

    @abstractmethod
    def reusable(self, cached: Sequence[int], prompt: Sequence[int]) -> int:
        """Return how many of the prompt's first tokens need not run in a row that holds `cached`; never all."""
