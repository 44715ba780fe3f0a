"""Experts in slots that a captured decode step fills by itself: whole mixtures on graphs and queues that are not there.

A graph is what was captured, run again: nothing reads back in it, and its memory holds nonsense between replays. The
kernels are a GPU's, in Triton's interpreter, where a model's blocks have decode kernels.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.fake_cuda import Driver, fake_cuda
from support.gpu_kernels import let_programs_be_few
from support.queues import SimulatedQueues
from support.tiny_models import DELTA_RULES, MIXTURES, TinyModel
from torch import Tensor

from graphcore import Engine
from graphcore.engine.batching.new_batching import batching_of
from graphcore.engine.loading import decoder_loader
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph.gpu.kernel_decode import DeviceBlocks
from graphcore.kernels.backend import TritonBackend
from graphcore.kernels.ops.expert_slots import CALLS, HITS, IN_PLACE, LOADED
from graphcore.streaming import weight_stream
from graphcore.streaming.device.stream import DeviceLink
from graphcore.streaming.experts.device_cache import DeviceCache
from graphcore.streaming.pinned_memory import Pins

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
SLOTS = 4  # of a layer with six experts, of which a token chooses three
PROMPT = [3, 14, 15, 9, 26]


@contextmanager
def engine_of(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    dtype: str,
    rows: int,
    slots: int | None,
    quota: int = 1 << 40,
    kv: str = "auto",
    overrides: Sequence[str] = (),
) -> Iterator[Engine]:
    """Load a mixture as for a GPU.

    Args:
        slots: slots of each layer; None if all experts are resident.
        quota: bytes that may be locked.
        kv: dtype of keys and values.
        overrides: further settings.
    """
    queues = SimulatedQueues(random.Random(0), computes_at_once=True)
    with monkeypatch.context() as patch:
        fake_cuda(patch)
        let_programs_be_few(patch)
        patch.setattr(
            weight_stream, "link_opener", lambda _device, _pinned: lambda: DeviceLink(queues, Pins(Driver(quota)))
        )
        patch.setattr(
            decoder_loader, "_decode_kernels", lambda choices, caches: DeviceBlocks.allocate(caches, choices.device)
        )
        patch.setattr(
            PreparedDecoder, "has_device_readable_experts", lambda _self, _settings, tier: tier.kind == "host"
        )
        sizes = ["prefill_chunk=8", f"batch_size={rows}", "context_length=32", f"kv_dtype={kv}", *overrides]
        if slots is not None:
            nbytes = slots_nbytes(folder, dtype, slots, overrides)
            sizes += ["streaming.source=host", f"streaming.expert_cache={nbytes}"]
        streaming = "off" if slots is None else "auto"
        with Engine.load(
            folder, dtype=dtype, streaming=streaming, graph="eager", device="cpu", overrides=sizes
        ) as engine:
            engine.runner.builder.kind, engine.runner.builder.backend = "captured", TritonBackend()
            engine._queue.batching = batching_of(engine.runner, engine.settings.cache_folder)
            yield engine


def slots_nbytes(folder: Path, dtype: str, slots: int, overrides: Sequence[str]) -> int:
    """Return the bytes of some slots for each layer."""
    sizes = ["streaming.source=host", "streaming.expert_cache=0", "context_length=32", *overrides]
    with Engine.load(folder, dtype=dtype, streaming="on", graph="eager", device="cpu", overrides=sizes) as engine:
        assert engine.plan.experts is not None
        return slots * engine.plan.experts.num_layers * engine.plan.experts.slot_nbytes


def cache_of(engine: Engine) -> DeviceCache:
    experts = engine.loaded.weight_stream.experts
    assert experts is not None
    assert experts.device_cache is not None
    return experts.device_cache


@torch.inference_mode()
def logits_of(engine: Engine, rows: int) -> Tensor:
    """Return the logits after prompts, of which one has a chunk more, and after some tokens of each."""
    assert isinstance(engine.runner, ProgramRunner)
    prompts: list[Sequence[int]] = [PROMPT * 2 if row == 0 else [row, *PROMPT] for row in range(rows)]
    steps = [engine.runner.extend(prompts, [0] * rows)]
    tokens = torch.randint(0, 90, (4, rows), generator=torch.Generator().manual_seed(rows)).tolist()
    for at, row in enumerate(tokens):
        steps.append(engine.runner.extend([[one] for one in row], [len(prompt) + at for prompt in prompts]))
    return torch.cat(steps)


SOME = {  # each mixture and dtype once, one row, two and many; all of them together take minutes in the interpreter
    *(("qwen3_5_moe", 1, "fp32", "auto"), ("qwen3_next", 2, "fp16", "auto"), ("qwen3_moe", 2, "bf16", "q8_0")),
    *(("gpt_oss", 1, "bf16", "auto"), ("gemma4_moe", 16, "bf16", "auto")),
}
WIDE = {("gpt_oss", 8, "bf16", "auto"), ("qwen3_moe", 1, "bf16", "q4_0")}
EACH = {(name, rows, dtype, "auto") for name in MIXTURES for rows, dtype in ((1, "fp32"), (2, "fp16"), (3, "bf16"))}
CASES = [
    pytest.param(*case, marks=pytest.mark.thorough if case in SOME else pytest.mark.slow)
    for case in sorted(SOME | EACH | WIDE)
]


@pytest.mark.parametrize(("name", "rows", "dtype", "kv"), CASES)
def test_every_mixture_has_resident_bits(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Tiny, name: str, rows: int, dtype: str, kv: str
) -> None:
    folder = tiny_model(name).folder
    few = (f"model.num_hidden_layers={3 if name in DELTA_RULES else 2}",)  # one of each kind
    with engine_of(monkeypatch, folder, dtype, rows, None, kv=kv, overrides=few) as engine:
        resident = logits_of(engine, rows)
    with engine_of(monkeypatch, folder, dtype, rows, SLOTS, kv=kv, overrides=few) as engine:
        assert torch.equal(logits_of(engine, rows), resident)
        for slots in cache_of(engine).layers.values():
            tallies = slots.tallies.tolist()
            assert len(slots.holders) == SLOTS
            assert tallies[CALLS] >= 4
            assert min(tallies[HITS], tallies[LOADED]) > 0
            assert rows > 1 or tallies[IN_PLACE] == 0
            assert rows < 8 or tallies[IN_PLACE] > 0


def test_a_decode_step_is_one_graph_that_does_not_ask_the_host(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Tiny
) -> None:
    folder = tiny_model("qwen3_moe").folder
    with engine_of(monkeypatch, folder, "bf16", 1, SLOTS) as engine:
        assert engine.plan.experts is not None
        assert engine.plan.experts.has_layer_slots
        engine.generate([PROMPT], max_new_tokens=4, ignore_eos=True)
        cache, stats = cache_of(engine), engine.stats
        hits, misses = cache.tallies
        assert stats["expert_hit_rate"] == hits / (hits + misses)
        table = sum(one[0].nbytes for one in next(iter(cache.layers.values())).waiting)
        assert cache.link_nbytes == misses * table
        assert (cache.host.hits, cache.host.misses) == (0, 0)
        assert stats["captured_graphs"] == 1
