"""Models with LoRA adapters give the logits of PEFT's own model, in every form that a matrix may have.

A packed model's reference is transformers' with the packed matrices' values, and PEFT's factors on top.
"""

import copy
import json
import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files import llama_files
from support.files.adapter_files import drawn, packed_file, write_gguf_adapter, write_peft
from support.files.ternary_files import save_ternary
from support.gpu_kernels import let_programs_be_few, runners_of
from support.processes import graphcore
from support.streaming import differing, load, results, runs_as, smallest_budget
from support.tiny_models import TinyModel, tolerance_of
from torch import Tensor, nn

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.errors import CheckpointError, CheckpointNotFoundError, ConfigError, PlanError, UnsupportedError
from graphcore.export.pack import Packer
from graphcore.quant import FORMATS

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
CLOSE = 5e-5  # float32, logits of order one
IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(3))
DENSE = ("llama3", "mistral", "qwen2", "qwen3", "gemma3", "gpt2", "phi3", "qwen3_5", "lfm2", "gemma4", "gemma4_dense")
CONFIGS = {
    "plain": {"r": 4, "lora_alpha": 6},
    "stabilised": {"r": 8, "lora_alpha": 3, "use_rslora": True},
    "patterns": {
        "r": 2,
        "lora_alpha": 3,
        "rank_pattern": {"q_proj": 5, r"layers\.0\.mlp\.up_proj": 3},
        "alpha_pattern": {"down_proj": 9},
    },
}


def projections(model: nn.Module) -> list[str]:
    """Return the ends of the names of a model's matrices that PEFT can put factors beside."""
    from transformers.pytorch_utils import Conv1D

    found = [name for name, one in model.named_modules() if isinstance(one, nn.Linear | Conv1D)]
    return sorted({name.rpartition(".")[2] for name in found if re.search(r"\.(layers|h)\.\d+\.", name)})


def with_peft(model: nn.Module, folder: Path, seed: int = 0, **config: object) -> nn.Module:
    """Return a copy of the model with random factors beside its matrices; the adapter is saved in the folder."""
    peft = pytest.importorskip("peft", reason="PEFT is the reference")
    config = {"target_modules": projections(model), **config}
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    for name, factor in adapted.named_parameters():
        if ".lora_" in name:
            spread = factor.shape[-1] ** -0.5 if "lora_A" in name else 0.5
            factor.data = torch.randn(factor.shape, generator=generator) * spread
    adapted.save_pretrained(folder)
    return adapted.eval()


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits.float()


def engine_of(path: Path, adapter: object, *overrides: str, graph: str = "eager", quant: str = "stored") -> Engine:
    given = [f"model.adapter={adapter}", "context_length=64", "prefill_chunk=16", *overrides]
    return Engine.load(path, dtype="fp32", device="cpu", graph=graph, quant=quant, overrides=given)


def check(path: Path, adapter: object, expected: Tensor, *overrides: str, close: float = CLOSE, **how: str) -> None:
    """Check the logits of prompts, and of decode steps one after another."""
    with engine_of(path, adapter, *overrides, **how) as engine:
        assert runs_as(engine, how.get("graph", "eager"))
        assert (engine.logits(IDS) - expected).abs().max() < close
        assert (engine.logits(IDS[:1], by_token=True) - expected[:1]).abs().max() < close


