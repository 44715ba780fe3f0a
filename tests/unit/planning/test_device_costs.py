"""What a GPU holds besides weights: formulas against counts made by hand, and against a simulated allocator."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.tiny_models import TinyModel

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import match_model, prepare_model
from graphcore.kvcache.sizes import CacheSizes, cache_nbytes
from graphcore.planning.gpu_overhead import (
    COMPILED_NODES,
    DELTA_NODES,
    LATENT_NODES,
    LAYER_NODES,
    LIBRARIES,
    NODE_NBYTES,
    STEP_NODES,
    allocated_cache_nbytes,
    chunk_graphs_nbytes,
    graphs_nbytes,
    overhead_nbytes,
    segments_nbytes,
    step_nodes,
)
from graphcore.planning.workspace import PROCESSORS, decode_programs, split_sums_nbytes, unpacked_nbytes
from graphcore.progress import ignore_progress

MIB = 1 << 20


def test_graphs_cost_their_nodes_and_pools_for_each_width_and_way_to_choose() -> None:
    assert graphs_nbytes(576, 1) == 3 * 576 * NODE_NBYTES + 22 * MIB
    assert graphs_nbytes(576, 2) == 2 * 3 * 576 * NODE_NBYTES + 22 * MIB
    # "500 nodes 362 MB, 1000 nodes 395 MB, 2000 nodes 458 MB" (the source that the module names)
    assert 0.9 * NODE_NBYTES < (458 - 362) * MIB / 1500 < 1.1 * NODE_NBYTES


def test_no_architecture_has_more_nodes_than_are_counted() -> None:
    """What decode steps launch, and for each layer three more: copies at a cut, and a matrix packed apart."""
    found = json.loads((Path(__file__).parents[2] / "golden" / "decode_kernels.json").read_text(encoding="utf-8"))
    assert len(found) >= 8
    for kernels in found.values():
        delta = DELTA_NODES if "graphcore delta_heads" in kernels["layer"] else 0
        latent = LATENT_NODES if "project_heads" in kernels["layer"] else 0
        assert len(kernels["layer"]) + 3 + bool(delta) <= LAYER_NODES + delta + latent  # the delta rule is two launches
        assert 16 * len(kernels["head"]) <= STEP_NODES  # in up to 16 parts


def test_no_compiled_block_has_more_nodes_than_are_counted() -> None:
    """What Inductor launches for a layer; custom ops are up to four kernels, and three copies stand at a cut."""
    files = [*(Path(__file__).parents[2] / "golden" / "graphs").glob("torch-*/cuda/*.txt")]
    most = 0
    for file in files:
        text = file.read_text(encoding="utf-8")
        for kind, phase in set(re.findall(r"^(block\d+)_(decode|prefill)_1:", text, re.MULTILINE)):
            parts = re.findall(rf"^{kind}(?:_experts)?_{phase}_1: \d+ launches.*?(?=^\S|\Z)", text, re.M | re.S)
            launches = [one for part in parts for one in re.findall(r"^  launch (\S+)", part, re.MULTILINE)]
            ops = sum(one.startswith("graphcore.") for one in launches) + len(parts) - 1  # and that of the experts
            most = max(most, len(launches) + len(parts) - 1 + 3 * ops + 3)
    assert len(files) > 30
    assert LAYER_NODES < most <= LAYER_NODES + COMPILED_NODES


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], 0),
        ([1], 2 * MIB),
        ([MIB] * 4, 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([9 * MIB] * 2, 20 * MIB),
        ([9 * MIB] * 3, 40 * MIB),
        ([10 * MIB], 10 * MIB),
        ([11 * MIB], 12 * MIB),
        ([16 * MIB] * 64, 64 * 16 * MIB),
    ],
)
def test_tensors_take_the_segments_that_torch_s_allocator_takes(sizes: list[int], expected: int) -> None:
    assert segments_nbytes(sizes) == expected


def test_segments_hold_all_and_waste_a_bounded_part() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        sizes = [draw.choice((draw.randrange(1, 3 * MIB), draw.randrange(1, 40 * MIB))) for _ in range(50)]
        found = segments_nbytes(sizes)
        assert sum(sizes) <= found <= 2.5 * sum(sizes) + 22 * MIB


def test_caches_count_as_they_are_allocated_rings_too(tmp_path: Path) -> None:
    model = open_model(
        compose_settings(["model=gemma3", "model.checkpoint=random:"]).model, 0, tmp_path, lambda *_: None
    )
    spec = model.spec
    for context in (512, 8192):
        dense = cache_nbytes(spec, CacheSizes(1, context, torch.bfloat16, chunk=512))
        assert (
            dense <= allocated_cache_nbytes(spec, CacheSizes(1, context, torch.bfloat16, chunk=512)) <= dense + 42 * MIB
        )


def test_an_eight_billion_llama_takes_some_hundred_megabytes(tmp_path: Path) -> None:
    settings = compose_settings(["model=llama3", "model.checkpoint=random:"])
    model = open_model(settings.model, 0, tmp_path, lambda *_: None)
    decoder, _ = match_model(model, torch.bfloat16)
    eager = overhead_nbytes(model.spec, decoder, 1, False, torch.bfloat16)
    assert eager == LIBRARIES + split_sums_nbytes(model.spec, 1)
    captured = overhead_nbytes(model.spec, decoder, 1, True, torch.bfloat16)
    assert captured == eager + graphs_nbytes(step_nodes(model.spec), 1)
    assert 200 * MIB < captured < 512 * MIB
    compiled = overhead_nbytes(model.spec, decoder, 1, True, torch.bfloat16, compiles=True)
    assert compiled == captured + 3 * len(model.spec.blocks) * COMPILED_NODES * NODE_NBYTES
    prompts = chunk_graphs_nbytes(model.spec, decoder, 512, torch.bfloat16)
    nodes = len(model.spec.blocks) * (LAYER_NODES + COMPILED_NODES) + STEP_NODES
    stream = (8 + 64 + 128 + 256 + 512) * model.spec.dim * 4
    activations = 512 * 3 * model.spec.dim * 4  # at least, once in the pool and once in the warm-up
    assert prompts > 5 * nodes * NODE_NBYTES + stream + 2 * activations
    assert prompts < 1024 * MIB
    attention = model.spec.blocks[0].attention
    group = attention.heads // attention.kv_heads
    assert split_sums_nbytes(model.spec, 1) == 160 * 128 * (attention.head_dim + 2) * 4
    assert split_sums_nbytes(model.spec, 3) == 3 * 160 * 128 * (attention.head_dim + 2) * 4
    assert group * decode_programs(3, attention.kv_heads) == 4 * 3 * 320  # fewer rows than those of the chunks


@pytest.mark.parametrize("kv_heads", [1, 4, 8, 64])
def test_no_batch_has_more_programs_of_attention_than_are_counted(kv_heads: int) -> None:
    from graphcore.kernels.gpu.attention.splits import most_splits  # brings Triton

    most = 0
    for batch in (1, 2, 3, 4, 5, 8, 16, 64, 1000):
        for visible in (1, 100, 4096, 1 << 20):
            programs = most_splits(batch, kv_heads, visible, 64, PROCESSORS) * batch * kv_heads
            assert programs <= decode_programs(batch, kv_heads)
            most = max(most, programs)
    assert most > 4 * PROCESSORS  # more than run at once, so the bound is one


def test_of_packed_matrices_the_largest_is_unpacked_at_once(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "golden" / "tiny" / "llama3"
    settings = compose_settings(["device=cpu", "graph=eager", "quant=q8_0", "context_length=64"])
    settings.model.checkpoint = str(folder)
    model = open_model(settings.model, 0, tmp_path, lambda *_: None)
    decoder = prepare_model(settings, model).decoder
    spec = model.spec.blocks[0]
    parts = max(len(rows) for rows in decoder.head_rows()) * model.spec.dim
    queries = spec.attention.heads * spec.attention.head_dim * model.spec.dim
    largest = max(spec.mlp.hidden * model.spec.dim, parts, queries)
    assert unpacked_nbytes(decoder, 1, torch.bfloat16) == 2 * max(spec.mlp.hidden * model.spec.dim, queries)
    assert unpacked_nbytes(decoder, 9, torch.bfloat16) == 2 * largest
    dense, _ = match_model(model, torch.bfloat16)
    assert unpacked_nbytes(dense, 9, torch.bfloat16) == 0


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("llama3", 3 * 16 + 64), ("qwen3_5", 5 * 16 + 4 * 4 + 64), ("deepseek_v3", 3 * (16 + 7) + 64)],
)
def test_a_step_has_the_nodes_of_its_layers(name: str, nodes: int, tiny_model: Callable[[str], TinyModel]) -> None:
    settings = compose_settings([f"model.checkpoint={tiny_model(name).folder}"])
    assert step_nodes(open_model(settings.model, 0, Path(), ignore_progress).spec) == nodes
