"""Blocks of plain modules decode eager, compiled, as native programs and as a GPU's kernels, as their forward says.

None of them is known to graph/ or kernels/: what they need are the operations, and rules that ask who reads what.
"""

from collections.abc import Sequence

import pytest
import torch
from composed_blocks import COMPOSED, DIM, ComposedBlock
from support.gpu_kernels import let_programs_be_few
from support.packed_matrices import native_kernels
from torch import Tensor, nn

from graphcore.graph.compile import compile_whole
from graphcore.graph.cpu.instruction_entries import ModuleRecorder, obstacle_of_operations
from graphcore.graph.gpu.kernel_entries import DeviceRun
from graphcore.graph.gpu.kernel_obstacles import block_obstacle
from graphcore.graph.lowering.targets import lower_to_instructions, lower_to_kernels
from graphcore.graph.state import StepState
from graphcore.kernels.cpu.program import NativeProgram
from graphcore.kvcache.buffers import KVCache
from graphcore.nn.rope import rope_table
from graphcore.nn.span import Span

pytestmark = pytest.mark.thorough

TOKENS, SLOTS = 6, 16
SOME = ("plain", "parallel", "norms before and after", "output gate")  # in 16 bits and compiled; the others are slow
EXTENTS = [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in COMPOSED]
CLOSE = 2e-5  # float32, numbers of order one; the order of a sum may differ


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    let_programs_be_few(monkeypatch)


def block_of(name: str, dtype: torch.dtype = torch.float32) -> ComposedBlock:
    """Return a block whose buffers are drawn from their names."""
    block = COMPOSED[name](dtype)
    for key, buffer in block.named_buffers():
        generator = torch.Generator().manual_seed(sum(map(ord, key)))
        is_norm = "norm" in key and key.endswith("weight")
        scale = 0.2 if buffer.ndim == 1 else buffer.shape[-1] ** -0.5
        buffer.normal_(1.0 if is_norm else 0.0, scale, generator=generator)
    return block


def cache_of(block: ComposedBlock, dtype: torch.dtype) -> KVCache:
    size = (2, block.spec.kv_heads, SLOTS // 2, block.spec.head_dim)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    return KVCache(torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype), table)


def tokens() -> Tensor:
    return torch.randn(TOKENS, 1, 1, DIM, generator=torch.Generator().manual_seed(1))


def ropes(block: ComposedBlock) -> Sequence[Tensor | None]:
    """Return each token's rows of the table."""
    if block.spec.rope is None:
        return [None] * TOKENS
    return list(rope_table(block.spec.rope, block.spec.head_dim, SLOTS)[:TOKENS, None, None])


def span_at(position: int) -> Span:
    return Span(torch.tensor([position]), torch.tensor([1]))


def run_by(run: object, block: ComposedBlock, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what one token after another becomes, [TOKENS, D]."""
    cache, found = cache_of(block, dtype), []
    for position, (x, rope) in enumerate(zip(tokens(), ropes(block), strict=True)):
        found.append(run(block, x.clone(), rope, span_at(position), *cache.inputs).flatten())
    return torch.stack(found)


def run_natively(block: ComposedBlock) -> Tensor:
    program = NativeProgram(native_kernels(), 2)
    state, cache = StepState.empty(1, 1, torch.device("cpu")), cache_of(block, torch.float32)
    x = program.buffer(DIM)
    table = None if block.spec.rope is None else rope_table(block.spec.rope, block.spec.head_dim, SLOTS)
    inputs = {"x": x, "rope": table, "span": state.span, "k_cache": cache.k, "v_cache": cache.v, "table": cache.table}
    recorder = ModuleRecorder(program, state, dict(block.named_modules()))
    assert recorder.record(lower_to_instructions(block), inputs) is x
    found = []
    for position, token in enumerate(tokens()):
        x.copy_(token.flatten())
        state.span.starts.fill_(position)
        program.run()
        found.append(x.clone())
    return torch.cat(found)


@pytest.mark.parametrize("name", COMPOSED)
def test_native_programs_compute_what_the_forward_does(name: str) -> None:
    block = block_of(name)
    assert obstacle_of_operations(block, changes_x=True) is None
    expected = run_by(ComposedBlock.forward, block)
    assert (run_natively(block) - expected).abs().max() < CLOSE
    assert (expected[1:] - expected[:-1]).abs().min() > 0  # every number depends on its token


def run_block(
    block: nn.Module, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor, table: Tensor
) -> Tensor:
    """Run a block by a GPU's kernels; arguments as of `Block.forward`, and `x` is changed."""
    rows = x.view(len(x), -1)
    inputs = {"x": rows, "rope": rope, "span": span, "k_cache": k_cache, "v_cache": v_cache, "table": table}
    arrivals = torch.zeros(len(x) * k_cache.shape[1], dtype=torch.int32, device=x.device)
    DeviceRun(dict(block.named_modules()), arrivals).run(lower_to_kernels(block), inputs)
    return x


@pytest.mark.parametrize("name", COMPOSED)
def test_a_gpus_kernels_compute_what_the_forward_does(name: str) -> None:
    block = block_of(name)
    assert block_obstacle(block, 1) is None
    assert (run_by(run_block, block) - run_by(ComposedBlock.forward, block)).abs().max() < CLOSE


@pytest.mark.parametrize("name", EXTENTS)
def test_a_gpus_kernels_err_no_more_than_the_forward_in_16_bits(name: str) -> None:
    narrow, wide = block_of(name, torch.bfloat16), block_of(name)
    wide.load_state_dict({key: tensor.float() for key, tensor in narrow.state_dict().items()})
    truth = run_by(ComposedBlock.forward, wide)
    runs = (run_block, ComposedBlock.forward)
    errors = [(run_by(run, narrow, torch.bfloat16) - truth).pow(2).mean().sqrt() for run in runs]
    assert 0 < errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("name", EXTENTS)
def test_compiled_blocks_compute_what_the_forward_does(name: str) -> None:
    block = block_of(name)
    compiled = compile_whole(type(block).forward, name.replace(" ", "_"))
    assert (run_by(compiled, block) - run_by(ComposedBlock.forward, block)).abs().max() < CLOSE


class Forgotten(nn.Module):
    """A block with an operation that nothing has an entry for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block_of("plain")

    def forward(
        self, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor, table: Tensor
    ) -> Tensor:
        return x + self.inner.mlp(torch.sin(x))


class NoStream(Forgotten):
    """A block whose answer is no sum with what it is given."""

    def forward(
        self, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor, table: Tensor
    ) -> Tensor:
        return self.inner.mlp(self.inner.first_norm(x))


@pytest.mark.parametrize(
    ("block", "reason"), [(Forgotten, "for sin"), (NoStream, "for an answer that is no sum with the stream")]
)
def test_what_has_no_entry_is_refused_by_name(block: type[nn.Module], reason: str) -> None:
    assert obstacle_of_operations(block(), changes_x=True) == f"no native instruction {reason}"
    assert block_obstacle(block(), 1) == f"no GPU kernel {reason}"
