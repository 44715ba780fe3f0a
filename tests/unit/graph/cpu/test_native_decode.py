"""A recorded decode step gives the logits of the eager modules: every spec, format, cache dtype and number of threads.

The eager modules are themselves compared with transformers (tests/integration/test_model_parity.py); golden models
are compared with transformers' logits here, too.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from block_specs import BLOCKS, EXPERTS, PLAIN, WIDE, WIDE_EXPERTS, WIDE_PLAIN_EXPERTS, attending
from packed_decoder import pack_all, unpack_all
from support.cases import in_case
from support.packed_matrices import GOLDEN, native_backend, native_kernels
from support.tiny_models import ARCHITECTURES, BUILDERS, TinyModel
from tiny_graph import CONTEXT, CPU, SLIDING, filled_decoder, model_of, random_ids
from torch import Tensor

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import prepare_model
from graphcore.errors import ConfigError
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.cpu.native_decode import native_obstacle
from graphcore.graph.program import Program
from graphcore.graph.step import FetchedExperts
from graphcore.kernels.backend import TorchBackend
from graphcore.kernels.cpu.program import NativeProgram
from graphcore.kvcache.buffers import allocate_cache
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import (
    AttentionSpec,
    BlockSpec,
    DeltaSpec,
    LatentSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
)
from graphcore.progress import ignore_progress
from graphcore.quant import FORMATS
from graphcore.weights.groups import split_layers

CLOSE = 2e-5  # float32, logits of order one; the order of a sum may differ
TOKENS = 40  # longer than a window, several times round its ring


def builder_of(
    spec: ModelSpec, kind: str, kv_dtype: torch.dtype = torch.float32, decoder: Decoder | None = None
) -> GraphBuilder:
    """Return a builder for one sequence over fresh caches; equal specs get equal weights."""
    caches = allocate_cache(spec, CacheSizes(1, CONTEXT, kv_dtype), CPU)
    groups = split_layers(len(spec.blocks), 1)
    backend = native_backend() if kind == "captured" else TorchBackend()
    return GraphBuilder(decoder or filled_decoder(spec), kind, groups, caches, CONTEXT, CPU, backend=backend)


def run_all(program: Program, ids: Sequence[int]) -> Tensor:
    """Feed tokens one after another, from an empty cache: [T, V] logits."""
    found = []
    program.state.span.counts.fill_(1)
    for position, token_id in enumerate(ids):
        program.state.token_ids.fill_(token_id)
        program.state.span.starts.fill_(position)
        for step in program.steps:
            step.replay()
        found.append(program.state.logits.clone())
    return torch.cat(found)


def both(spec: ModelSpec, kv_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return native and eager logits of the same tokens."""
    ids = random_ids(TOKENS)
    programs = [builder_of(spec, kind, kv_dtype).decode(1, is_greedy=False) for kind in ("captured", "eager")]
    native, eager = (run_all(program, ids) for program in programs)
    return native, eager


def worst(found: Tensor, expected: Tensor) -> float:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("name", BLOCKS)
def test_every_kind_of_block_decodes_as_its_modules_do(name: str) -> None:
    native, eager = both(model_of(BLOCKS[name]))  # of several blocks below
    assert worst(native, eager) < CLOSE


def test_embedding_scale_and_learned_positions_are_applied() -> None:
    plain = model_of(attending(rope=None))
    spec = replace(plain, embedding_scale=5.5, positions=CONTEXT)
    native, eager = both(spec)
    assert worst(native, eager) < CLOSE
    assert worst(eager, run_all(builder_of(plain, "eager").decode(1, is_greedy=False), random_ids(TOKENS))) > 0.1


@pytest.mark.parametrize("name", ["sandwich", "experts", "7_heads_a_key", "sliding_sinks"])
def test_any_number_of_threads_gives_the_same(name: str) -> None:
    spec, ids = model_of(BLOCKS[name], BLOCKS[name]), random_ids(TOKENS)
    eager = run_all(builder_of(spec, "eager").decode(1, is_greedy=False), ids)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        with in_case(f"{threads} threads"):
            assert worst(run_all(builder_of(spec, "captured").decode(1, is_greedy=False), ids), eager) < CLOSE


