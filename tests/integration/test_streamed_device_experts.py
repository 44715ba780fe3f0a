"""Packed experts through a GPU's kernels, in the interpreter: in slots, mapped or fetched, a step gives resident bits.

The device is simulated: its queues are, and it is the CPU that computes. Planes, kernels and slots are a GPU's.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from support.files.gpt_oss_files import save_mxfp4
from support.files.qwen_moe_files import build, write_gguf
from support.gpu_kernels import let_programs_be_few
from support.queues import SimulatedQueues
from torch import Tensor

from graphcore import Engine
from graphcore.engine.loading import decoder_loader
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph.gpu.kernel_decode import DeviceBlocks
from graphcore.kernels.backend import TritonBackend
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.ops.expert_slots import CALLS, IN_PLACE
from graphcore.streaming import weight_stream
from graphcore.streaming.device.stream import DeviceLink
from graphcore.streaming.pinned_memory import Pins

pytestmark = pytest.mark.thorough

PROMPT, MORE = [3, 14, 15, 9, 26, 5, 35, 8, 9, 79], [32, 38]  # more than eight tokens, then one by one
SIZES = ("context_length=32", "prefill_chunk=16", "model.num_hidden_layers=2")
WAYS = {
    "in slots": ("streaming.source=host", "streaming.expert_cache={three}"),
    "mapped": ("streaming.source=host", "streaming.expert_cache=0"),
    "fetched": ("streaming.source=host", "streaming.expert_cache=0", "streaming.pinned_memory=false"),
    "fetched from files": ("streaming.source=disk", "streaming.expert_cache=0"),
}


class Driver:
    """Locks whatever it is asked to."""

    def register(self, address: int, nbytes: int) -> str:
        return ""

    def unregister(self, address: int) -> None:
        return None

    def device_address(self, address: int) -> int | None:
        return address


@pytest.fixture(scope="module", params=["gpt-oss mxfp4", "qwen q4_0"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of clamped experts with biases, or of plain ones without."""
    made = tmp_path_factory.mktemp("packed")
    if request.param == "gpt-oss mxfp4":
        save_mxfp4(made, 1)
        return made
    model = build(1, moe_intermediate_size=64)
    return write_gguf(made / "model.gguf", model, GGMLQuantizationType.Q4_0, is_fused=False)


@contextmanager
def engine_of(monkeypatch: pytest.MonkeyPatch, folder: Path, streaming: str, *overrides: str) -> Iterator[Engine]:
    """Load the model as for a GPU, but on this one: planes for its kernels, and decode steps through them."""
    is_locking = "streaming.pinned_memory=false" not in overrides
    queues = SimulatedQueues(random.Random(0), computes_at_once=True)

    with monkeypatch.context() as patch:
        let_programs_be_few(patch)
        patch.setattr("graphcore.engine.loading.runtime_config.find_backend", lambda *_: (TritonBackend(), ""))
        patch.setattr(
            weight_stream,
            "link_opener",
            lambda _device, _pinned: lambda: DeviceLink(queues, Pins(Driver()) if is_locking else None),
        )
        patch.setattr(
            decoder_loader, "_decode_kernels", lambda choices, caches: DeviceBlocks.allocate(caches, choices.device)
        )
        patch.setattr(
            PreparedDecoder, "has_device_readable_experts", lambda _self, _s, tier: tier.kind == "host" and is_locking
        )
        load: Callable[..., Engine] = Engine.load
        with load(
            folder, "bf16", streaming=streaming, graph="eager", device="cpu", overrides=[*SIZES, *overrides]
        ) as one:
            yield one


@torch.inference_mode()
def logits_of(engine: Engine) -> Tensor:
    """Return the logits after a prompt and after each of some more tokens."""
    assert isinstance(engine.runner, ProgramRunner)
    steps = [engine.runner.extend([PROMPT], [0])]
    steps += [engine.runner.extend([[token]], [len(PROMPT) + at]) for at, token in enumerate(MORE)]
    return torch.cat(steps)


@pytest.fixture(scope="module")
def resident(folder: Path) -> Tensor:
    with pytest.MonkeyPatch.context() as patch, engine_of(patch, folder, "off") as engine:
        experts = engine.runner.builder.decoder.layers[0].mlp.experts
        assert isinstance(experts.up_proj.packing, DevicePacking)
        return logits_of(engine)


def test_resident_experts_give_what_the_cpu_s_own_kernels_do(folder: Path, resident: Tensor) -> None:
    with Engine.load(folder, "bf16", graph="eager", device="cpu", overrides=[*SIZES]) as engine:
        expected = logits_of(engine)
    assert (resident - expected).abs().max() < 0.05 * expected.abs().max()  # bf16 rounds in other places


@pytest.mark.parametrize("way", WAYS)
def test_experts_that_do_not_stay_give_resident_bits(
    monkeypatch: pytest.MonkeyPatch, folder: Path, resident: Tensor, way: str
) -> None:
    asked = [one.format(three=three_slots(monkeypatch, folder)) for one in WAYS[way]]
    with engine_of(monkeypatch, folder, "on", *asked) as engine:
        assert engine.plan.experts is not None
        assert engine.plan.experts.are_device_readable == (way in ("in slots", "mapped"))
        assert engine.plan.experts.has_layer_slots == (way == "in slots")
        assert torch.equal(logits_of(engine), resident)


def three_slots(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    """Return the bytes of three slots for each layer."""
    with engine_of(monkeypatch, folder, "on", *WAYS["mapped"]) as engine:
        assert engine.plan.experts is not None
        return 3 * engine.plan.experts.num_layers * engine.plan.experts.slot_nbytes


@pytest.mark.parametrize("rows", [2, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (3, 8)), 16])
def test_a_step_of_several_rows_in_slots_gives_resident_bits(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rows: int
) -> None:
    """Rows that choose more experts than a layer has slots; of 16, the host calls each layer's kernels for many."""
    three = three_slots(monkeypatch, folder)
    sizes = f"batch_size={rows}"
    tokens = torch.randint(0, 40, (3, rows), generator=torch.Generator().manual_seed(rows)).tolist()

    @torch.inference_mode()
    def steps_of(engine: Engine) -> Tensor:
        assert isinstance(engine.runner, ProgramRunner)
        return torch.cat([engine.runner.extend([[one] for one in row], [at] * rows) for at, row in enumerate(tokens)])

    with engine_of(monkeypatch, folder, "off", sizes) as engine:
        resident = steps_of(engine)
    with engine_of(monkeypatch, folder, "on", "streaming.source=host", f"streaming.expert_cache={three}", sizes) as one:
        assert torch.equal(steps_of(one), resident)
        experts = one.loaded.weight_stream.experts
        assert experts is not None
        assert experts.device_cache is not None
        for slots in experts.device_cache.layers.values():
            assert slots.tallies[CALLS] == 3
            assert slots.tallies[IN_PLACE] > 0
