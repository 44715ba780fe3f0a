"""Files whose matrices have one to three bits a weight, and others beside them, answer as transformers does."""

from pathlib import Path

import gguf
import llama_files
import pytest
import torch
from low_bit_files import FILES, IDS, LEVELS, SHAPES, low_bit_file, low_bit_mixture
from packed_matrices import native_kernels
from streamed_engine import runs_as

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.export.pack import Packer
from graphcore.kernels.backend import TritonBackend
from graphcore.progress import ignore_progress

FEW_EXPERTS = ("streaming.source=disk", "streaming.expert_cache=400KB")  # of 1 to 2 MB


@pytest.mark.parametrize("graph", ["eager", "auto", pytest.param("compiled", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("shape", SHAPES, ids=["256", "512"])
@pytest.mark.parametrize("name", FILES)
def test_a_mixed_file_answers_as_transformers_does(
    name: str, shape: dict[str, int], graph: str, tmp_path: Path
) -> None:
    model, path = low_bit_file(tmp_path / "model.gguf", FILES[name], shape, seed=len(name))
    expected = model(input_ids=IDS, use_cache=False).logits
    overrides = ["quant.activations=float"] if graph != "auto" else []
    with Engine.load(path, dtype="fp32", device="cpu", graph=graph, overrides=overrides) as engine:
        assert runs_as(engine, graph)
        found = engine.logits(IDS.tolist())
        assert (found - expected).abs().max() < 2e-4 * expected.abs().max()
        prompt = IDS[0].tolist()
        tokens = engine.generate(prompt, max_new_tokens=6, ignore_eos=True)[0].token_ids
    whole = model(input_ids=torch.tensor([prompt + list(tokens)]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = whole.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (whole.max(1).values - chosen).max() < 0.02 * whole.abs().max(), "a token far from the best"


@pytest.mark.parametrize("name", FILES)
def test_a_streamed_file_answers_to_the_bit(name: str, tmp_path: Path) -> None:
    _, path = low_bit_file(tmp_path / "model.gguf", FILES[name], SHAPES[0], seed=7)
    with Engine.load(path, device="cpu") as engine:
        expected = engine.logits(IDS.tolist())
        answer = engine.generate(IDS[0].tolist(), max_new_tokens=8, ignore_eos=True)[0].token_ids
    options = ["streaming.source=disk", "streaming.prefetch=1"]
    with Engine.load(path, device="cpu", streaming="on", overrides=options) as engine:
        assert engine.plan.is_streaming
        jobs = [job for each in engine.loaded.weight_stream.jobs.values() for job in each]
        assert sum(job.nbytes for job in jobs) == pytest.approx(engine.plan.groups.streamed_nbytes, rel=1e-3)
        assert torch.equal(engine.logits(IDS.tolist()), expected)
        assert engine.generate(IDS[0].tolist(), max_new_tokens=8, ignore_eos=True)[0].token_ids == answer


@pytest.mark.parametrize("graph", ["eager", "auto"])
@pytest.mark.parametrize("is_fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("name", ["iq1_m", "iq2_xxs", "iq3_s"])
def test_a_mixture_answers_as_transformers_does_and_streams_to_the_bit(
    name: str, is_fused: bool, graph: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    model = low_bit_mixture(path, name, is_fused)
    expected = model(input_ids=IDS, use_cache=False).logits
    answers = []
    for streaming in ("off", "on"):
        options = ["quant.activations=float"] if streaming == "off" else ["quant.activations=float", *FEW_EXPERTS]
        with Engine.load(
            path, dtype="fp32", device="cpu", graph=graph, streaming=streaming, overrides=options
        ) as engine:
            assert runs_as(engine, graph)
            found = engine.logits(IDS.tolist())
            answers.append((found, engine.generate(IDS[0].tolist(), max_new_tokens=6, ignore_eos=True)[0].token_ids))
        assert (found - expected).abs().max() < 2e-4 * expected.abs().max()
    assert torch.equal(answers[0][0], answers[1][0])
    assert answers[0][1] == answers[1][1]


@pytest.mark.parametrize("name", FILES)
def test_planes_that_stream_are_those_that_stay(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes as a GPU holds them, made in C++ by the threads that read, give the weights of the file's own blocks."""
    model, path = low_bit_file(tmp_path / "model.gguf", FILES[name], SHAPES[0], seed=7)
    backend = TritonBackend(native_kernels())
    monkeypatch.setattr("graphcore.engine.loading.runtime_config.find_backend", lambda *_: (backend, ""))
    found = []
    for way, options in (("off", []), ("on", ["streaming.source=disk"])):
        with Engine.load(path, dtype="fp32", device="cpu", graph="eager", streaming=way, overrides=options) as engine:
            found.append(engine.logits(IDS.tolist()))
    assert torch.equal(*found)
    expected = model(input_ids=IDS, use_cache=False).logits
    assert (found[0] - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_file_takes_no_more_memory_than_its_codes(name: str, tmp_path: Path) -> None:
    """Three or four bits a weight and its scales, never dense weights."""
    _, path = low_bit_file(tmp_path / "model.gguf", [name], SHAPES[1], seed=3)
    with Engine.load(path, device="cpu") as engine:
        weights = sum(
            p.numel() for p in llama_files.build("qwen2", num_hidden_layers=2, vocab_size=96, **SHAPES[1]).parameters()
        )
        bits = 8 * engine.plan.weight_nbytes / weights
    assert bits < (3.5 if name in LEVELS[:5] else 4.5)


def test_rows_that_llama_cpp_has_put_into_another_order_are_put_back(tmp_path: Path) -> None:
    model, path = low_bit_file(tmp_path / "model.gguf", FILES["iq2_xxs"], SHAPES[0], 5, "llama")
    expected = model(input_ids=IDS, use_cache=False).logits
    with Engine.load(path, dtype="fp32", device="cpu", overrides="quant.activations=float") as engine:
        assert (engine.logits(IDS.tolist()) - expected).abs().max() < 2e-4 * expected.abs().max()


def test_packing_keeps_the_bytes_that_are_stored(tmp_path: Path) -> None:
    _, path = low_bit_file(tmp_path / "model.gguf", LEVELS, SHAPES[0], seed=9)
    settings = compose_settings([f"model.checkpoint={path}"])
    source = open_model(settings.model, 0, tmp_path / "cache", ignore_progress)
    list(Packer(source, "stored").pack(tmp_path / "packed.gguf", ignore_progress))
    before, after = (
        {one.name: one for one in gguf.GGUFReader(one).tensors} for one in (path, tmp_path / "packed.gguf")
    )
    kinds = {one.tensor_type.name.lower() for one in after.values()}
    assert set(LEVELS) <= kinds
    for name, tensor in before.items():
        assert (after[name].data == tensor.data).all(), name