@pytest.mark.parametrize(("kv_dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("name", ["sandwich", "sliding", "sinks", "capped", "head_of_20"])
def test_narrow_caches_hold_what_the_modules_round_to(name: str, kv_dtype: torch.dtype, bound: float) -> None:
    """A last place of float32 may turn the rounding of a key; most logits do not notice."""
    native, eager = both(model_of(BLOCKS[name]), kv_dtype)
    assert worst(native, eager) < bound
    assert (native - eager).abs().median() < CLOSE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["sandwich", "experts", "biases"])
def test_narrow_weights_are_multiplied_in_float32(name: str, dtype: torch.dtype) -> None:
    spec = model_of(BLOCKS[name], PLAIN)
    narrow, wide = filled_decoder(spec, dtype), filled_decoder(spec)
    for ours, theirs in zip(narrow.buffers(), wide.buffers(), strict=True):
        theirs.copy_(ours)
    ids = random_ids(TOKENS)
    native = run_all(builder_of(spec, "captured", decoder=narrow).decode(1, is_greedy=False), ids)
    eager = run_all(builder_of(spec, "eager", decoder=wide).decode(1, is_greedy=False), ids)
    assert worst(native, eager) < CLOSE


PACKABLE = sorted(name for name, one in FORMATS.items() if one.can_quantize and one.block_elements > 1)
KERNEL_PACKABLE = [name for name in PACKABLE if name != "tq1_0"]


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNEL_PACKABLE)
def test_packed_matrices_decode_as_dense_ones_of_the_same_values(name: str) -> None:
    spec = model_of(WIDE, WIDE_EXPERTS, WIDE_PLAIN_EXPERTS)
    ids = random_ids(6)
    packed = pack_all(filled_decoder(spec), name, "float")
    native = run_all(builder_of(spec, "captured", decoder=packed).decode(1, is_greedy=False), ids)
    dense = unpack_all(filled_decoder(spec), name)
    assert worst(native, run_all(builder_of(spec, "eager", decoder=dense).decode(1, is_greedy=False), ids)) < CLOSE


@pytest.mark.parametrize(("rounding", "bound"), [("wide", 2e-4), ("block", 2e-2), ("float", 2e-6)])
def test_the_rounding_of_activations_is_the_one_that_was_asked_for(rounding: str, bound: float) -> None:
    """Bounds are relative RMS errors; each is out of reach of the next coarser rounding."""
    spec, ids = model_of(WIDE_EXPERTS, WIDE), random_ids(12)
    packed = pack_all(filled_decoder(spec), "q8_0", rounding)
    native = run_all(builder_of(spec, "captured", decoder=packed).decode(1, is_greedy=False), ids)
    dense = unpack_all(filled_decoder(spec), "q8_0")
    exact = run_all(builder_of(spec, "eager", decoder=dense).decode(1, is_greedy=False), ids)
    error = ((native - exact).norm() / exact.norm()).item()
    assert bound / 200 < error < bound


@pytest.mark.parametrize("packed", [None, "q8_0"])
@pytest.mark.parametrize("block", [WIDE_EXPERTS, WIDE_PLAIN_EXPERTS], ids=["clamped", "plain"])
def test_experts_run_with_the_same_bits_from_wherever_they_are_fetched_to(packed: str | None, block: BlockSpec) -> None:
    """Between two ranges of instructions each choice gets a place of its own; the other places hold NaN."""
    spec = model_of(block, WIDE, block)
    decoders = [
        filled_decoder(spec) if packed is None else pack_all(filled_decoder(spec), packed, "wide") for _ in "12"
    ]
    expected = run_all(builder_of(spec, "captured", decoder=decoders[0]).decode(1, is_greedy=False), random_ids(TOKENS))
    for index in (0, 2):
        for part in decoders[1].layers[index].mlp.experts.children():
            part.weight = torch.full(
                (9, *part.weight.shape[1:]), 255 if packed else float("nan"), dtype=part.weight.dtype
            )
    builder = builder_of(spec, "captured", decoder=decoders[1])
    fetcher = MovingExperts(decoders[0], decoders[1])
    builder.functions.fetched = FetchedExperts(fetcher, {})
    assert torch.equal(run_all(builder.decode(1, is_greedy=False), random_ids(TOKENS)), expected)
    assert fetcher.asked == [(layer, 2) for _ in range(TOKENS) for layer in (0, 2)]


