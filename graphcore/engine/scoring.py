"""How unlikely a model finds a sequence: minus the log probability of each token, given those before it.

prefill: chunks through the big matrix products; the head runs on slices of a chunk
decode:  token by token through the decode program, so that what is measured are its kernels

Logits are never held for more than a slice: 1024 tokens of a vocabulary of 262144 would take 1 GiB. Where little memory
is free, slices are shorter, and the head is read more often.

Legend: T tokens, D model dim, V vocab.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from graphcore.engine.passes import set_inputs
from graphcore.engine.runner import Runner
from graphcore.graph.compile import CompileReport, measure_compile
from graphcore.streaming.scheduler import run_program
from graphcore.weights.plan import free_nbytes

PATHS = ("prefill", "decode")
SLICE_LOGITS = 1 << 25  # most that are held at once: 128 MiB of float32
LOGIT_NBYTES = 3 * 4  # of each: as it is projected, in float32 where that is another, and normalised


def warm_up(runner: Runner, path: str) -> CompileReport:
    """Compile what `token_losses` needs on that path, or load it from the cache on disk; return what it took."""
    with torch.inference_mode(), measure_compile() as report:
        runner.program(path, 1)
        if path == "prefill":
            runner.program("score", 1)
    return report


@torch.inference_mode()
def token_losses(runner: Runner, token_ids: Sequence[int], first: int, path: str) -> Tensor:
    """Return minus the log probability of token `first` and of each after it.

    Args:
        token_ids: T ids, run from an empty cache; the last one is only predicted.
        first: at least 1, so that a token stands before it.
        path: one of `PATHS`.

    Returns:
        [T - first] float64 nats on the CPU.

    Raises:
        ConfigError: the ids before the last do not fit in the context.
    """
    assert 1 <= first < len(token_ids), f"token {first} of {len(token_ids)} cannot be the first to be scored"
    losses = _prefill_losses if path == "prefill" else _decode_losses
    return torch.cat(losses(runner, token_ids, first)).double().cpu()


def _prefill_losses(runner: Runner, token_ids: Sequence[int], first: int) -> list[Tensor]:
    """Return the losses in pieces, in order."""
    targets = torch.tensor(token_ids[1:], device=runner.device)  # [T - 1], by the position that predicts
    room = min(SLICE_LOGITS, free_nbytes(runner.device) // 2 // LOGIT_NBYTES)
    most = max(2, room // runner.builder.decoder.spec.vocab)
    pieces: list[Tensor] = []
    done = 0
    for hidden in runner.residuals(token_ids[:-1]):
        end = done + hidden.shape[1]
        start = max(done, first - 1)
        for at in range(start, end, most):
            upto = min(at + most, end)
            pieces.append(
                cross_entropy(runner.project(hidden[:, at - done : upto - done])[0], targets[at:upto], reduction="none")
            )
        done = end
    return pieces


def _decode_losses(runner: Runner, token_ids: Sequence[int], first: int) -> list[Tensor]:
    """Return the losses one by one, in order; each step is fed the true token, whatever the last one found likely."""
    runner.forget()
    runner.check_context(len(token_ids) - 1)
    program = runner.program("decode", 1)
    targets = torch.tensor(token_ids, device=runner.device)
    pieces: list[Tensor] = []
    for position, token_id in enumerate(token_ids[:-1]):
        set_inputs(program.state, [[token_id]], [position], 1, 1)
        run_program(program, runner.policy)
        if position + 1 >= first:
            target = targets[position + 1 : position + 2]
            pieces.append(cross_entropy(program.state.logits, target, reduction="none"))
    return pieces
