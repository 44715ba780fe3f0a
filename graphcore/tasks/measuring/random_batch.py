"""The work that task=bench times: a prefill and a run of decode steps, each from a KV cache of a given depth.

    cache: [ depth tokens | timed prefill ]        then, in the same slots,        [ depth tokens | timed decode ]

Legend: B sequences, V vocab.
"""

from dataclasses import dataclass

import torch

from graphcore.engine.batching.device_decode_loop import LAG, Readback
from graphcore.engine.model_runner import ModelRunner
from graphcore.graph.gpu.sampling import RowSettings
from graphcore.streaming.scheduler import run_program, run_together
from graphcore.tasks.measuring.weight_reads import runner_step_nbytes


@dataclass
class RandomBatch:
    """A batch of random prompts, with the prefill and the decode steps to time.

    A later run overwrites the cache beyond the depth; a transformers model's cache only grows, so it is filled anew
    before each run. Sliding-window layers then hold the keys of other tokens than in
    a real sequence, but the same number of them, and of the same size.

    Attributes:
        depth: number of tokens that every sequence's cache holds before the timed part.
    """

    runner: ModelRunner
    batch: int
    depth: int
    prompt_tokens: int
    new_tokens: int
    seed: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.depth + self.prompt_tokens)
        vocab = self.runner.sizes.vocab
        ids = torch.randint(vocab, shape, generator=generator, dtype=torch.int64, device="cpu").tolist()
        self._before = [row[: self.depth] for row in ids]
        self._prompts = [row[self.depth :] for row in ids]
        self._is_filled = False

    @torch.inference_mode()
    def fill(self) -> None:
        """Fill every sequence's cache up to the depth, if it does not hold that much, or cannot be fed from there."""
        if self.depth and not (self._is_filled and self.runner.can_rewind):
            self.runner.feed(self._before, [0] * self.batch)
            self._is_filled = True

    def first_prefill(self) -> None:
        """Run the prompts from empty caches."""
        self._is_filled = False
        self._run_prompts(0)

    def prefill(self) -> None:
        """Run the prompts from the depth, and choose a token for each."""
        self._run_prompts(self.depth)

    @torch.inference_mode()
    def _run_prompts(self, start: int) -> None:
        self.runner.feed(self._prompts, [start] * self.batch).argmax(dim=-1).tolist()

    def decode(self) -> None:
        """Run new_tokens greedy steps from the depth; each token is fed back and read by the host, as in generating."""
        self._run_steps(self.new_tokens)

    def decode_one(self) -> None:
        """Run one step from the depth."""
        self._run_steps(1)

    @torch.inference_mode()
    def _run_steps(self, steps: int) -> None:
        first = {row: (prompt[0], self.depth) for row, prompt in enumerate(self._prompts)}
        programs = self.runner.greedy_step(first)
        program = programs[0]
        if program.choice is None:
            for step in range(steps):
                self._reserve(step)
                run_together(programs, self.runner.policy)
                for one in programs:
                    one.state.chosen.tolist()
            return
        for row in range(self.batch):
            program.choice.choosing.put(row, RowSettings(left=steps))
        readback = Readback(program.choice.choosing.report, LAG + 1)
        for step in range(steps + LAG):  # the host reads LAG steps late, as in generating
            if step < steps:
                self._reserve(step)
                run_program(program, self.runner.policy)
                readback.send()
            if step >= LAG:
                readback.take()

    def _reserve(self, step: int) -> None:
        for row in range(self.batch):
            self.runner.reserve(row, self.depth + step, self.depth + step + 1)

    def weight_nbytes(self) -> int:
        """Return the bytes of weights that a decode step reads."""
        return runner_step_nbytes(self.runner, self.batch)

    def num_prefill_passes(self) -> int:
        """Return the number of passes over the weights in which the prompts run."""
        return self.runner.num_passes([self.prompt_tokens] * self.batch, self.depth)

    def num_fill_passes(self) -> int:
        """Return the number of passes over the weights that `fill` runs before each timed run."""
        return 0 if self.runner.can_rewind or not self.depth else self.runner.num_passes([self.depth] * self.batch)