@dataclass
class MovingExperts:
    """Copies chosen experts to other places each time, among nine that hold nothing of use."""

    source: Decoder
    target: Decoder
    asked: list[tuple[int, int]] = field(default_factory=list)

    def waves(self, layer: int, experts: Sequence[int]) -> Iterator[list[int]]:
        self.asked.append((layer, len(experts)))
        places = [-1] * 4
        parts = [decoder.layers[layer].mlp.experts.children() for decoder in (self.source, self.target)]
        for rank, expert in enumerate(experts):
            places[expert] = (len(self.asked) + 4 * rank + expert) % 9
        for theirs, ours in zip(*parts, strict=True):
            for expert in experts:
                ours.weight[places[expert]] = theirs.weight[expert]
        yield places


@pytest.mark.parametrize("threads", [1, 3])
def test_a_greedy_step_chooses_the_likeliest_token_and_feeds_it(threads: int) -> None:
    torch.set_num_threads(threads)
    spec = model_of(PLAIN, SLIDING)
    native, eager = (builder_of(spec, kind).decode(1, is_greedy=True) for kind in ("captured", "eager"))
    for program in (native, eager):
        program.state.token_ids.fill_(3)
        program.state.span.counts.fill_(1)
    for position in range(TOKENS):
        for program in (native, eager):
            assert program.state.span.starts.tolist() == [position]
            for step in program.steps:
                step.replay()
        assert native.state.chosen.tolist() == native.state.logits.argmax(-1).tolist() == eager.state.chosen.tolist()
        assert native.state.token_ids.tolist() == [native.state.chosen.tolist()]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("token", [0, 17, -1])
def test_a_row_whose_logits_are_not_finite_has_no_likeliest_token(token: int, bad: float) -> None:
    decoder = filled_decoder(model_of(PLAIN))
    decoder.head.lm_head.weight[token] = bad
    program = builder_of(model_of(PLAIN), "captured", decoder=decoder).decode(1, is_greedy=True)
    program.state.span.counts.fill_(1)
    program.steps[0].replay()
    assert not program.state.logits.isfinite().all()
    assert program.state.chosen.tolist() == [-1]
    assert program.state.token_ids.tolist() == [[0]]


@pytest.mark.parametrize("threads", [1, 3])
def test_of_equal_logits_the_first_is_chosen(threads: int) -> None:
    torch.set_num_threads(threads)
    spec = model_of(PLAIN)
    decoder = filled_decoder(spec)
    decoder.head.lm_head.weight[:] = decoder.head.lm_head.weight[0]
    program = builder_of(spec, "captured", decoder=decoder).decode(1, is_greedy=True)
    program.state.span.counts.fill_(1)
    program.steps[0].replay()
    assert program.state.logits.unique().numel() == 1
    assert program.state.chosen.tolist() == [0]


def test_two_threads_that_decode_at_once_do_not_disturb_each_other() -> None:
    torch.set_num_threads(2)
    specs = [model_of(PLAIN, PLAIN), model_of(EXPERTS)]
    programs = [builder_of(spec, "captured").decode(1, is_greedy=False) for spec in specs]
    eager = [builder_of(spec, "eager").decode(1, is_greedy=False) for spec in specs]
    ids = random_ids(200)

    def run(program: Program) -> Tensor:
        with torch.inference_mode():
            return run_all(program, ids)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, programs))
    for logits, program in zip(found, eager, strict=True):
        assert worst(logits, run_all(program, ids)) < CLOSE


