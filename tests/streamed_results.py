"""What every way of using an engine gives, to be compared to the bit between resident and streamed weights."""

from collections.abc import Mapping

import torch

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.scoring import token_losses

PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8, 9], list(range(1, 25)), [30, 20, 10])  # rows of different lengths
IDS = torch.tensor([PROMPTS[1], PROMPTS[1][::-1]])


def results(engine: Engine, num_tokens: int) -> Mapping[str, object]:
    """Return what every way of using an engine gives."""
    logits, hidden = engine.logits(IDS, output_hidden_states=True)
    batch = engine.generate(PROMPTS, max_new_tokens=4, logprobs=True)
    return {
        "logits": [logits],
        "hidden states": list(hidden),
        "forward": [engine.forward(hidden[1])],
        "generate": engine.generate([PROMPTS[0]], max_new_tokens=num_tokens)[0].token_ids,
        "stream": [event.token_id for event in engine.stream(PROMPTS[2], max_new_tokens=3, temperature=1.0, seed=3)],
        "batch": [one.token_ids for one in batch],
        "log probabilities": [one.logprobs for one in batch],
        "scores": engine._queue.run_alone("scores", lambda: scores(engine)),
    }


def scores(engine: Engine) -> list[torch.Tensor]:
    """Return the losses of a prompt in chunks, and of one token by token."""
    runner = engine.runner
    assert isinstance(runner, ProgramRunner)
    return [token_losses(runner, PROMPTS[at], 1, path) for at, path in ((1, "prefill"), (0, "decode"))]


def differing(found: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    """Return the names of results that are not the same to the bit."""

    def same(one: object, other: object) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return torch.equal(one, other)
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(same, one, other))
        return one == other

    return [name for name in expected if not same(found[name], expected[name])]
