"""Folders of GPTQ's and compressed-tensors' weights with act-order answer as transformers does with the same values."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.files import llama_files
from support.files.integer_files import SHAPE, gptq, integers, save_mixture, save_model
from support.gpu_kernels import let_programs_be_few, runners_of
from support.streaming import runs_as
from support.tiny_models import BUILDERS
from torch import Tensor

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import match_model
from graphcore.errors import CheckpointError, GraphcoreError, UnsupportedError
from graphcore.export.pack import PackedTensor, Packer
from graphcore.graph.gpu.kernel_obstacles import device_obstacle
from graphcore.kernels.backend import TorchBackend, TritonBackend
from graphcore.nn.attention import Attention
from graphcore.nn.linear import Linear
from graphcore.progress import ignore_progress
from graphcore.tasks.reference.transformers_model import from_weights

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("small_parts")]

IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 46]]
FLOAT = ["quant.activations=float"]
ALL = ("_proj", "in_proj_qkv")
CASES = [("gptq", 4), ("gptq", 8), ("gptq_v2", 4), ("pack-quantized", 4), ("pack-quantized", 8)]
CPU = {"device": "cpu", "dtype": "fp32"}
LAYOUTS, GRAPHS = ("gptq", "pack-quantized"), tuple(enumerate(("eager", "auto")))
SOME = ("k_proj", "layers.1.mlp.gate_proj", "layers.0.mlp.down_proj")
MODELS = (("llama", ALL), ("qwen2", ALL), ("llama", SOME))


def largest_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected.detach()).abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize(("layout", "bits"), CASES)
def test_logits_are_those_of_the_same_weights_in_transformers(layout: str, bits: int, tmp_path: Path) -> None:
    model = save_model(tmp_path, layout, bits, 32, ordered=ALL)
    expected = model(input_ids=torch.tensor(IDS), use_cache=False).logits
    with Engine.load(tmp_path, graph="eager", overrides=FLOAT, **CPU) as engine:
        assert largest_error(engine.logits(IDS), expected) < 2e-5
        weights = [module for module in engine.runner.builder.decoder.modules() if getattr(module, "packing", None)]
        assert {one.packing.format for one in weights} == {"q4_0" if bits == 4 else "q8_0"}


@pytest.mark.parametrize(
    ("layout", "graph", "family", "ordered"),
    [
        # each model in each graph and from each layout
        *((LAYOUTS[(at + turn) % 2], graph, *model) for at, model in enumerate(MODELS) for turn, graph in GRAPHS),
        *(pytest.param(layout, "compiled", *model, marks=pytest.mark.slow) for layout in LAYOUTS for model in MODELS),
    ],
    ids=str,
)
def test_every_graph_streams_to_the_bit_and_answers_as_transformers_does(
    layout: str, graph: str, family: str, ordered: tuple[str, ...], tmp_path: Path
) -> None:
    """Of some layers, which are of one spec otherwise, some projections have an order."""
    model = save_model(tmp_path, layout, 4, 32, torch.bfloat16, llama_files.build(family, 3, **SHAPE), ordered)
    expected = model.generate(torch.tensor(IDS), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    logits = model(input_ids=expected, use_cache=False).logits
    found = []
    for options in ([], ["streaming.source=disk"], ["streaming.source=host"]):
        way = "on" if options else "off"
        with Engine.load(tmp_path, graph=graph, streaming=way, overrides=[*FLOAT, *options], **CPU) as engine:
            assert runs_as(engine, graph)
            assert engine.plan.is_streaming == (way == "on")
            found.append(engine.logits(IDS))
            (answer,) = engine.generate(IDS[0], max_new_tokens=8, ignore_eos=True)
            assert list(answer.token_ids) == expected[0, 20:].tolist()
    assert largest_error(found[0], logits[:, :20]) < 2e-5
    assert all(torch.equal(found[0], one) for one in found[1:])


@pytest.mark.parametrize("graph", ["eager", "auto"])
def test_a_batch_answers_as_each_prompt_does_alone(graph: str, tmp_path: Path) -> None:
    save_model(tmp_path, "gptq", 4, 32, ordered=ALL)
    prompts = [IDS[0], IDS[0][3:9], [7], IDS[0][::-1]]
    with Engine.load(tmp_path, graph=graph, overrides=["batch_size=4"], **CPU) as engine:
        assert runs_as(engine, graph)
        together = engine.generate(prompts, max_new_tokens=12, ignore_eos=True, logprobs=True)
        alone = [engine.generate(one, max_new_tokens=12, ignore_eos=True, logprobs=True)[0] for one in prompts]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.logprobs for one in together] == [one.logprobs for one in alone]


@pytest.mark.parametrize("ordered", [ALL, SOME], ids=str)
def test_a_gpu_program_gives_the_logits_of_transformers(
    ordered: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode kernels run in Triton's interpreter, on weights in the layout of a GPU."""
    let_programs_be_few(monkeypatch)
    monkeypatch.setattr("graphcore.engine.loading.runtime_config.find_backend", lambda *_: (TritonBackend(), ""))
    model = save_model(tmp_path, "gptq", 4, 32, ordered=ordered)
    expected = model(input_ids=torch.tensor(IDS), use_cache=False).logits[0, -1:]
    with Engine.load(tmp_path, graph="eager", overrides=FLOAT, **CPU) as engine:
        assert device_obstacle(engine.runner.builder.decoder, 1) is None
        runner = runners_of(engine, batch=1).device
        runner.extend([IDS[0][:-1]], [0])
        assert largest_error(runner.extend([IDS[0][-1:]], [19]), expected) < 2e-5