SLEEPER = """
import os, sys, time, torch
from graphcore.kernels.cpu.instructions import CHOICE_PARTS, Choose
from graphcore.kernels.cpu.program import NativeProgram
state = "slept" if os.fork() else "awake"
program = NativeProgram(sys.argv[1], 3)
best, index = program.buffer(CHOICE_PARTS), torch.zeros(CHOICE_PARTS, dtype=torch.int64)
logits = torch.arange(64.0)
program.add(Choose(program.per_row(logits), 64, program.address(best), program.address(index, torch.int64)))
program.run()
if state == "slept":
    assert os.wait()[1] == 0, "the awake process failed"
    time.sleep(0.1)  # the team gives up waiting after about a millisecond
print(state, index[best.argmax()].item())
"""


@pytest.mark.thorough
def test_a_process_ends_while_its_team_waits() -> None:
    """Of two processes one ends at once, and one after its team has gone to sleep."""
    command = [sys.executable, "-c", SLEEPER, native_kernels()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["awake 63", "slept 63"]), done.stderr


def test_scratch_is_as_large_as_the_largest_padded_activations() -> None:
    """Three experts of 20 features take more room than one row of 64: columns are padded to 32."""
    program = NativeProgram(native_kernels(), 1)
    for shape in ((1, 64), (3, 20), (1, 65)):
        program.needs(rows=shape[0], columns=shape[1])
    assert program.activations == (3, 20)


@pytest.mark.thorough
@pytest.mark.parametrize("name", BUILDERS)
def test_every_family_decodes_to_transformers_logits(tiny_model: Callable[[str], TinyModel], name: str) -> None:
    tiny = tiny_model(name)
    with engine_of(tiny.folder) as engine:
        found = decoded(engine, tiny.ids[0].tolist())
    assert worst(found, tiny.logits[0]) < 1e-4


