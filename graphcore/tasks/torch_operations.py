"""The operations of a decode step that torch runs, each with inputs of its own, for who times them one by one.

Where blocks run compiled, so does each operation, as a graph of its own: what Inductor fuses in a block stands apart
here, and residual additions are left out. One sequence, one token.

Legend: H heads, K kv heads, E head dim, I input features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from graphcore.graph.compile import compile_cache, compile_whole
from graphcore.graph.program import Program
from graphcore.graph.state import StepState
from graphcore.kernels.attend import attend
from graphcore.nn.attention import Attention
from graphcore.nn.block import Block
from graphcore.nn.decoder import Decoder
from graphcore.nn.kv_cache import LayerCache
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import MLP
from graphcore.nn.moe import MoE
from graphcore.nn.norm import LayerNorm, RMSNorm
from graphcore.nn.rope import rotate
from graphcore.tasks.operation import Operation, OperationName
from graphcore.tasks.weight_reads import chosen_nbytes, embedding_nbytes

AnyNorm = RMSNorm | LayerNorm


@dataclass
class TorchOperations:
    """Collects a decoder's operations in the order of a step.

    Attributes:
        state: of the decode program; its span says how much of the cache is live.
        caches: one per layer.
        compiles: run each operation compiled.
        cache_dir: of compiled code.
    """

    decoder: Decoder
    state: StepState
    caches: Sequence[LayerCache]
    dtype: torch.dtype
    device: torch.device
    compiles: bool
    cache_dir: Path | None
    found: list[Operation] = field(default_factory=list)
    functions: dict[OperationName, Callable[..., object]] = field(default_factory=dict)

    def collect(self, program: Program) -> list[Operation]:
        """Return all operations; `program` is the greedy decode program, whose first and last steps are two of them."""
        embedding, head = self.decoder.embed_tokens, self.decoder.head
        name = OperationName("embed", str(self.decoder.spec.dim), weight_format(embedding))
        self.found.append(Operation.of(name, embedding_nbytes(embedding, 1), program.steps[0].replay))
        for block, cache in zip(self.decoder.layers, self.caches, strict=True):
            assert isinstance(block, Block), f"a layer is a {type(block).__name__}"
            self._block(block, cache)
        self._norm(head.norm, self.decoder.spec.dim)
        self._linear(head.lm_head, "head")
        vocab = str(self.decoder.spec.vocab)
        self.found.append(Operation.of(OperationName("argmax", vocab, ""), 0, program.steps[-1].replay))
        return self.found

    def _block(self, block: Block, cache: LayerCache) -> None:
        dim, attention = self.decoder.spec.dim, block.self_attn
        self._norm(block.input_layernorm, dim)
        self._attention(attention, cache)
        if block.sandwich:
            self._norm(block.pre_feedforward_layernorm, dim)
        self._norm(block.post_attention_layernorm, dim)
        if isinstance(block.mlp, MoE):
            self._experts(block.mlp, dim)
        else:
            self._mlp(block.mlp)
        if block.sandwich:
            self._norm(block.post_feedforward_layernorm, dim)

    def _attention(self, attention: Attention, cache: LayerCache) -> None:
        spec = attention.spec
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            self._linear(linear)
        query = self._input(spec.heads, spec.head_dim)
        key, value = (self._input(spec.kv_heads, spec.head_dim) for _ in range(2))
        for norm, x in ((attention.q_norm, query), (attention.k_norm, key)):
            if norm is not None:
                self._add("norm", f"{x.shape[-2]}x{x.shape[-1]}", norm, type(norm).forward, norm, x)
        if spec.rope is not None:
            table = torch.ones(1, 1, 2, spec.head_dim // 2, device=self.device)
            for x in (query, key):
                self._add("rope", f"{x.shape[-2]}x{x.shape[-1]}", None, rotate, x, table)
        window = f", window {spec.window}" if spec.window else ""
        shape = f"{spec.heads} heads, {spec.kv_heads} kv, {spec.head_dim}{window}"
        name = OperationName("attend", shape, str(cache.k.dtype).removeprefix("torch."))
        span, sinks = self.state.span, attention.sinks
        where = (cache.k[:1], cache.v[:1], span.starts, span.counts, spec.window or 0, spec.scale, sinks)
        self.found.append(Operation.of(name, 0, lambda: attend(query, key, value, *where)))
        if attention.attn_sub_norm is not None:
            self._norm(attention.attn_sub_norm, spec.heads * spec.head_dim)
        self._linear(attention.o_proj)

    def _mlp(self, mlp: MLP) -> None:
        for linear in (mlp.gate_proj, mlp.up_proj):
            if linear is not None:
                self._linear(linear)
        hidden = self._input(mlp.up_proj.outputs)
        gate = None if mlp.gate_proj is None else hidden
        self._add(f"activation {mlp.spec.activation}", str(hidden.shape[-1]), None, activate, mlp, gate, hidden)
        if mlp.ffn_sub_norm is not None:
            self._norm(mlp.ffn_sub_norm, mlp.up_proj.outputs)
        self._linear(mlp.down_proj)

    def _experts(self, moe: MoE, dim: int) -> None:
        """Add router, choice and chosen experts, which are one operation here."""
        experts = moe.experts
        nbytes = sum(chosen_nbytes(part, moe.top_k) for part in (experts.gate_proj, experts.up_proj, experts.down_proj))
        shape = f"{moe.top_k} of {moe.router.outputs}, {dim}"
        name = OperationName("experts", shape, weight_format(experts.gate_proj))
        self._found(name, nbytes + moe.router.weight.nbytes, MoE.forward, moe, self._input(dim))

    def _norm(self, norm: AnyNorm, dim: int) -> None:
        self._add("norm", str(dim), norm, type(norm).forward, norm, self._input(dim), self.dtype)

    def _linear(self, linear: Linear, kind: str = "linear") -> None:
        inputs = linear.weight.shape[1] if linear.packing is None else linear.packing.columns
        x = self._input(inputs)
        self._add(kind, f"{linear.outputs}x{inputs}", linear, Linear.forward, linear, x)

    def _add(
        self, kind: str, shape: str, module: nn.Module | None, run: Callable[..., object], *arguments: object
    ) -> None:
        nbytes = 0 if module is None else sum(buffer.nbytes for buffer in module.buffers())
        self._found(OperationName(kind, shape, weight_format(module)), nbytes, run, *arguments)

    def _found(self, name: OperationName, nbytes: int, run: Callable[..., object], *arguments: object) -> None:
        if name not in self.functions:
            self.functions[name] = compile_whole(run, name.kind.replace(" ", "_")) if self.compiles else run
        function = self.functions[name]
        with compile_cache(self.cache_dir):
            function(*arguments)
        self.found.append(Operation.of(name, nbytes, lambda: function(*arguments)))

    def _input(self, *shape: int) -> Tensor:
        """Return random values [1, 1, ...] in the compute dtype."""
        return torch.randn(1, 1, *shape, device=self.device).to(self.dtype)


def activate(mlp: MLP, gate: Tensor | None, up: Tensor) -> Tensor:
    """Return act(gate) * up, or act(up) without a gate."""
    return mlp.activation(up) if gate is None else mlp.activation(gate) * up


def weight_format(module: nn.Module | None) -> str:
    """Return how a module's weight is held: the packing's format, or the dtype; "" where there is no module."""
    if module is None:
        return ""
    packing, weight = vars(module).get("packing"), module.get_buffer("weight")
    return packing.format if packing is not None else str(weight.dtype).removeprefix("torch.")