# Every family once, and every kind of config for more than one: what a config means does not depend on the family.
@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, ("plain", "stabilised")[at % 2]) for at, name in enumerate(DENSE)),
        *(("llama3", "stabilised"), ("llama3", "patterns"), ("qwen3", "patterns"), ("gpt2", "plain")),
    ],
)
def test_a_dense_model_gives_pefts_logits(name: str, config: str, tiny_model: Tiny, tmp_path: Path) -> None:
    tiny = tiny_model(name)
    more = {"fan_in_fan_out": True} if name == "gpt2" else {}
    expected = logits_of(with_peft(tiny.reference, tmp_path, **CONFIGS[config], **more))
    assert (expected - logits_of(tiny.reference)).abs().max() > 0.3
    check(tiny.folder, tmp_path, expected, close=3 * tolerance_of(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "graph"),
    [
        *product(("llama3", "gemma3", "gpt2"), ("eager", "auto")),
        ("gpt2", "compiled"),  # factors of three matrices in one, biases: what the others have, and more
        *(pytest.param(name, "compiled", marks=pytest.mark.slow) for name in ("llama3", "gemma3")),
    ],
)
def test_a_model_packed_at_load_gives_pefts_logits(name: str, graph: str, tiny_model: Tiny, tmp_path: Path) -> None:
    """GPT-2's q, k and v are rows of one matrix, to which PEFT's one pair of factors belongs."""
    tiny = tiny_model(name)
    reference = copy.deepcopy(tiny.reference)
    with engine_of(tiny.folder, "null", quant="q8_0") as engine:
        unpack_as(engine, reference)
    expected = logits_of(with_peft(reference, tmp_path, r=6, lora_alpha=6))
    check(tiny.folder, tmp_path, expected, graph=graph, quant="q8_0", close=2e-4)


@torch.no_grad()
def unpack_as(engine: Engine, reference: nn.Module) -> None:
    """Give transformers' model the values that the engine's formats leave of its matrices, by gguf's definition."""
    from graphcore.weights.packed_weights import formats_of

    kinds = {kind for _, kind, _ in formats_of(engine.runner.builder.decoder)}
    assert "q8_0" in kinds
    packed = {
        name.removesuffix(".weight") for name, kind, _ in formats_of(engine.runner.builder.decoder) if kind == "q8_0"
    }
    one, leaves = FORMATS["q8_0"], {name.rpartition(".")[2] for name in packed}
    own = {"c_attn": "q_proj", "c_fc": "up_proj", "wte": "embed_tokens"}
    for name, parameter in reference.named_parameters():
        module = name.removesuffix(".weight").rpartition(".")[2]
        leaf = ("o_proj" if "attn" in name else "down_proj") if module == "c_proj" else own.get(module, module)
        if parameter.ndim == 2 and leaf in leaves:
            value = parameter.T if "c_" in module else parameter
            dense = one.dequantize(one.quantize(value.contiguous()), value.shape)
            parameter.copy_(dense.T if "c_" in module else dense)


