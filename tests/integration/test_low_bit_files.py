"""Files whose matrices have one to three bits a weight, and others beside them, answer as transformers does."""

from pathlib import Path

import gguf
import pytest
import torch
from support.fake_cuda import Driver
from support.files import llama_files
from support.files.low_bit_files import FILES, IDS, LEVELS, SHAPES, low_bit_file, low_bit_mixture
from support.packed_matrices import native_kernels
from support.queues import simulated
from support.streaming import runs_as

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.export.pack import Packer
from graphcore.kernels.backend import TritonBackend
from graphcore.progress import ignore_progress
from graphcore.streaming import weight_stream
from graphcore.streaming.device.stream import DeviceLink
from graphcore.streaming.pinned_memory import Pins

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("small_parts")]

GRAPHS = tuple(enumerate(("eager", "auto")))
FEW_EXPERTS = ("streaming.source=disk", "streaming.expert_cache=400KB")  # of 1 to 2 MB


@pytest.mark.parametrize(
    ("name", "shape", "graph"),
    [
        # each file in each graph and in each shape
        *((name, SHAPES[(at + turn) % 2], graph) for at, name in enumerate(FILES) for turn, graph in GRAPHS),
        *(pytest.param(name, shape, "compiled", marks=pytest.mark.slow) for name in FILES for shape in SHAPES),
    ],
)
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


@pytest.mark.parametrize(
    ("name", "is_fused", "graph"),
    [
        (name, (at + turn) % 2 == 1, graph)
        for at, name in enumerate(("iq1_m", "iq2_xxs", "iq3_s"))
        for turn, graph in GRAPHS
    ],
)
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


def file_nbytes_of(path: Path, layer: int) -> int:
    """Return the bytes of a layer's matrices in a file."""
    stored = gguf.GGUFReader(path).tensors
    return sum(int(one.n_bytes) for one in stored if one.name.startswith(f"blk.{layer}.") and len(one.shape) == 2)


# A simulated device's ways; what makes the planes knows nothing of them, so each file meets the kernel in one way, one
# of them in CI: tests of the kernel compare each format's planes.
WAYS = (("disk", None), ("host", 1 << 40), ("host", 0), ("disk", 1 << 40), ("host", 10**6), ("host", None))


@pytest.mark.parametrize(
    ("name", "source", "quota", "is_interpreted"),
    [
        *(
            pytest.param(name, *WAYS[at % 3], True, marks=() if name == "iq2_xxs" else pytest.mark.slow)
            for at, name in enumerate(FILES)
        ),
        *((tuple(FILES)[at % len(FILES)], *way, False) for at, way in enumerate(WAYS)),
    ],
)
def test_the_file_s_bytes_cross_the_link_and_slots_hold_the_planes_of_resident_weights(
    name: str, source: str, quota: int | None, is_interpreted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulated device makes the planes: as the CPU does, or by a GPU's kernel in Triton's interpreter.

    The store is locked, in part, or not; a million bytes are the ring of host slots and a group. Some rows of a llama's
    file are put into another order on the way.
    """
    family = "llama" if name == "iq2" else "qwen2"
    _, path = low_bit_file(tmp_path / "model.gguf", FILES[name], SHAPES[0], 7, family)
    backend = TritonBackend(native_kernels())
    monkeypatch.setattr("graphcore.engine.loading.runtime_config.find_backend", lambda *_: (backend, ""))
    load = {"dtype": "fp32", "device": "cpu", "graph": "eager"}
    with Engine.load(path, overrides=["prefill_chunk=8"], **load) as engine:
        expected = engine.logits(IDS.tolist())
        planned = engine.plan.groups.group_nbytes
    queues = simulated(len(name))
    pins = None if quota is None else Pins(Driver(quota))
    monkeypatch.setattr(weight_stream, "link_opener", lambda _device, _pinned: lambda: DeviceLink(queues, pins))
    if is_interpreted:
        if torch.cuda.is_available():
            pytest.skip("kernels are not interpreted where there is a GPU: tests/cuda runs them there")
        from graphcore.kernels.gpu.packed.level_planes import launch_write_planes

        monkeypatch.setattr("graphcore.kernels.gpu.device_packing.write_planes", launch_write_planes)
    overrides = [f"streaming.source={source}", "streaming.layer_group_size=1", "prefill_chunk=8"]
    with Engine.load(path, streaming="on", overrides=overrides, **load) as engine:
        groups, stream = engine.plan.groups, engine.loaded.weight_stream
        assert torch.equal(engine.logits(IDS.tolist()), expected)
        assert torch.equal(engine.logits(IDS.tolist()), expected)
        held = groups.streamed_nbytes + groups.group_nbytes[0] if source == "host" else 0
        assert held - 256 < stream.host_nbytes <= held  # a table is not padded
        arrived = {target.nbytes for _, target in queues.copied}
    assert groups.group_nbytes == planned
    assert len(groups.on_link) == 2
    for layer, (on_link, slot) in enumerate(zip(groups.on_link, groups.group_nbytes[1:3], strict=True)):
        assert on_link == pytest.approx(file_nbytes_of(path, layer), rel=0.03)  # planes of q4_k and q5_k have 3 % more
        assert on_link < 0.95 * slot
    assert groups.arrival_nbytes == max(groups.on_link)
    assert {*groups.on_link} <= arrived
    assert max(arrived) == groups.host_slot_nbytes


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
