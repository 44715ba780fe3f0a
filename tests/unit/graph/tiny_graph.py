"""A small decoder with random weights, its builder, and a way to run programs without an engine."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from graphcore.graph.builder import GraphBuilder
from graphcore.graph.compile import JustInTime
from graphcore.graph.program import Program
from graphcore.kvcache.buffers import allocate_cache
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.decoder import Decoder
from graphcore.nn.rope_spec import RopeSpec
from graphcore.nn.span import Span
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec
from graphcore.weights.groups import LayerGroup, split_layers

CPU = torch.device("cpu")
CONTEXT, VOCAB, DIM = 256, 40, 32
NORM = NormSpec("rms", 1e-6, scale_in_float32=True)
FULL = BlockSpec(
    DIM,
    NORM,
    AttentionSpec(4, 2, 8, 8**-0.5, qk_norm=NORM, rope=RopeSpec(1e6)),
    MLPSpec(48, "gelu_pytorch_tanh"),
    sandwich=True,
)
SLIDING = replace(FULL, attention=replace(FULL.attention, window=24, rope=RopeSpec(1e4)))


def model_of(*blocks: BlockSpec) -> ModelSpec:
    return ModelSpec(blocks[0].dim, VOCAB, blocks, NORM, context=CONTEXT)


def filled_decoder(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Decoder:
    """Return the decoder with every buffer drawn from its own name, so that a change of spec moves no other weight."""
    decoder = Decoder(spec, dtype)
    for prefix, module in decoder.groups():
        for name, buffer in module.named_buffers():
            generator = torch.Generator().manual_seed(sum(map(ord, prefix + name)))
            if buffer.dtype is torch.int32:
                buffer.copy_(torch.randperm(len(buffer), generator=generator))
                continue
            is_norm = "norm" in name and name.endswith("weight")
            buffer.normal_(
                1.0 if is_norm else 0.0, 0.2 if buffer.ndim == 1 else buffer.shape[-1] ** -0.5, generator=generator
            )
    return decoder


def builder_of(
    spec: ModelSpec,
    kind: str,
    batch: int = 2,
    groups: Sequence[LayerGroup] | None = None,
    names: list[str] | None = None,
) -> GraphBuilder:
    """Return a builder over fresh caches. Args: names: gets what is compiled."""
    layers = len(spec.blocks)
    caches = allocate_cache(spec, CacheSizes(batch, CONTEXT, torch.float32), CPU)
    return GraphBuilder(
        filled_decoder(spec),
        kind,
        groups or split_layers(layers, 1),
        caches,
        CONTEXT,
        CPU,
        make=None if names is None else JustInTime(None, names.append),
    )


def feed(program: Program, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
    """Run one pass over rows of tokens, padded at the end; return [B, V] logits after each row's last token."""
    tokens = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (tokens - len(row))] for row in rows])
    program.state.token_ids = ids
    program.state.span = Span(torch.tensor(starts), torch.tensor([len(row) for row in rows]))
    for step in program.steps:
        step.replay()
    return program.state.logits.clone()


def scored(builder: GraphBuilder, hidden: Tensor) -> Tensor:
    """Return the logits [B, T, V] of hidden states [B, T, D]."""
    program = builder.score(len(hidden), is_one_token=hidden.shape[1] == 1)
    program.state.hidden = hidden
    for step in program.steps:
        step.replay()
    return program.state.logits


def random_ids(*shape: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[no-any-return]
