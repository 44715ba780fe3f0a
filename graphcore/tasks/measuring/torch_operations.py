"""The operations of a decode step that torch runs, each with separate inputs, so that they can be timed one by one.

They are timed for one token of one sequence. Where blocks run compiled, each operation is compiled as a graph of its
own: operations that Inductor fuses in a block are separate here, and residual additions are left out.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import mul
from pathlib import Path

import torch
from torch import Tensor, nn

from graphcore.graph.compile import call_compiling, compile_whole
from graphcore.graph.lowering.operations import Call
from graphcore.graph.lowering.tracing import is_call, trace
from graphcore.graph.program import Program
from graphcore.graph.state import StepState
from graphcore.kernels.ops.attend import attend
from graphcore.kernels.ops.kv_formats import KVTypes, format_of, head_dim_of
from graphcore.kvcache.buffers import KVCache, LayerCache
from graphcore.nn.decoder import Decoder
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import ActivationModule
from graphcore.nn.moe import Experts, MoE, choose_experts
from graphcore.nn.norm import LayerNorm, RMSNorm
from graphcore.nn.rope import rotate
from graphcore.tasks.measuring.decode_operations import Operation, OperationName
from graphcore.tasks.measuring.weight_reads import chosen_nbytes, embedding_nbytes

AnyNorm = RMSNorm | LayerNorm


@dataclass
class TorchOperations:
    """Collector of a decoder's operations in the order of a step.

    Attributes:
        state: state of the decode program; its span says which part of the cache is in use.
        caches: one cache per layer.
        compiles: True runs each operation compiled.
        cache_dir: folder of compiled code.
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
        """Return all operations of a greedy decode program; its first and last steps are one operation each."""
        embedding, head = self.decoder.embed_tokens, self.decoder.head
        name = OperationName("embed", str(self.decoder.spec.dim), weight_format(embedding))
        self.found.append(Operation.of(name, embedding_nbytes(embedding, 1), program.steps[0].replay))
        for block, cache in zip(self.decoder.layers, self.caches, strict=True):
            self._block(block, cache)
        self._norm(head.norm, self.decoder.spec.dim)
        self._linear(head.lm_head, "head")
        vocab = str(self.decoder.spec.vocab)
        self.found.append(Operation.of(OperationName("argmax", vocab, ""), 0, program.steps[-1].replay))
        return self.found

    def _block(self, block: nn.Module, cache: LayerCache) -> None:
        """Append the operations of a layer, in the order of a trace of its forward."""
        traced, width = trace(block), head_dim_of(cache.tensors[0])
        sizes: dict[Call, int] = {}  # number of features of each operation's output
        for node in traced.nodes():
            x = node.args[0] if node.args else None
            sizes[node] = sizes.get(x, self.decoder.spec.dim)
            match traced.modules.get(str(node.target)) if node.op == "call_module" else node.target:
                case Linear() as linear:
                    sizes[node] = linear.outputs
                    if not any(is_call(user, choose_experts) for user in node.users):
                        self._linear(linear)
                case RMSNorm() | LayerNorm() as norm:
                    self._norm(norm, sizes[node])
                case ActivationModule() as activation:
                    self._activation(activation, sizes[node], is_gate=any(is_call(user, mul) for user in node.users))
                case Experts():
                    moe = traced.modules[str(node.target).rpartition(".")[0]]
                    assert isinstance(moe, MoE), "experts belong to a mixture"
                    self._experts(moe, self.decoder.spec.dim)
                case function if function is rotate:
                    x = self._input(sizes[node] // width, width)
                    table = torch.ones(1, 1, 2, width // 2, device=self.device, dtype=torch.float32)
                    self._add("rope", f"{x.shape[-2]}x{width}", None, rotate, x, table)
                case function if function is attend:
                    assert isinstance(cache, KVCache), "attention has keys and values"
                    self._attend(node, sizes[node] // width, cache)

    def _attend(self, node: Call, heads: int, cache: KVCache) -> None:
        given = inspect.signature(attend).bind(*node.args)
        given.apply_defaults()
        window, scale, sinks, cap = (given.arguments[name] for name in ("window", "scale", "sinks", "cap"))
        kv_heads, width = cache.k.shape[1], head_dim_of(cache.k)
        query, key, value = (self._input(count, width) for count in (heads, kv_heads, kv_heads))
        of_window = f", window {window}" if window else ""
        shape = f"{heads} heads, {kv_heads} kv, {width}{of_window}"
        name = OperationName("attend", shape, str(KVTypes(*(format_of(one) or one.dtype for one in cache.tensors))))
        scores = None if sinks is None else torch.zeros(heads, device=self.device, dtype=torch.float32)
        span = self.state.span
        where = (*cache.rows(1).inputs, span.starts, span.counts, window, scale, scores, "", cap)
        self.found.append(Operation.of(name, 0, lambda: attend(query, key, value, *where)))

    def _activation(self, activation: ActivationModule, size: int, is_gate: bool) -> None:
        hidden = self._input(size)
        name = activation.name
        self._add(f"activation {name}", str(size), None, activate, activation, hidden if is_gate else None, hidden)

    def _experts(self, moe: MoE, dim: int) -> None:
        """Append router, top-k selection and the selected experts as one operation."""
        experts = moe.experts
        nbytes = sum(chosen_nbytes(part, moe.top_k) for part in (experts.gate_proj, experts.up_proj, experts.down_proj))
        shape = f"{moe.top_k} of {moe.router.outputs}, {dim}"
        name = OperationName("experts", shape, weight_format(experts.gate_proj))
        self._found(name, nbytes + moe.router.weight.nbytes, MoE.forward, moe, self._input(dim))

    def _norm(self, norm: AnyNorm, size: int) -> None:
        """Append a norm of `size` features: one row, or several heads."""
        width = norm.weight.numel()
        if size == width:
            self._add("norm", str(size), norm, type(norm).forward, norm, self._input(size), self.dtype)
        else:
            x = self._input(size // width, width)
            self._add("norm", f"{size // width}x{width}", norm, type(norm).forward, norm, x)

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
        call_compiling(self.cache_dir, function, *arguments)
        self.found.append(Operation.of(name, nbytes, lambda: function(*arguments)))

    def _input(self, *shape: int) -> Tensor:
        """Return random values [1, 1, ...] in the compute dtype."""
        return torch.randn(1, 1, *shape, device=self.device, dtype=torch.float32).to(self.dtype)


def activate(activation: ActivationModule, gate: Tensor | None, up: Tensor) -> Tensor:
    """Return act(gate) * up, or act(up) without a gate."""
    return activation.forward(up) if gate is None else activation.forward(gate) * up


def weight_format(module: nn.Module | None) -> str:
    """Return the format of a module's packed weight, or the dtype of a dense one; "" if there is no module."""
    if module is None:
        return ""
    packing, weight = vars(module).get("packing"), module.get_buffer("weight")
    return packing.format if packing is not None else str(weight.dtype).removeprefix("torch.")
