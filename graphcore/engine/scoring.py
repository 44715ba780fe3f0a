"""The losses of a sequence: minus the log probability of each token, given those before it.

prefill: chunks through the big matrix products; the head runs on slices of a chunk
decode:  token by token through the decode program, to measure the accuracy of its kernels

Logits are never held for more than a slice: 1024 tokens of a vocabulary of 262144 would take 1 GiB. Where the plan
leaves little of the budget, slices are shorter, and the head is read more often.

Legend: T tokens, D model dim, V vocab.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from graphcore.engine.model_runner import ModelRunner
from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph.compile import CompileReport, measure_compile

PATHS = ("prefill", "decode")


def warm_up(runner: ModelRunner, path: str) -> CompileReport:
    """Compile the programs of a path of `token_losses`, or load them from the cache on disk, and report the time."""
    with torch.inference_mode(), measure_compile() as report:
        if not isinstance(runner, ProgramRunner):
            runner.warm_up(1)
        elif path == "prefill":
            runner.programs.of_row("prefill", 0)
            runner.builder.score(1, is_one_token=False)
        else:
            runner.programs.step({0: ([0], 0)})
    return report


@torch.inference_mode()
def token_losses(runner: ModelRunner, token_ids: Sequence[int], first: int, path: str) -> Tensor:
    """Return minus the log probability of token `first` and of each after it.

    Args:
        token_ids: T ids, run from an empty cache; the last one is only predicted.
        first: index of the first token that is scored, at least 1.
        path: one of `PATHS`.

    Returns:
        [T - first] float64 nats on the CPU.

    Raises:
        ConfigError: the ids before the last do not fit in the context.
    """
    assert 1 <= first < len(token_ids), f"token {first} of {len(token_ids)} cannot be the first to be scored"
    # Made once: losses that are kept between large results would keep the heap from giving these back.
    targets = torch.tensor(token_ids[first:], dtype=torch.int64, device=runner.device)
    losses = torch.empty(len(targets), dtype=torch.float32, device=runner.device)
    if path == "prefill":
        slices = runner.logit_slices(token_ids[:-1], first - 1)
    else:  # each step runs the true token (teacher forcing)
        slices = islice(logits_by_token(runner, [token_ids[:-1]]), first - 1, None)
    done = 0
    for logits in slices:
        upto = done + len(logits)
        losses[done:upto] = cross_entropy(logits, targets[done:upto], reduction="none")
        done = upto
        del logits  # before the next slice's are made
    return losses.double().cpu()


def logits_by_token(runner: ModelRunner, rows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Yield the logits after each token of rows of one length, from empty caches, in decode steps: [B, V] float32.

    Raises:
        ConfigError: the rows do not fit in the context.
    """
    runner.sizes.check_context(len(rows[0]))
    for position, tokens in enumerate(zip(*rows, strict=True)):
        yield runner.extend([[token_id] for token_id in tokens], [position] * len(rows))


def decoded_logits(runner: ModelRunner, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits after each token of rows of one length, made by decode steps: [B, T, V] float32 on the CPU."""
    return torch.stack([logits.cpu() for logits in logits_by_token(runner, rows)], dim=1)
