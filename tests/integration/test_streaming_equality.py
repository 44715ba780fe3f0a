"""Streaming changes when bytes move and nothing else: logits to the bit, tokens one by one, as with resident weights.

Resident results are the reference: that they are right is what the parity tests show, and that streaming does not
change them is the claim. A few combinations of settings run always, chosen so that each pair of values occurs for some
model; all of them, for all models, are slow.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
from support.files.gpt_files import small_file
from support.files.ternary_files import save_ternary
from support.streaming import IDS, differing, load, results, smallest_budget, stream_of
from support.tiny_models import ARCHITECTURES, BUILDERS, MIXTURES, TinyModel

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("small_parts")]

Tiny = Callable[[str], TinyModel]
WHOLE_BLOCKS = {"hidden_size": 128, "intermediate_size": 256}  # rows that ternary formats can pack
TINY = Path(__file__).parents[1] / "golden" / "tiny"
NAMES = tuple(name for name in BUILDERS if name not in MIXTURES)  # experts have tests of their own
FAMILIES = tuple(name for name in ARCHITECTURES if name not in MIXTURES)
NEW_TOKENS = 8
# Settings of streaming whose values appear beside each other in all pairs, or nearly.
COMBINATIONS: Sequence[tuple[str, ...]] = (
    ("mode=async", "layer_group_size=1", "prefetch=1", "source=disk"),
    ("mode=sync", "layer_group_size=1", "source=disk"),
    ("mode=async", "layer_group_size=2", "prefetch=0", "source=disk", "smallest"),
    ("mode=async", "layer_group_size=3", "prefetch=2", "source=host"),
    ("mode=async", "layer_group_size=auto", "prefetch=1", "source=disk"),
    ("mode=sync", "layer_group_size=2", "source=host", "smallest"),
    ("mode=async", "layer_group_size=auto", "prefetch=2", "source=disk", "smallest"),
    ("mode=async", "layer_group_size=2", "prefetch=1", "source=host"),
)


def settings_of(folder: Path, combination: Sequence[str], dtype: str, graph: str = "eager") -> list[str]:
    """Return a combination as overrides; "smallest" is the budget that a refusal names."""
    overrides = [f"streaming.{one}" for one in combination if "=" in one]
    if "smallest" in combination:
        overrides.append(f"streaming.memory_budget={smallest_budget(folder, *overrides, dtype=dtype, graph=graph)}")
    return overrides


@pytest.fixture(scope="module")
def resident(tiny_model: Tiny) -> Callable[..., Mapping[str, object]]:
    """A function from a checkpoint, a dtype, a graph kind, a number of tokens and sizes to resident results."""

    @cache
    def run(folder: Path, dtype: str, graph: str, num_tokens: int, *sizes: str) -> Mapping[str, object]:
        with load(folder, *sizes, streaming="off", dtype=dtype, graph=graph) as engine:
            return results(engine, num_tokens)

    return run


Resident = Callable[..., Mapping[str, object]]


def check(folder: Path, resident: Resident, combination: Sequence[str], dtype: str, graph: str = "eager") -> None:
    expected = resident(folder, dtype, graph, NEW_TOKENS)
    with load(folder, *settings_of(folder, combination, dtype, graph), dtype=dtype, graph=graph) as engine:
        assert engine.plan.is_streaming
        assert len(engine.plan.groups.streamed) >= 2
        assert differing(results(engine, NEW_TOKENS), expected) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "name"),
    [
        pytest.param(at, name, marks=() if at < len(COMBINATIONS) else pytest.mark.slow)
        for at, name in enumerate(FAMILIES)
    ],
)
def test_streamed_is_resident_to_the_bit(tiny_model: Tiny, resident: Resident, at: int, name: str) -> None:
    """Each combination with one family; weights are copied in one half of them and cast on their way in the other."""
    check(tiny_model(name).folder, resident, COMBINATIONS[at % len(COMBINATIONS)], ("fp32", "bf16")[at // 2 % 2])


# One of each kind of block: latent attention, delta rules, convolutions, shared caches and features, experts beside an
# MLP, norms behind sublayers, rounded activations, attention without pages of its own.
KINDS = ("llama3", "gpt2", "gemma4", "gemma4_moe", "qwen3_next", "lfm2", "olmo2", "deepseek_v2", "bitnet", "gpt_oss")
SMALL_PARTS = (("source=disk",), ("source=host",), ("source=disk", "smallest"), ("mode=sync",))


def check_parts(folder: Path, resident: Resident, combination: Sequence[str], dtype: str, graph: str) -> None:
    """Compare a model whose layers stream matrix by matrix; `graph` is that of its decode steps."""
    expected = resident(folder, dtype, graph, NEW_TOKENS)
    with load(folder, *settings_of(folder, combination, dtype, graph), dtype=dtype, graph=graph) as engine:
        groups = stream_of(engine).moving.layer_groups
        assert all(group.matrices for group in groups)
        assert engine.plan.groups.slot_nbytes < max(
            sum(engine.plan.groups.nbytes_of(at) for at, one in enumerate(groups, start=1) if one.layers == layers)
            for layers in {group.layers for group in groups}
        )
        assert differing(results(engine, NEW_TOKENS), expected) == []


@pytest.mark.slow
@pytest.mark.parametrize(("at", "name"), list(enumerate(KINDS)))
def test_layers_in_parts_are_resident_ones_to_the_bit(tiny_model: Tiny, resident: Resident, at: int, name: str) -> None:
    """Each kind of block, its decode steps native and eager in turn."""
    combination, graph = SMALL_PARTS[at // 2 % len(SMALL_PARTS)], ("auto", "eager")[at % 2]
    check_parts(tiny_model(name).folder, resident, combination, ("bf16", "fp32")[at // 3 % 2], graph)


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["auto", "eager"])
@pytest.mark.parametrize("name", BUILDERS)
def test_layers_in_parts_are_resident_ones_to_the_bit_for_every_family(
    tiny_model: Tiny, resident: Resident, name: str, graph: str
) -> None:
    for combination in SMALL_PARTS:
        check_parts(tiny_model(name).folder, resident, combination, "bf16", graph)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("size", ["auto", 1, 2, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_streamed_is_resident_to_the_bit_in_every_combination(
    tiny_model: Tiny, resident: Resident, name: str, size: int | str, dtype: str
) -> None:
    modes = [("mode=sync",), *(("mode=async", f"prefetch={depth}") for depth in (0, 1, 2))]
    for mode, source, budget in itertools.product(modes, ("disk", "host"), ((), ("smallest",))):
        combination = (*mode, f"source={source}", f"layer_group_size={size}", *budget)
        check(tiny_model(name).folder, resident, combination, dtype)


@pytest.mark.slow  # in CI test_streamed_experts.py streams a compiled model
@pytest.mark.parametrize(
    ("name", "graph", "batch_size"),
    [("llama3", "captured", 3), ("qwen3", "compiled", 1)],  # decode steps are native, of one sequence and of several
)
def test_streamed_is_resident_to_the_bit_compiled_and_captured(
    tiny_model: Tiny, resident: Resident, name: str, graph: str, batch_size: int
) -> None:
    folder, width = tiny_model(name).folder, f"batch_size={batch_size}"
    expected = resident(folder, "bf16", graph, 40, width)
    with load(folder, "streaming.layer_group_size=2", width, dtype="bf16", graph=graph) as engine:
        assert engine.choices.graph == graph
        assert differing(results(engine, 40), expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["captured", "compiled"])
@pytest.mark.parametrize("name", NAMES)
def test_streamed_is_resident_to_the_bit_compiled_and_captured_for_every_family(
    tiny_model: Tiny, resident: Resident, name: str, graph: str
) -> None:
    for combination in COMBINATIONS[:4]:
        check(tiny_model(name).folder, resident, combination, "fp32", graph)


@pytest.mark.parametrize("name", ["llama3", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_every_budget_from_the_smallest_that_works_to_everything_gives_the_same(
    tiny_model: Tiny, resident: Resident, name: str
) -> None:
    """Untied and tied: as the budget grows, fewer groups stream, until none does."""
    folder = tiny_model(name).folder
    expected = resident(folder, "fp32", "eager", NEW_TOKENS)
    smallest = smallest_budget(folder, streaming="auto")
    counts = []
    with load(folder, streaming="on") as engine:
        step = max(engine.plan.groups.group_nbytes[1:])
    for extra in (0, step, 2 * step, 64 << 20):
        with load(folder, f"streaming.memory_budget={smallest + extra}", streaming="auto") as engine:
            counts.append(len(engine.plan.groups.streamed))
            assert engine.plan.total_nbytes <= smallest + extra
            if extra in (0, step):
                assert differing(results(engine, NEW_TOKENS), expected) == []
            else:
                assert torch.equal(engine.logits(IDS), expected["logits"][0])  # type: ignore[index]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


def write_files(folder: Path) -> dict[str, Path]:
    """Write checkpoints whose bytes are packed, fused, transposed, permuted, or in many files."""
    four, mixed = gguf.GGMLQuantizationType.Q4_K, {"token_embd": gguf.GGMLQuantizationType.Q4_K}
    matrices = ("attn_qkv", "attn_output", "ffn_up", "ffn_down", "output")
    files = {
        "gpt2_q4_k": small_file(dict.fromkeys(matrices, four)).write(folder / "gpt2_q4_k.gguf"),
        "gpt2_packed_table": small_file(mixed).write(folder / "gpt2_packed_table.gguf"),
        "gpt2_tied": small_file({"token_embd": four, "ffn_up": four}, is_tied=True).write(folder / "gpt2_tied.gguf"),
    }
    for name in ("llama3", "gemma3", "qwen3"):
        files[f"{name}_gguf"] = TINY / f"{name}.gguf"
    files["bitnet_i2s_gguf"] = TINY / "bitnet_i2s.gguf"
    for form in ("default", "autobitlinear", "online"):
        (folder / form).mkdir()
        files[f"ternary_{form}"] = save_ternary("bitnet", form, 3, folder / form, WHOLE_BLOCKS).folder
    BUILDERS["llama3"](num_hidden_layers=12).save_pretrained(folder / "shards", max_shard_size="90KB")
    files["llama3_in_shards"] = folder / "shards"
    return files


FILES = (
    "gpt2_q4_k",
    "gpt2_packed_table",
    "gpt2_tied",
    "llama3_gguf",
    "gemma3_gguf",
    "qwen3_gguf",
    "bitnet_i2s_gguf",
    "ternary_default",
    "ternary_autobitlinear",
    "ternary_online",
    "llama3_in_shards",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize(("at", "name"), list(enumerate(FILES)))
def test_packed_fused_and_sharded_files_stream_to_the_bit(files: dict[str, Path], at: int, name: str) -> None:
    """Every second file in bf16: its dense tensors are cast on their way in."""
    dtype = ("fp32", "bf16")[at % 2]
    ids = torch.tensor([[5, 1, 17, 30, 2, 2, 9]])
    context = "context_length=32"
    with load(files[name], context, streaming="off", dtype=dtype) as engine:
        expected, tokens = engine.logits(ids), engine.generate([[5, 1, 17]], max_new_tokens=NEW_TOKENS)[0].token_ids
    for overrides in (("streaming.source=disk",), ("streaming.source=host", "streaming.layer_group_size=2")):
        with load(files[name], context, *overrides, dtype=dtype) as engine:
            assert len(engine.plan.groups.streamed) >= 2
            assert torch.equal(engine.logits(ids), expected), overrides
            assert engine.generate([[5, 1, 17]], max_new_tokens=NEW_TOKENS)[0].token_ids == tokens
            assert bool(stream_of(engine).files) == (overrides[0] == "streaming.source=disk")


@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
def test_weights_that_are_packed_at_load_stream_to_the_bit_from_ram(files: dict[str, Path], quant: str) -> None:
    ids = torch.tensor([[5, 1, 17, 30, 2, 2, 9]])
    context = "context_length=32"
    with load(files["gpt2_packed_table"], context, streaming="off", dtype="bf16", quant=quant) as engine:
        expected = engine.logits(ids)
    with load(files["gpt2_packed_table"], context, dtype="bf16", quant=quant) as engine:
        assert any("streamed weights wait in RAM" in note for note in engine.notes)
        assert torch.equal(engine.logits(ids), expected)