@pytest.mark.parametrize(
    "name",
    [
        *("llama3", "qwen3", "gemma3", "gpt2", "gptoss"),
        # in CI, tests/integration has the golden files eager and a random model compiled
        pytest.param("bitnet", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("layout", ["", pytest.param(".gguf", marks=pytest.mark.thorough)])
def test_golden_models_decode_to_transformers_logits(name: str, layout: str) -> None:
    stored = np.load(GOLDEN / "tiny" / "logits.npz")
    key = "bitnet_i2s" if name == "bitnet" and layout else name
    # float32 BitNet keeps to the reference's order of operations, which only compiled blocks do
    with engine_of(GOLDEN / "tiny" / f"{key}{layout}", "compiled" if name == "bitnet" else "captured") as engine:
        found = decoded(engine, stored["tokens"].tolist())
    expected = torch.from_numpy(stored[f"{key}.hf_logits"]).view(found.shape)
    if name == "bitnet":  # a last place of float32 can become a step of int8
        assert (found - expected).abs().mean() < 2e-3
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
    else:
        assert worst(found, expected) < 1e-4


def engine_of(source: Path, graph: str = "captured", *overrides: str) -> Engine:
    native_kernels()
    return Engine.load(source, dtype="fp32", device="cpu", graph=graph, overrides=["context_length=64", *overrides])


def decoded(engine: Engine, ids: Sequence[int]) -> Tensor:
    """Return the logits after each token, fed one by one: [T, V]."""
    with torch.inference_mode():
        return torch.cat([engine.runner.extend([[token_id]], [at]) for at, token_id in enumerate(ids)])


@pytest.mark.thorough
@pytest.mark.parametrize("asked", ["q8_0", "q4_k", "mxfp4"])
@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt_oss"])
def test_models_packed_at_load_decode_to_their_teacher_forced_logits(
    tiny_model: Callable[[str], TinyModel], name: str, asked: str
) -> None:
    tiny = tiny_model(name)
    ids = tiny.ids[0].tolist()
    with engine_of(tiny.folder, "captured", f"quant.format={asked}") as native:
        found = decoded(native, ids)
    with engine_of(tiny.folder, "eager", f"quant.format={asked}") as eager:
        assert worst(found, eager.logits([ids])[0]) < CLOSE


def test_a_matrix_that_no_kernel_reads_is_decoded_compiled_and_said_so(tiny_model: Callable[[str], TinyModel]) -> None:
    native_kernels()
    settings = compose_settings(["quant.format=tq1_0", "device=cpu"])
    settings.model.checkpoint = str(ternary_sized(tiny_model))
    model = open_model(settings.model, 0, Path(settings.model.checkpoint), lambda *_: None)
    settings.graph.kind = "auto"
    parts = prepare_model(settings, model)
    assert native_obstacle(parts.decoder) is not None
    assert parts.runtime.graph == "compiled"
    assert any("decode runs compiled" in note for note in parts.notes)
    settings.graph.kind = "captured"
    with pytest.raises(ConfigError, match=r"graph=captured is not possible.*use graph=auto"):
        prepare_model(settings, model)
    settings.quant.format = "tq2_0"
    assert prepare_model(settings, model).runtime.graph == "captured"


def test_a_projection_that_rounds_its_input_is_recorded_only_where_the_kernels_round_it() -> None:
    """The kernels round to int8 before packed ternary weights, and before no dense ones."""
    spec = model_of(replace(WIDE, int8_activations="online"))
    assert native_obstacle(filled_decoder(spec)) is not None
    assert native_obstacle(pack_all(filled_decoder(spec), "i2_s", "token")) is None


def ternary_sized(tiny_model: Callable[[str], TinyModel]) -> Path:
    """Return a checkpoint whose rows are long enough for blocks of 256."""
    folder = tiny_model("llama3").folder.parent / "rows_of_256"
    if not folder.exists():
        BUILDERS["llama3"](hidden_size=256, intermediate_size=256, num_hidden_layers=1).save_pretrained(folder)
    return folder


RECORDED = {
    BlockSpec: {
        "dim", "norm", "attention", "mlp", "sandwich", "int8_activations", "per_layer", "per_layer_activation",
        "has_output_factor", "ordered_inputs", "low_rank", "pre_norm", "residual_factor",
    },
    AttentionSpec: {
        "heads", "kv_heads", "head_dim", "scale", "window", "qk_norm", "rope", "qkv_bias", "output_bias", "sinks",
        "sub_norm", "cap", "output_gate", "v_norm_eps", "values_are_keys", "shares_cache", "qk_norm_over_heads",
        "latent",
        "position_scale",
    },
    LatentSpec: {"rank", "rotated", "nope", "value_dim", "query_rank", "eps"},
    DeltaSpec: {"key_heads", "value_heads", "key_dim", "value_dim", "width", "eps", "tiled"},
    MLPSpec: {"hidden", "activation", "gated", "bias", "sub_norm"},
    MoESpec: {
        "experts", "top_k", "hidden", "gating", "bias", "router_bias", "shares", "shared_hidden", "expert_scales",
        "parallel_mlp", "selection_bias", "shared_gate", "scores_in_float32",
    },
    NormSpec: {"kind", "eps", "scale_in_float32"},
    ModelSpec: {
        "dim", "vocab", "blocks", "norm", "context", "embedding_scale", "positions", "tied", "logit_cap", "per_layer",
        "logit_factor",
    },
}  # fmt: skip


@pytest.mark.parametrize("spec", RECORDED, ids=lambda spec: spec.__name__)
def test_no_field_of_a_spec_is_forgotten(spec: type) -> None:
    found = {field.name for field in fields(spec)}
    assert found == RECORDED[spec], f"{spec.__name__}: add it to graph/cpu/native_decode.py, then here"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_family_can_be_recorded_in_bf16(
    name: str, tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """In float32, `test_every_family_decodes_to_transformers_logits` records steps, which would be refused."""
    settings = compose_settings([f"model.checkpoint={tiny_model(name).folder}", "dtype=bf16", "device=cpu"])
    model = open_model(settings.model, 0, tmp_path, ignore_progress)
    assert native_obstacle(prepare_model(settings, model).decoder) is None
