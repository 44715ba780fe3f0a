"""What an engine answers first and later, in a process and a compile cache of its own, as one line of JSON.

    python tests/first_answers.py DEVICE GRAPH CACHE_DIR OVERRIDE ...

Two engines are loaded one after the other. Each answers three times: the digests of the logits of a prompt, and the
tokens of a generation.
"""

import hashlib
import json
import sys

import torch

from graphcore import Engine
from graphcore.config.compose import compose_settings

ENGINES = 2
TIMES = 3
TOKENS = 32


def main() -> None:
    device, graph, cache_dir, *overrides = sys.argv[1:]
    own = ["model=llama3_8b", "model.checkpoint='random:bf16'", f"device={device}", f"graph={graph}"]
    settings = compose_settings([*own, f"cache_dir={cache_dir}", "context_length=128", *overrides])
    answers = []
    for _ in range(ENGINES):
        with Engine.from_settings(settings) as engine:
            generator = torch.Generator().manual_seed(1)
            rows = [torch.randint(engine.config.vocab_size, (TOKENS,), generator=generator).tolist()]
            answers += [answer(engine, rows) for _ in range(TIMES)]
    print(json.dumps(answers))


def answer(engine: Engine, rows: list[list[int]]) -> dict[str, object]:
    tokens = engine.generate(rows, max_new_tokens=16, ignore_eos=True)[0].token_ids
    logits = engine.logits(rows)
    assert isinstance(logits, torch.Tensor)
    return {"tokens": tokens, "logits": hashlib.sha256(logits.float().numpy().tobytes()).hexdigest()}


if __name__ == "__main__":
    main()
