"""How far an engine's logits are from those of a transformers model."""

from collections.abc import Sequence
from pathlib import Path

import torch
from streamed_engine import SIZES, runs_as
from tiny_models import VOCAB
from torch import nn

from graphcore import Engine

LENGTH, PROMPT = 45, 34  # as many steps as the widest convolution has tokens


@torch.inference_mode()
def errors_of(path: Path, model: nn.Module, graph: str, overrides: Sequence[str] = ()) -> tuple[float, float]:
    """Return the largest error of one pass over each of two sequences, and of one token by token after a prompt."""
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(100))
    expected = model(input_ids=ids, use_cache=False).logits
    sizes = [*SIZES, *([] if graph == "eager" else ["batch_size=1"]), *overrides]
    with Engine.load(path, dtype="fp32", device="cpu", graph=graph, overrides=sizes) as engine:
        assert runs_as(engine, graph)
        whole = (torch.cat([engine.logits(row[None]) for row in ids]) - expected).abs().max().item()
        row = ids[1].tolist()
        steps = [engine.runner.extend([row[:PROMPT]], [0])]
        steps += [engine.runner.extend([[token]], [at]) for at, token in enumerate(row[PROMPT:], start=PROMPT)]
        return whole, (torch.cat(steps) - expected[1, PROMPT - 1 :]).abs().max().item()
