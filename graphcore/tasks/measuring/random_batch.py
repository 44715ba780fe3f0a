"""The work that task=bench times: requests that prefill or decode, each from a KV cache of a given depth.

    cache: [ depth tokens | timed prefill ]        then, in the same slots,        [ depth tokens | timed decode ]

Legend: B sequences, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphcore.engine.engine import Engine
from graphcore.engine.request import Request
from graphcore.progress import ignore_progress
from graphcore.streaming.scheduler import never
from graphcore.tasks.measuring.weight_reads import runner_step_nbytes
from graphcore.tokenizer.text_stream import StopStrings


@dataclass
class RandomBatch:
    """A batch of random prompts, with the prefill and the decode steps to time.

    They run as the engine's requests do, pass by pass, but in the calling thread, where profilers see them. A later
    run overwrites the cache beyond the depth; a transformers model's cache only grows, so it is filled anew before each
    run. Sliding-window layers then hold the keys of other tokens than in a real sequence, but the same number of them,
    and of the same size.

    Attributes:
        depth: number of tokens that every sequence's cache holds before the timed part.
        tokens: new tokens of each request of the last run.
    """

    engine: Engine
    batch: int
    depth: int
    prompt_tokens: int
    new_tokens: int
    seed: int

    def __post_init__(self) -> None:
        self.runner = self.engine.runner
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.depth + self.prompt_tokens)
        vocab = self.runner.sizes.vocab
        ids = torch.randint(vocab, shape, generator=generator, dtype=torch.int64, device="cpu").tolist()
        self._before = [row[: self.depth] for row in ids]
        self._prompts = [row[self.depth :] for row in ids]
        self._is_filled = False
        self.tokens: list[list[int]] = []

    @torch.inference_mode()
    def fill(self) -> None:
        """Fill every sequence's cache up to the depth, if it is not filled or cannot be rewound to that depth."""
        if self.depth and not (self._is_filled and self.runner.can_rewind):
            with self.engine.while_idle():  # the ranks of a ring are asked for nothing else meanwhile
                self.runner.extend(self._before, [0] * self.batch)
            self._is_filled = True

    def first_prefill(self) -> None:
        """Run the prompts from empty caches."""
        self._is_filled = False
        self._run(self._prompts, 0, 1)

    def prefill(self) -> None:
        """Run the prompts after `depth` cached tokens, and sample one token for each."""
        self._run(self._whole(self.prompt_tokens), self.depth, 1)

    def decode(self) -> None:
        """Run `new_tokens` greedy decode steps, starting with `depth` cached tokens."""
        self._run(self._whole(1), self.depth, self.new_tokens)

    def decode_some(self, steps: int) -> None:
        """Run `steps` greedy decode steps of one token of a sequence, starting with `depth` cached tokens."""
        self._run(self._whole(1), self.depth, steps, speculates=False)

    def _whole(self, count: int) -> list[list[int]]:
        """Return for each prompt the tokens of the depth and then the prompt's first `count`."""
        return [[*before, *prompt[:count]] for before, prompt in zip(self._before, self._prompts, strict=True)]

    @torch.inference_mode()
    def _run(self, prompts: Sequence[Sequence[int]], cached: int, new_tokens: int, speculates: bool = True) -> None:
        """Run a request for each prompt until all have ended; its row already holds the first `cached` tokens."""
        requests = [
            Request(ids, new_tokens, frozenset(), None, StopStrings([]), speculates=speculates) for ids in prompts
        ]
        batching = self.engine.batching
        with self.engine.while_idle():
            batching.resume(requests, cached)
            try:
                while not all(request.has_ended for request in requests):
                    batching.run(ignore_progress, never)
            except BaseException as error:  # Ctrl-C too
                batching.fail(error)
                raise
            for request in requests:
                request.swap_out()  # the row keeps its pages for the next run
            batching.leave()
        for request in requests:
            request.output.wait_to_end()  # raises what has failed
        self.tokens = [request.token_ids for request in requests]

    def weight_nbytes(self) -> int:
        """Return the bytes of weights that a decode step reads."""
        return runner_step_nbytes(self.runner, self.batch)

    def num_prefill_passes(self) -> int:
        """Return the number of passes over the weights in which the prompts run."""
        return self.runner.num_passes([self.prompt_tokens] * self.batch, self.depth)

    def num_fill_passes(self) -> int:
        """Return the number of passes over the weights that `fill` runs before each timed run."""
        return 0 if self.runner.can_rewind or not self.depth else self.runner.num_passes([self.depth] * self.batch)