@pytest.mark.parametrize("graph", ["eager", "auto"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_packed_gguf_file_gives_pefts_logits(name: str, graph: str, tmp_path: Path) -> None:
    model = packed_file(tmp_path / "model.gguf", name)
    expected = logits_of(with_peft(model, tmp_path / "adapter", **CONFIGS["plain"]))
    assert (expected - logits_of(model)).abs().max() > 0.3
    check(tmp_path / "model.gguf", tmp_path / "adapter", expected, graph=graph, close=2e-4)
    with engine_of(tmp_path / "model.gguf", tmp_path / "adapter") as engine:
        attention = engine.runner.builder.decoder.layers[0].self_attn
        assert attention.q_proj.packing is not None, "the matrix stays packed"
        assert attention.q_proj.lora_A.weight.shape == (4, 64)
        assert engine.runner.builder.decoder.layers[0].mlp.down_proj.lora_A is None, "a dense matrix is merged"
        note = f"adapter {tmp_path / 'adapter'} (weight 1): merged into 3 dense and beside 18 packed matrices"
        assert note in engine.loaded.notes


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def as_gguf(model: nn.Module, adapted: nn.Module, path: Path, architecture: str, **how: object) -> Path:
    """Write PEFT's factors as llama.cpp's converter does: rows of Llama's q and k in interleaved order."""
    factors = {}
    for name, one in adapted.get_base_model().named_modules():
        if hasattr(one, "lora_A"):
            layer, leaf = re.fullmatch(r".*layers\.(\d+)\.(.+)", name).groups()
            a, b = one.lora_A["default"].weight.detach(), one.lora_B["default"].weight.detach()
            if architecture == "llama" and leaf.endswith(("q_proj", "k_proj")):
                heads = model.config.num_attention_heads if "q_proj" in leaf else model.config.num_key_value_heads
                b = b.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            factors[f"blk.{layer}.{GGUF_NAMES[leaf]}"] = a, b
    return write_gguf_adapter(path, factors, architecture, **how)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_gguf_adapter_gives_pefts_logits_with_either_kind_of_base(name: str, is_packed: bool, tmp_path: Path) -> None:
    model = packed_file(tmp_path / "model.gguf", name) if is_packed else llama_files.build(name)
    model.save_pretrained(tmp_path / "folder")
    expected = logits_of(adapted := with_peft(model, tmp_path / "adapter", r=4, lora_alpha=6))
    adapter = as_gguf(model, adapted, tmp_path / "adapter.gguf", name, alpha=6.0)
    if not is_packed:
        llama_files.write_gguf(tmp_path / "model.gguf", model, name)
    for base in ("model.gguf", "folder"):
        for one in (adapter, tmp_path / "adapter"):
            check(tmp_path / base, one, expected, close=2e-4)


def test_a_quantised_gguf_adapter_is_read(tmp_path: Path) -> None:
    model = llama_files.build("llama", hidden_size=64, intermediate_size=96)
    llama_files.write_gguf(tmp_path / "model.gguf", model, "llama")
    one = FORMATS["q8_0"]
    factors = drawn({"blk.1.ffn_up": (96, 64), "blk.1.ffn_down": (64, 96)}, rank=32)
    adapter = write_gguf_adapter(tmp_path / "a.gguf", factors, packed="q8_0")
    reference = copy.deepcopy(model)
    for name, leaf in (("blk.1.ffn_up", "up_proj"), ("blk.1.ffn_down", "down_proj")):
        a, b = (one.dequantize(one.quantize(factor), factor.shape) for factor in factors[name])
        assert not torch.equal(a, factors[name][0])
        reference.model.layers[1].mlp.get_submodule(leaf).weight.data += 8 / 32 * b @ a
    check(tmp_path / "model.gguf", adapter, logits_of(reference))


LEAVES = {"mlp.up_proj": (112, 64), "self_attn.q_proj": (96, 64)}


def llama_adapter(folder: Path, seed: int = 0, layers: Sequence[int] = (0, 2), rank: int = 4, **config: object) -> Path:
    shapes = {f"model.layers.{layer}.{leaf}": shape for layer in layers for leaf, shape in LEAVES.items()}
    return write_peft(folder, drawn(shapes, rank, seed), **config)


@pytest.mark.parametrize("quant", ["stored", "q8_0"])
def test_several_adapters_add_up_with_their_weights(quant: str, tiny_model: Tiny, tmp_path: Path) -> None:
    first, second = llama_adapter(tmp_path / "a:1"), llama_adapter(tmp_path / "c d", seed=1, layers=(0, 1), rank=3)
    tiny, logits = tiny_model("llama3"), {}
    for setting in (f"[{first}:0.5,{second}:-2]", f"[{second}:-2.0,{first}:5e-1]", f"[{first},{second}]", first):
        with engine_of(tiny.folder, f"'{setting}'", quant=quant) as engine:
            logits[setting] = engine.logits(IDS)
    weighted, swapped, plain, alone = logits.values()
    assert (weighted - swapped).abs().max() < CLOSE
    assert min((one - other).abs().max() for one, other in ((weighted, plain), (plain, alone))) > 0.1
    if quant == "stored":
        reference = copy.deepcopy(tiny.reference)
        for seed, weight, layers, rank in ((0, 0.5, (0, 2), 4), (1, -2.0, (0, 1), 3)):
            shapes = {f"model.layers.{layer}.{leaf}": shape for layer in layers for leaf, shape in LEAVES.items()}
            for name, (a, b) in drawn(shapes, rank, seed).items():
                reference.get_submodule(name).weight.data += weight * 8 / rank * b @ a
        assert (weighted - logits_of(reference)).abs().max() < CLOSE


def test_a_list_of_adapters_is_a_list_in_python(tiny_model: Tiny, tmp_path: Path) -> None:
    first, second = llama_adapter(tmp_path / "a"), llama_adapter(tmp_path / "b", seed=1)
    with engine_of(tiny_model("llama3").folder, f"[{first},{second}:0.25]") as engine:
        found = engine.logits(IDS)
        assert engine.settings.model.adapters == (str(first), f"{second}:0.25")
    with engine_of(tiny_model("llama3").folder, f"'[{first},{second}:0.25]'") as engine:
        assert torch.equal(engine.logits(IDS), found)


@pytest.mark.parametrize(
    ("source", "quant", "graph"),  # every pair
    [("disk", "stored", "eager"), ("disk", "q8_0", "auto"), ("host", "stored", "auto"), ("host", "q8_0", "eager")],
)
def test_streamed_weights_have_the_bits_of_resident_ones(
    source: str, quant: str, graph: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    if (source, quant) == ("disk", "q8_0"):
        path = tmp_path / "packed.gguf"
        packed_file(path, "llama")
        adapter, quant = write_peft(tmp_path, drawn({"model.layers.1.self_attn.q_proj": (64, 64)})), "stored"
    else:
        path, adapter = tiny_model("llama3").folder, llama_adapter(tmp_path)
    given = (f"model.adapter={adapter}", f"quant={quant}")
    with load(path, *given, streaming="off", dtype="fp32", graph=graph) as engine:
        expected = results(engine, 16)
    streamed = (*given, f"streaming.source={source}")
    with pytest.raises(PlanError) as refusal:
        load(path, *streamed, "streaming.memory_budget=1KiB", dtype="fp32", graph=graph)
    budget = int(re.search(r"context_length=256 is (\d+) bytes", str(refusal.value))[1])
    with load(path, *streamed, f"streaming.memory_budget={budget}", dtype="fp32", graph=graph) as engine:
        assert len(engine.plan.groups.streamed) >= 2
        assert differing(results(engine, 16), expected) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_merging_gives_the_same_bits_with_any_number_of_threads(threads: int, tiny_model: Tiny, tmp_path: Path) -> None:
    """Streaming threads have one each, and loading has all."""
    found = []
    for count in (threads, 1):
        with engine_of(tiny_model("llama3").folder, llama_adapter(tmp_path, rank=16), f"threads={count}") as engine:
            found.append(engine.runner.builder.decoder.layers[0].mlp.up_proj.weight.clone())
    assert torch.equal(*found)


def test_a_16_bit_weight_is_rounded_once(tiny_model: Tiny, tmp_path: Path) -> None:
    adapter = llama_adapter(tmp_path)
    with Engine.load(
        tiny_model("llama3").folder, dtype="bf16", device="cpu", overrides=[f"model.adapter={adapter}"]
    ) as engine:
        found = engine.runner.builder.decoder.layers[0].mlp.up_proj.weight
        a, b = drawn({f"model.layers.{layer}.{leaf}": shape for layer in (0, 2) for leaf, shape in LEAVES.items()})[
            "model.layers.0.mlp.up_proj"
        ]
        stored = tiny_model("llama3").reference.model.layers[0].mlp.up_proj.weight.detach()
        assert torch.equal(found, (stored + 2.0 * b @ a).bfloat16())
        assert found.dtype is torch.bfloat16


def test_a_batch_decodes_with_the_bits_of_each_request_alone(tmp_path: Path) -> None:
    packed_file(tmp_path / "model.gguf", "llama")
    shapes = {f"model.layers.{layer}.self_attn.{leaf}_proj": (64, 64) for layer in range(3) for leaf in "qo"}
    adapter = write_peft(tmp_path, drawn(shapes, rank=5))
    prompts = [IDS[0, :7].tolist(), IDS[1, :3].tolist(), IDS[0, 5:20].tolist()]
    with engine_of(tmp_path / "model.gguf", adapter, "batch_size=3", graph="auto") as engine:
        together = engine.generate(prompts, max_new_tokens=8, logprobs=True, ignore_eos=True)
        alone = [engine.generate([one], max_new_tokens=8, logprobs=True, ignore_eos=True)[0] for one in prompts]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.logprobs for one in together] == [one.logprobs for one in alone]


def test_a_gpus_kernels_run_a_packed_model_with_factors(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_programs_be_few(monkeypatch)
    monkeypatch.setattr("graphcore.engine.loading.runtime_config.find_backend", triton_backend)
    with engine_of(tiny_model("llama3").folder, llama_adapter(tmp_path), "batch_size=2", quant="q8_0") as engine:
        assert engine.runner.builder.decoder.layers[0].self_attn.q_proj.lora_A is not None
        runners, row = runners_of(engine, batch=1), IDS[0].tolist()
        found, expected = (
            torch.cat([runner.extend([row[:9]], [0]), runner.extend([[row[9]]], [9])])
            for runner in (runners.device, runners.eager)
        )
    assert (found - expected).abs().max() < CLOSE


def triton_backend(*_: object) -> tuple[object, str]:
    from graphcore.kernels.backend import TritonBackend

    return TritonBackend(), ""


def test_the_plan_counts_the_factors(tiny_model: Tiny, tmp_path: Path) -> None:
    folder, adapter = tiny_model("llama3").folder, llama_adapter(tmp_path, rank=4)
    sizes = []
    for one in ("null", adapter):
        with engine_of(folder, one, quant="q8_0") as engine:
            sizes.append(engine.plan.weight_nbytes)
    factors = sum(4 * 4 * (rows + columns) for rows, columns in LEAVES.values()) * 2  # float32, in two layers
    assert sizes[1] - sizes[0] == factors
    one, other = (
        smallest_budget(folder, "quant=q8_0", *given, streaming="auto") for given in ((f"model.adapter={adapter}",), ())
    )
    assert one - other >= factors // 2, "a streamed layer's factors are in its slot"


def test_layers_that_do_not_run_are_left_out(tiny_model: Tiny, tmp_path: Path) -> None:
    adapter, cut = llama_adapter(tmp_path), "model.num_hidden_layers=1"
    with engine_of(tiny_model("llama3").folder, adapter, cut) as engine:
        found = engine.logits(IDS)
    only_first = llama_adapter(tmp_path / "first", layers=(0,))
    first = drawn({f"model.layers.{layer}.{leaf}": shape for layer in (0, 2) for leaf, shape in LEAVES.items()})
    write_peft(only_first, {name: pair for name, pair in first.items() if ".0." in name})
    with engine_of(tiny_model("llama3").folder, only_first, cut) as engine:
        assert torch.equal(engine.logits(IDS), found)


@pytest.mark.parametrize(
    ("name", "text", "others"),
    [
        (
            "mistral3_nested",
            "model.language_model.layers.1.mlp.up_proj",
            ("model.vision_tower.layers.0.attention.q_proj",),
        ),
        ("gemma3", "layers.1.mlp.up_proj", ("vision_tower.encoder.layers.0.mlp.fc1", "multi_modal_projector.linear")),
        ("qwen3_5", "model.layers.1.mlp.up_proj", ("model.visual.blocks.0.attn.qkv", "mtp.layers.0.mlp.up_proj")),
        ("glm4_moe", "model.layers.1.self_attn.v_proj", ("model.layers.4.self_attn.q_proj", "model.layers.4.eh_proj")),
    ],
)
def test_parts_that_text_generation_does_not_use_are_left_out_of_adapters_with_a_note(
    name: str, text: str, others: tuple[str, ...], tiny_model: Tiny, tmp_path: Path
) -> None:
    found: list[torch.Tensor] = []
    shape = {"v_proj": (48, 64)}.get(text.rpartition(".")[2], (112, 64))
    used, unused = drawn({text: shape}), drawn(dict.fromkeys(others, (48, 40)))
    for case, factors in (("text", used), ("both", {**used, **unused})):
        adapter = write_peft(tmp_path / case, factors)
        with engine_of(tiny_model(name).folder, adapter) as engine:
            found.append(engine.logits(IDS))
            notes = [note for note in engine.notes if note.startswith("left out of adapter")]
    assert torch.equal(*found)
    assert notes == [
        f"left out of adapter {adapter}: {len(others)} of {1 + len(others)} matrices, which text generation does not "
        f"use: {', '.join(map(repr, sorted(others)))}"
    ]
    with engine_of(tiny_model(name).folder, write_peft(tmp_path / "none", unused)) as engine:
        assert not torch.equal(engine.logits(IDS), found[0])
        assert any(note.endswith(f": {', '.join(map(repr, sorted(others)))}") for note in engine.notes)


@pytest.mark.parametrize(
    ("module", "shape", "says"),
    [
        ("model.layers.3.mlp.up_proj", (112, 64), "'model.layers.3.mlp.up_proj', which this llama model does not have"),
        ("model.layers.0.mlp.fc1", (112, 64), "'model.layers.0.mlp.fc1', which this llama model does not have"),
        ("model.layers.0.mlp.up_proj", (112, 65), r"B \[112, 4\] and A \[4, 65\] .* matrix \[112, 64\]"),
        ("model.layers.0.mlp.up_proj", (111, 64), r"B \[111, 4\] and A \[4, 64\] .* matrix \[112, 64\]"),
        ("lm_head", (96, 64), "changes 'lm_head', the head, which adapters here cannot"),
        ("model.embed_tokens", (96, 64), "changes the embedding"),
    ],
)
def test_modules_that_are_not_the_models_are_refused_by_name(
    module: str, shape: tuple[int, int], says: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    adapter = write_peft(tmp_path, drawn({module: shape}))
    with pytest.raises(CheckpointError, match=says):
        engine_of(tiny_model("llama3").folder, adapter)


@pytest.mark.parametrize(
    ("name", "module", "shape", "says"),
    [
        ("qwen3_moe", "model.layers.0.mlp.experts.1.up_proj", (48, 64), "changes experts"),
        ("gpt2", "transformer.h.0.attn.c_attn", (5 * 64, 64), r"B \[320, 4\] .* matrix \[192, 64\]"),
        ("gemma4", "model.per_layer_model_projection", (84, 64), "whose form here has no low-rank factors"),
    ],
)
def test_matrices_that_adapters_cannot_change_are_refused_by_name(
    name: str, module: str, shape: tuple[int, int], says: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=says):
        engine_of(tiny_model(name).folder, write_peft(tmp_path, drawn({module: shape})))


def test_projections_that_round_their_input_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = save_ternary("bitnet", "autobitlinear", 3, tmp_path / "model")
    adapter = write_peft(tmp_path / "adapter", drawn({"model.layers.0.mlp.up_proj": (112, 64)}))
    with pytest.raises(UnsupportedError, match=r"rounds its input to int8 \(BitNet\)"):
        engine_of(model.folder, adapter)


def test_an_adapter_of_another_architecture_is_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    adapter = write_gguf_adapter(tmp_path / "a.gguf", drawn({"blk.0.ffn_up": (112, 64)}), "qwen3")
    with pytest.raises(UnsupportedError, match=r"is an adapter of a 'qwen3' model, and this one is llama \(llama\)"):
        engine_of(tiny_model("llama3").folder, adapter)


@pytest.mark.parametrize("quant", ["stored", "q8_0"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_nan_and_infinity_are_refused(which: int, value: float, quant: str, tiny_model: Tiny, tmp_path: Path) -> None:
    factors = drawn({"model.layers.0.mlp.up_proj": (112, 64)})
    factors["model.layers.0.mlp.up_proj"][which][1, 1] = value
    with pytest.raises(CheckpointError, match=rf"up_proj\.lora_{'AB'[which]}\.weight' holds NaN or infinity"):
        engine_of(tiny_model("llama3").folder, write_peft(tmp_path, factors), quant=quant)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("absent", "absent: no such file"),
        ("absent:0.5", "absent: no such file"),
        ("hf:org/name", "adapters are read from this machine; download it first"),
        ("{path}:nan", "the weight nan is not finite"),
        ("[{path},]", "is empty; name a path"),
        ("[]", "is empty; name a path"),
        ("5", "is no path, nor a list of paths"),
    ],
)
def test_settings_that_name_no_adapter_are_refused(setting: str, says: str, tiny_model: Tiny, tmp_path: Path) -> None:
    adapter = setting.format(path=llama_adapter(tmp_path))
    with pytest.raises((CheckpointError, ConfigError), match=says):
        engine_of(tiny_model("llama3").folder, adapter if setting == "5" else f"'{adapter}'")


def test_the_fallback_is_refused_with_an_adapter(tiny_model: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.adapter=.* has no effect with model\.fallback=transformers"):
        engine_of(tiny_model("llama3").folder, llama_adapter(tmp_path), "model.fallback=transformers")


def test_a_saved_cache_belongs_to_its_adapter_and_weight(tiny_model: Tiny, tmp_path: Path) -> None:
    folder, file = tiny_model("llama3").folder, tmp_path / "prompt.cache"
    first, second = llama_adapter(tmp_path / "first"), llama_adapter(tmp_path / "second", seed=1)
    scaled = llama_adapter(tmp_path / "scaled", lora_alpha=9)
    prompt = IDS[0].tolist()
    with engine_of(folder, f"'{first}:0.5'") as engine:
        engine.save_cache(prompt, file)
    with engine_of(folder, f"'{first}:0.5'") as engine:
        assert engine.load_cache(file) >= 16
    for other in ("null", first, f"{second}:0.5", f"{scaled}:0.5"):
        with (
            engine_of(folder, f"'{other}'" if other != "null" else other) as engine,
            pytest.raises(ConfigError, match=r"belongs to other weights, of .* with adapter .*first:0\.5"),
        ):
            engine.load_cache(file)


def packed_by_task(base: Path, adapter: Path, output: Path, asked: str = "stored") -> None:
    settings = compose_settings([f"model.checkpoint={base}", f"model.adapter={adapter}"])
    model = open_model(settings.model, 0, output.parent / "cache", lambda *_: None)
    assert len(list(Packer(model, asked).pack(output, lambda *_: None))) > 20


@pytest.mark.parametrize("name", ["llama3", "gpt2", "qwen2"])
def test_packing_merges_an_adapter_into_a_dense_model(name: str, tiny_model: Tiny, tmp_path: Path) -> None:
    """Into a file of transformers' tensors, and then into that GGUF file again."""
    tiny = tiny_model(name)
    expected = logits_of(with_peft(tiny.reference, tmp_path / "adapter", r=4, lora_alpha=6))
    packed_by_task(tiny.folder, tmp_path / "adapter", tmp_path / "merged.gguf")
    check(tmp_path / "merged.gguf", "null", expected, close=1e-4)
    plain = compose_settings([f"model.checkpoint={tiny.folder}"])
    model = open_model(plain.model, 0, tmp_path / "cache", lambda *_: None)
    list(Packer(model, "stored").pack(tmp_path / "plain.gguf", lambda *_: None))
    packed_by_task(tmp_path / "plain.gguf", tmp_path / "adapter", tmp_path / "again.gguf")
    check(tmp_path / "again.gguf", "null", expected, close=1e-4)


def test_packing_merges_before_it_quantises(tiny_model: Tiny, tmp_path: Path) -> None:
    adapter = llama_adapter(tmp_path)
    packed_by_task(tiny_model("llama3").folder, adapter, tmp_path / "q8_0.gguf", "q8_0")
    with engine_of(tiny_model("llama3").folder, adapter) as engine:
        exact = engine.logits(IDS)
    with engine_of(tmp_path / "q8_0.gguf", "null") as engine:
        assert 0 < (engine.logits(IDS) - exact).abs().mean() < 0.05


def test_an_adapter_is_not_merged_into_packed_matrices(tmp_path: Path) -> None:
    packed_file(tmp_path / "model.gguf", "llama")
    adapter = write_peft(tmp_path, drawn({"model.layers.0.self_attn.q_proj": (64, 64)}))
    with pytest.raises(UnsupportedError, match=r"q_proj\.weight is q4_0, and an adapter is merged into dense"):
        packed_by_task(tmp_path / "model.gguf", adapter, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.slow
@pytest.mark.parametrize("base", ["folder", "model.gguf"])
def test_the_command_compares_an_adapted_model_with_transformers(base: str, tmp_path: Path) -> None:
    """In task=verify transformers' model has merged weights; llama.cpp, which would run the file alone, is left out."""
    model = packed_file(tmp_path / "model.gguf", "llama")
    model.save_pretrained(tmp_path / "folder")
    shapes = {f"model.layers.{layer}.self_attn.{leaf}_proj": (64, 64) for layer in range(3) for leaf in "qo"}
    adapter = write_peft(tmp_path / "my adapter, new", drawn(shapes, rank=5))
    record = run_task(
        tmp_path,
        f"model.checkpoint={tmp_path / base}",
        f"model.adapter={adapter}",
        "task=verify",
        "dtype=fp32",
        "task.tolerance=1e-3",
    )
    assert record["status"] == "ok"
    assert record["llama_cpp"] is None


def run_task(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the command as a shell would, and return its result.json."""
    place = folder / "run"
    done = graphcore(*arguments, "device=cpu", f"hydra.run.dir={place}", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "llama-cpp-python" not in done.stderr, "the file has no adapter"
    return json.loads((place / "result.json").read_text())


def test_the_command_plans_with_the_factors(tmp_path: Path) -> None:
    packed_file(tmp_path / "model.gguf", "llama")
    adapter = write_peft(tmp_path, drawn({"model.layers.0.self_attn.q_proj": (64, 64)}, rank=3))
    given = f"model.checkpoint={tmp_path / 'model.gguf'}", "task=plan", "dtype=fp32"
    plain = run_task(tmp_path, *given)["memory"]["weight_bytes"]
    assert run_task(tmp_path, *given, f"model.adapter={adapter}")["memory"]["weight_bytes"] - plain == 2 * 3 * 64 * 4


def test_a_module_under_two_names_is_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    tiny = tiny_model("llama3")
    weight = tiny.reference.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    names = ("model.layers.0.self_attn.q_proj", "layers.0.self_attn.q_proj")
    adapter = write_peft(tmp_path / "adapter", drawn({name: tuple(weight.shape) for name in names}))
    with pytest.raises(CheckpointError, match=r"changes '.*q_proj' twice, under two names"):
        engine_of(tiny.folder, adapter)


def test_weights_beyond_float32_are_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    tiny = tiny_model("llama3")
    weight = tiny.reference.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    adapter = write_peft(tmp_path / "adapter", drawn({"model.layers.0.self_attn.q_proj": tuple(weight.shape)}))
    with pytest.raises(CheckpointError, match="is beyond float32; check lora_alpha"):
        engine_of(tiny.folder, f"{adapter}:1e39")


@pytest.mark.parametrize(
    ("setting", "says"), [("x" * 300 + ":0.5", "model.adapter=x"), ("hf:org/name:0.5", "download it")]
)
def test_paths_that_no_file_can_have_are_named(setting: str, says: str, tiny_model: Tiny) -> None:
    with pytest.raises((ConfigError, CheckpointError, CheckpointNotFoundError), match=says):
        engine_of(tiny_model("llama3").folder, setting)
