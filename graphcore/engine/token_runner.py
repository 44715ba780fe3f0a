"""What an engine asks of whatever runs a model: token ids in, logits out, over caches that the runner owns.

`Runner` (graphcore's own programs) and `TransformersRunner` (a transformers model) are the two that there are.

Legend: B batch, T tokens, D model dim, H heads, V vocab.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from graphcore.engine.sampler import SamplingParams
from graphcore.errors import ConfigError
from graphcore.graph.capture import Captures
from graphcore.graph.program import Program
from graphcore.progress import Progress, ignore_progress
from graphcore.streaming.policy import Policy


class TokenRunner(ABC):
    """Runs a model; rows of the batch keep what they have seen between calls.

    Attributes:
        policy: that programs run under.
        batch_size: most sequences in one call.
        prefill_chunk: most tokens of a sequence in one pass.
        vocab: tokens that logits are of.
        context: tokens that a row's cache holds; at most `longest`.
        longest: tokens that the model was made for.
        held_ids: tokens whose keys and values row 0 of the cache holds; empty where that is not known.
    """

    policy: Policy
    batch_size: int
    prefill_chunk: int
    device: torch.device
    vocab: int
    context: int
    longest: int
    held_ids: Sequence[int] = ()

    def forget(self) -> None:
        """Say that the caches are about to be written: what row 0 held is not known any more."""
        self.held_ids = ()

    def enter_thread(self) -> None:
        """Make a GPU this thread's current one, which Triton launches kernels on; each thread has its own."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def check_context(self, tokens: int) -> None:
        """Return if a sequence of that many tokens fits in the cache.

        Raises:
            ConfigError: it does not; the message says how to get more.
        """
        if tokens > self.context:
            advice = f"set context_length to at least {tokens}"
            if tokens > self.longest:
                advice = f"the model was made for {self.longest}"
            raise ConfigError(f"{tokens} tokens do not fit in context_length={self.context}; {advice}")

    @property
    @abstractmethod
    def num_compiled(self) -> int:
        """Graphs that were compiled so far."""

    @property
    def captures(self) -> Captures | None:
        """The CUDA graphs that it decodes with; None where it has none."""
        return None

    @abstractmethod
    def width(self, num_sequences: int) -> int:
        """Return how many rows the programs for that many sequences have."""

    @abstractmethod
    def program(self, phase: str, width: int, is_greedy: bool = False) -> Program:
        """Return the program of a phase, at least of "decode": one token of each row.

        Args:
            width: rows.
            is_greedy: it chooses the likeliest next token and feeds itself.
        """

    def choosing_program(self, width: int, params: SamplingParams) -> Program | None:
        """Return a decode program that chooses tokens as asked and ends rows on the device, or None: the host does."""
        return None

    @abstractmethod
    def release(self) -> None:
        """Give back what runs programs; nothing runs any more."""

    @abstractmethod
    def warm_up(self, num_sequences: int, params: SamplingParams | None = None) -> None:
        """Build, and compile or load from the cache, what that many sequences will need.

        Args:
            params: how they will be sampled; None is greedy.
        """

    @abstractmethod
    def reusable(self, cached: Sequence[int], prompt: Sequence[int]) -> int:
        """Return how many tokens of the prompt row 0 of the cache can serve, if it holds `cached`; never all."""

    @abstractmethod
    def feed(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], on_progress: Progress = ignore_progress
    ) -> Tensor:
        """Append tokens to the rows' caches and return the logits after each row's last, [len(rows), V] float32.

        Args:
            rows: at least one token for each sequence.
            starts: tokens that each row's cache already holds.
            on_progress: called with "prefill", group or None, tokens of the longest row done and in all.
        """

    @abstractmethod
    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return teacher-forced logits of rows of one length, from empty caches: [B, T, V] float32 on the CPU."""

    @abstractmethod
    def hidden_states(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Return the residual stream after the embedding and after each block, from empty caches: [B, T, D] each."""

    @abstractmethod
    def attentions(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Return each layer's attention weights, [B, H, T, T].

        Raises:
            ConfigError: what runs never has them; the message says what would.
        """

    @abstractmethod
    def blocks(self, hidden: Tensor) -> Tensor:
        """Run hidden states [B, T, D] through all blocks, from empty caches; returns [B, T, D]."""