def test_weights_unpacked_at_load_have_the_order_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path, "gptq", 4, 32, ordered=ALL)
    expected = model(input_ids=torch.tensor(IDS), use_cache=False).logits
    monkeypatch.setattr("graphcore.engine.loading.runtime_config.find_backend", lambda *_: (TorchBackend(), ""))
    with Engine.load(tmp_path, graph="eager", **CPU) as engine:
        linears = [one for one in engine.runner.builder.decoder.modules() if isinstance(one, Linear)]
        assert all(one.packing is None for one in linears)
        assert sum(one.input_order is not None for one in linears) == 14
        assert largest_error(engine.logits(IDS), expected) < 2e-5


@pytest.mark.parametrize("graph", ["eager", "auto"])
def test_parts_of_rows_share_the_order_of_the_stored_weight(graph: str, tmp_path: Path) -> None:
    """Qwen 3.5 stores each head's query and gate side by side, and both are projections of their own here."""
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    model = save_model(tmp_path, "gptq", 4, 32, model=BUILDERS["qwen3_5"](**sizes), ordered=ALL)
    expected = model.generate(torch.tensor(IDS), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    with Engine.load(tmp_path, graph=graph, overrides=FLOAT, **CPU) as engine:
        assert runs_as(engine, graph)
        attention = next(one for one in engine.runner.builder.decoder.modules() if isinstance(one, Attention))
        assert torch.equal(attention.q_proj.input_order, attention.gate_proj.input_order)
        assert largest_error(engine.logits(IDS), model(input_ids=torch.tensor(IDS)).logits) < 2e-5
        (answer,) = engine.generate(IDS[0], max_new_tokens=4, ignore_eos=True)
        assert list(answer.token_ids) == expected[0, 20:].tolist()


def test_desc_act_with_the_usual_groups_is_read(tmp_path: Path) -> None:
    model = save_model(tmp_path, "gptq", 4, 32)
    state(tmp_path, desc_act=True)
    with Engine.load(tmp_path, graph="eager", overrides=FLOAT, **CPU) as engine:
        found = engine.logits(IDS)
    assert largest_error(found, model(input_ids=torch.tensor(IDS), use_cache=False).logits) < 2e-5


def state(folder: Path, **changes: object) -> None:
    stated = json.loads((folder / "config.json").read_text())
    stated["quantization_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(stated))


def pack(folder: Path, path: Path, asked: str) -> list[PackedTensor]:
    settings = compose_settings([f"model.checkpoint={folder}"])
    source = open_model(settings.model, 0, folder / "cache", ignore_progress)
    return list(Packer(source, asked).pack(path, ignore_progress))


def test_a_file_packed_from_the_values_has_the_usual_order(tmp_path: Path) -> None:
    model = save_model(tmp_path / "folder", "gptq", 4, 32, ordered=ALL)
    packed = {one.entry.name: one.error for one in pack(tmp_path / "folder", tmp_path / "packed.gguf", "q8_0")}
    assert not any("order" in name for name in packed)
    stored = {one.name: one for one in gguf.GGUFReader(tmp_path / "packed.gguf").tensors}
    down = stored["blk.1.ffn_down.weight"]
    weights = torch.from_numpy(gguf.quants.dequantize(down.data, down.tensor_type))
    expected = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    assert (weights - expected).norm() / expected.norm() == pytest.approx(packed["blk.1.ffn_down.weight"], rel=0.05)
    assert packed["blk.1.ffn_down.weight"] < 0.01


def test_a_file_of_the_stored_types_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "folder", "gptq", 4, 32, ordered=ALL)
    with pytest.raises(UnsupportedError, match=r"q_proj.weight' have an order .* no GGUF type has.*quant=q8_0"):
        pack(tmp_path / "folder", tmp_path / "packed.gguf", "stored")
    assert not (tmp_path / "packed.gguf").exists()


def with_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    rows, columns = tensors.pop("lm_head.weight").shape
    head = gptq(integers(rows, columns, 4, 32, torch.float16, 5, is_ordered=True), 4)
    save_file(tensors | {f"lm_head.{suffix}": one for suffix, one in head.items()}, folder / "model.safetensors")


def with_groups(change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.g_idx"
        save_file(tensors | {name: change(tensors[name])}, folder / "model.safetensors")

    return changed


NUMBERS = r"up_proj.g_idx' must have the numbers 0 to 1, each for 32 of 64 columns; fetch the checkpoint again"
BROKEN: list[tuple[str, Callable[[Path], None], type[GraphcoreError], str]] = [
    ("too_large", with_groups(lambda groups: groups + 1), CheckpointError, NUMBERS),
    ("negative", with_groups(lambda groups: groups - 1), CheckpointError, NUMBERS),
    ("uneven", with_groups(lambda groups: groups.where(torch.arange(64) != 7, 1 - groups)), CheckpointError, NUMBERS),
    ("huge", with_groups(lambda groups: groups.where(torch.arange(64) != 7, 2**31 - 1)), CheckpointError, NUMBERS),
    ("long", with_groups(lambda groups: torch.cat((groups, groups[:1] + 9))), CheckpointError, NUMBERS),
    ("short", with_groups(lambda groups: groups[:32].clone()), CheckpointError, NUMBERS),
    ("floats", with_groups(lambda groups: groups.float()), CheckpointError, "are no gptq weight; fetch the checkpoint"),
    ("unstated", lambda folder: state(folder, desc_act=False), CheckpointError, "set desc_act to true there, or fetch"),
    ("head", with_head, UnsupportedError, "of lm_head have an order .* only for projections of layers; use a checkp"),
]


@pytest.mark.parametrize(("_case", "change", "error", "message"), BROKEN, ids=[one[0] for one in BROKEN])
def test_what_is_wrong_is_said_on_one_line(
    _case: str, change: Callable[[Path], None], error: type[GraphcoreError], message: str, tmp_path: Path
) -> None:
    save_model(tmp_path, "gptq", 4, 32, ordered=ALL)
    change(tmp_path)
    with pytest.raises(error, match=message) as refusal:
        Engine.load(tmp_path, graph="eager", **CPU)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("layout", ["gptq", "pack-quantized"])
def test_experts_with_an_order_are_refused_by_name(layout: str, tmp_path: Path) -> None:
    save_mixture(tmp_path, layout, 4, 32, ordered=ALL)
    with pytest.raises(UnsupportedError, match=r"experts\.0\.\w+_proj' have an order .* not supported for experts"):
        Engine.load(tmp_path, graph="eager", **CPU)


def test_the_comparison_with_transformers_undoes_the_order(tmp_path: Path) -> None:
    model = save_model(tmp_path, "gptq", 4, 32, ordered=ALL)
    settings = compose_settings([f"model.checkpoint={tmp_path}"])
    source = open_model(settings.model, 0, tmp_path / "cache", ignore_progress)
    _, loader = match_model(source, torch.float32)
    built = from_weights(source.config, loader)
    expected = model.state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in built.named_parameters())
