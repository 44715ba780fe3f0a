"""Each requirement, constraint and test of the specification of progressive layer loading, by its number.

Timing requirements are shown here by structure: how often bytes are read, how many reads are in flight, what a step
still has to wait for. `test_streaming_speed.py` measures them.
"""

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.files.ternary_files import save_ternary
from support.streaming import load, smallest_budget, stream_of, wrap
from support.tiny_models import TinyModel

from graphcore import Engine
from graphcore.errors import ConfigError, PlanError
from graphcore.host_pages import is_of_file
from graphcore.streaming.fill_jobs import ROOM
from graphcore.streaming.report import Measured, report_streaming
from graphcore.streaming.streamed import Streamed
from graphcore.streaming.thread_filler import THREADS, ThreadFiller

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("small_parts")]

Tiny = Callable[[str], TinyModel]
MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MATRICES += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LAYERS = 3
PROMPT = list(range(1, 31))
SECONDS = 5.0
BUDGET = 600_000_000  # bytes
COPY_SECONDS = 0.03  # of a read from a slow disk: far more than a thread on a busy machine wakes up late


@pytest.fixture(scope="module")
def tiny(tiny_model: Tiny) -> TinyModel:
    return tiny_model("llama3")


@pytest.fixture
def engine(tiny: TinyModel) -> Iterator[Engine]:
    with load(tiny.folder) as loaded:
        yield loaded


@pytest.fixture
def layers_engine(tiny: TinyModel) -> Iterator[Engine]:
    """An engine that moves whole layers."""
    with load(tiny.folder, "streaming.layer_group_size=1") as loaded:
        yield loaded


def policy_of(engine: Engine) -> Streamed:
    policy = stream_of(engine).policy
    assert isinstance(policy, Streamed)
    return policy


def filler_of(engine: Engine) -> ThreadFiller:
    filler = stream_of(engine).filler
    assert filler is not None
    return filler


def is_loaded(engine: Engine, tiny: TinyModel, layer: int) -> bool:
    """Return whether the layer's matrices are transformers' own, to the bit."""
    ours = engine.runner.builder.decoder.layers[layer]
    theirs = tiny.reference.model.layers[layer]
    return all(torch.equal(ours.get_submodule(name).weight, theirs.get_submodule(name).weight) for name in MATRICES)


def passes(engine: Engine, num_passes: int) -> list[int]:
    """Return the groups of so many passes in the ring's order."""
    return [*engine.plan.groups.streamed] * num_passes


def slow_disk(seconds: float) -> None:
    """Keep a reading thread for that long."""
    threading.Event().wait(seconds)


def compute(seconds: float) -> None:
    """Multiply for that long, as a step would."""
    matrix, ends = torch.ones(64, 64), time.perf_counter() + seconds
    while time.perf_counter() < ends:
        matrix @ matrix


def held_nbytes(engine: Engine) -> int:
    """Return the bytes of all memory that the engine's weights, slots and caches have, each counted once."""
    decoder, builder = engine.runner.builder.decoder, engine.runner.builder
    tensors = [tensor for _, group in decoder.groups() for tensor in group.buffers() if not tensor.is_meta]
    tensors += [part.lm_head.weight for part in builder.head_parts if not part.lm_head.weight.is_meta]
    tensors += [tensor for cache in builder.caches for tensor in (cache.k, cache.v) if not is_of_file(tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fr_001_and_t_001_a_layer_group_is_loaded_as_one_to_the_device(tiny: TinyModel, size: int) -> None:
    """FR-001, T-001: layer group loading: after acquire every layer of the group is there, on the device."""
    with load(tiny.folder, f"streaming.layer_group_size={size}") as engine:
        policy = policy_of(engine)
        for group, layers in enumerate((one.layers for one in engine.runner.builder.layer_groups), start=1):
            policy.acquire(group)
            assert all(is_loaded(engine, tiny, layer) for layer in layers)
            weights = [engine.runner.builder.decoder.layers[layer].mlp.up_proj.weight for layer in layers]
            assert {weight.device for weight in weights} == {engine.choices.device}
            policy.release(group)


def test_fr_002_and_t_002_a_group_gives_its_memory_back(layers_engine: Engine, tiny: TinyModel) -> None:
    """FR-002, T-002: eviction: what was one group's memory is the next but one's after release, and no more is held."""
    engine = layers_engine
    policy, layers = policy_of(engine), engine.runner.builder.decoder.layers
    assert engine.plan.groups.num_slots == 2
    assert layers[0].mlp.up_proj.weight.data_ptr() == layers[2].mlp.up_proj.weight.data_ptr()
    assert layers[0].mlp.up_proj.weight.data_ptr() != layers[1].mlp.up_proj.weight.data_ptr()
    before = held_nbytes(engine)
    for group in (1, 2):
        policy.acquire(group)
        policy.release(group)
    policy.acquire(3)
    assert is_loaded(engine, tiny, 2)
    assert not is_loaded(engine, tiny, 0)
    policy.release(3)
    assert held_nbytes(engine) == before
    whole = sum(engine.plan.groups.group_nbytes)
    assert before < whole - engine.plan.groups.nbytes_of(1) + engine.plan.kv_nbytes


def test_fr_003_and_t_003_the_next_group_is_loaded_while_one_computes(layers_engine: Engine, tiny: TinyModel) -> None:
    """FR-003, T-003: double buffering: both buffers hold a whole group at once, and the one in use stays as it is."""
    engine = layers_engine
    policy, filler = policy_of(engine), filler_of(engine)
    for group, following in itertools.pairwise((1, 2, 3)):
        policy.acquire(group)
        filler.wait(policy._ahead[0])  # the caller computes that long
        assert is_loaded(engine, tiny, group - 1)
        assert is_loaded(engine, tiny, following - 1)
        policy.release(group)


@pytest.mark.parametrize(("size", "groups"), [(1, 3), (2, 2), (3, 1), (7, 1)])
def test_fr_004_the_group_size_is_a_setting_and_a_remainder_is_a_group(tiny: TinyModel, size: int, groups: int) -> None:
    """FR-004: configurable group size."""
    with load(tiny.folder, f"streaming.layer_group_size={size}") as engine:
        assert engine.plan.groups.num_layer_groups == groups
        assert sum(len(group.layers) for group in engine.runner.builder.layer_groups) == LAYERS
        assert (engine.logits(tiny.ids) - tiny.logits).abs().max() < 1e-4


@pytest.mark.parametrize("streaming", ["on", "auto"])
@pytest.mark.parametrize("extra", [0, 100_000, 300_000])
def test_fr_005_t_005_and_it_004_nothing_holds_more_than_the_budget(
    tiny: TinyModel, streaming: str, extra: int
) -> None:
    """FR-005, T-005, IT-004: memory budget: planned, and allocated, buffers of the reading threads included."""
    budget = smallest_budget(tiny.folder, streaming=streaming) + extra
    with load(tiny.folder, f"streaming.memory_budget={budget}", streaming=streaming) as engine:
        assert engine.plan.total_nbytes <= budget
        engine.generate([PROMPT], max_new_tokens=3)
        own = engine.plan.other.job_nbytes + ROOM
        buffers = (THREADS + 1) * own if engine.plan.is_streaming else 0
        alignment = 4 * 4096
        assert held_nbytes(engine) + buffers <= budget + alignment


def test_fr_005_a_budget_that_is_impossible_is_refused_and_the_one_that_is_named_works(tiny: TinyModel) -> None:
    """FR-005: never more than the limit; one byte less than the smallest is refused, before any weight is read."""
    smallest = smallest_budget(tiny.folder)
    with pytest.raises(PlanError, match=f"works at context_length=256 is {smallest} bytes"):
        load(tiny.folder, f"streaming.memory_budget={smallest - 1}")
    with load(tiny.folder, f"streaming.memory_budget={smallest}") as engine:
        assert (engine.logits(tiny.ids) - tiny.logits).abs().max() < 1e-4


def test_fr_006_and_it_002_keys_and_values_stay_where_they_are(engine: Engine, tiny: TinyModel) -> None:
    """FR-006, IT-002: the KV cache persists across groups and steps: decoding token by token is one whole pass."""
    caches = engine.runner.builder.caches
    places = [(cache.k.data_ptr(), cache.v.data_ptr()) for cache in caches]
    ids = tiny.ids[0].tolist()
    logits = [engine.runner.extend([ids[:20]], [0])]
    logits += [engine.runner.extend([[token_id]], [20 + at]) for at, token_id in enumerate(ids[20:])]
    assert (torch.cat(logits) - tiny.logits[0, 19:]).abs().max() < 1e-4
    assert [(cache.k.data_ptr(), cache.v.data_ptr()) for cache in caches] == places


def test_fr_007_sync_reads_nothing_ahead_and_async_does(tiny: TinyModel) -> None:
    """FR-007: both modes: blocking, with one slot, and pipelined."""
    for mode, num_slots in (("sync", 1), ("async", 2)):
        with load(tiny.folder, f"streaming.mode={mode}") as engine:
            policy = policy_of(engine)
            policy.acquire(1)
            assert len(policy._ahead) == num_slots - (mode == "sync")
            assert engine.plan.groups.num_slots == num_slots
            policy.release(1)
            assert (engine.logits(tiny.ids) - tiny.logits).abs().max() < 1e-4


def test_fr_008_loading_reports_its_progress(tiny: TinyModel) -> None:
    """FR-008: progress callbacks."""
    seen: list[tuple[str, int | None, int, int]] = []
    with Engine.load(
        tiny.folder, device="cpu", graph="eager", streaming="on", on_progress=lambda *stage: seen.append(stage)
    ) as engine:
        loads = [(done, total) for stage, _, done, total in seen if stage == "load"]
        seen.clear()
        engine.generate([PROMPT], max_new_tokens=2, ignore_eos=True)
        for stage in ("prefill", "generate"):
            groups = [group for said, group, _, _ in seen if said == stage]
            assert [group for group in groups if group in engine.plan.groups.streamed] == passes(engine, 1), stage
    assert len(loads) > 1
    assert loads == sorted(loads)
    assert {total for _, total in loads} == {loads[-1][0]}


def test_nfr_001_several_reads_are_in_flight_and_few_bytes_are_read_in_vain(tiny: TinyModel) -> None:
    """NFR-001: transfer efficiency: reads overlap (each waits here for a second one), each byte once, few besides."""
    with load(tiny.folder) as engine:
        together = threading.Barrier(2)
        policy = policy_of(engine)

        def meet(number: int) -> None:
            if number in (1, 2):  # of the second group and of the third, while the first computes
                together.wait(SECONDS)

        wrap(engine, meet)
        policy.acquire(1)
        policy.acquire(2)
        assert not together.broken
        jobs = [job for each in policy.ring.work.values() for job in each]
        moved = sum(job.nbytes for job in jobs)
        assert moved == engine.plan.groups.streamed_nbytes
        assert sum(job.room for job in jobs) <= moved + 2 * 4096 * len(jobs)


def test_nfr_002_management_takes_less_than_a_twentieth_of_the_budget(tiny: TinyModel) -> None:
    """NFR-002: memory overhead: what the engine that has the budget allocates to move weights, slots left out.

    The file holds float32: what is rounded goes through the threads' buffers whether or not the file is in RAM.
    """
    with load(tiny.folder, f"streaming.memory_budget={BUDGET}", dtype="bf16") as engine:
        plan, filler = engine.plan, filler_of(engine)
        assert plan.budget == BUDGET
        weight = engine.runner.builder.decoder.layers[0].mlp.up_proj.weight
        slots = weight.untyped_storage().nbytes()  # all of them lie together
        needed = plan.groups.num_slots * max(map(plan.groups.nbytes_of, plan.groups.streamed))
        buffers = filler.num_threads * filler.buffer_nbytes + filler.large_nbytes
        assert 0 < buffers <= plan.other.buffer_nbytes
        assert slots >= needed
        assert slots - needed + plan.other.buffer_nbytes < 0.05 * BUDGET


@pytest.mark.parametrize(("seconds", "least", "most"), [(2 * COPY_SECONDS, 0.8, 1.0), (0.0, 0.0, 0.5)])
def test_nfr_003_copies_hide_behind_compute_that_lasts_as_long(
    tiny: TinyModel, seconds: float, least: float, most: float
) -> None:
    """NFR-003: overlap over 80 % where a step computes as long as a slow disk reads, and little where it does not.

    The step computes by the clock and does not look at the copy. Without compute every copy is waited for: that the
    number can be small is the second case.
    """
    with load(tiny.folder) as engine:
        policy, timeline = policy_of(engine), stream_of(engine).timeline
        wrap(engine, lambda number: slow_disk(COPY_SECONDS))
        order = passes(engine, 2)
        policy.acquire(order[0])  # its copy has nothing to hide behind
        begin = time.perf_counter()
        for group in order[1:]:
            compute(seconds)
            policy.release(group)
            policy.acquire(group)
        end = time.perf_counter()
        policy.release(order[-1])
        report = report_streaming(timeline.since(begin), Measured(begin, end, 2, max(order) + 1))
        assert report.copy_seconds > 3 * COPY_SECONDS, "the disk was slow"
        assert report.overlap is not None
        assert least <= report.overlap <= most


def test_nfr_004_a_prompt_costs_one_pass_over_the_weights_for_each_chunk(tiny: TinyModel) -> None:
    """NFR-004: first token latency: the copies of one pass, not of one for each token, are all that is added."""
    with load(tiny.folder, "streaming.mode=sync") as engine:
        for tokens, chunks in ((16, 1), (17, 2), (48, 3)):
            timeline = stream_of(engine).timeline
            timeline.events.clear()
            engine.generate([[tokens, *PROMPT * 2][:tokens]], max_new_tokens=1)  # none begins as another does
            moved = sum(event.nbytes for event in timeline.events if event.lane == "copy")
            head = sum(engine.plan.groups.head_slices)  # is read where a prompt ends, and only there
            assert moved == chunks * engine.plan.groups.streamed_nbytes - (chunks - 1) * head


@pytest.mark.parametrize("overrides", [(), ("streaming.source=host",)])
def test_c_001_the_checkpoint_is_read_and_never_written(tiny: TinyModel, overrides: tuple[str, ...]) -> None:
    """C-001: read-only: bytes and times of every file stay, and files are open for reading alone."""

    def state() -> dict[str, tuple[str, int, int]]:
        return {
            path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns, path.stat().st_size)
            for path in tiny.folder.iterdir()
        }

    before = state()
    with load(tiny.folder, *overrides) as engine:
        engine.generate([PROMPT], max_new_tokens=5)
        modes = []
        for number in Path("/proc/self/fd").iterdir():
            if number.is_symlink() and number.resolve() == (tiny.folder / "model.safetensors").resolve():
                flags = (Path("/proc/self/fdinfo") / number.name).read_text().split("flags:")[1].split()[0]
                modes.append(int(flags, 8) & os.O_ACCMODE)
        assert modes == ([] if overrides else [os.O_RDONLY])
    assert state() == before


def test_c_002_and_t_004_streamed_logits_are_resident_ones_and_the_references(engine: Engine, tiny: TinyModel) -> None:
    """C-002, T-004: numerical equivalence: to the bit with everything resident, and with transformers."""
    with load(tiny.folder, streaming="off") as resident:
        expected = resident.logits(tiny.ids)
    found = engine.logits(tiny.ids)
    assert torch.equal(found, expected)
    assert (found - tiny.logits).abs().max() < 1e-4


def test_c_003_ternary_weights_stream_packed(tmp_path: Path) -> None:
    """C-003: BitNet: what moves are two bits a weight, and the logits are those of transformers' own layers."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}  # rows of whole blocks, or they stay dense
    model = save_ternary("bitnet", "autobitlinear", 3, tmp_path, sizes)
    with load(tmp_path) as engine:
        projection = engine.runner.builder.decoder.layers[0].mlp.up_proj
        outputs, inputs = model.reference.model.layers[0].mlp.up_proj.weight.shape
        assert projection.weight.nbytes <= outputs * inputs / 4 + 64
        assert torch.allclose(engine.logits(model.ids), model.logits(), atol=2e-4)


def test_c_004_nothing_has_a_gradient(engine: Engine, tiny: TinyModel) -> None:
    """C-004: gradient-free inference only."""
    with torch.enable_grad():
        logits = engine.logits(tiny.ids)
    assert not logits.requires_grad
    assert not list(engine.runner.builder.decoder.parameters())
    assert not any(buffer.requires_grad for buffer in engine.runner.builder.decoder.buffers())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("streaming.layer_group_size=0", "must be auto or a whole number of layers, at least 1"),
        ("streaming.layer_group_size=-4", "at least 1"),
        ("streaming.memory_budget=0", "must be auto or more than 0 bytes"),
        ("streaming.memory_budget=many", "memory_budget"),
        ("streaming.prefetch=9", "from 0 to 8"),
        ("streaming.mode=later", "is not one of async, sync"),
        ("streaming.source=tape", "is not one of auto, host, disk"),
        ("streaming.use_pinned_memory=true", "use_pinned_memory"),
    ],
)
def test_t_006_settings_that_mean_nothing_are_refused(tiny: TinyModel, overrides: str, said: str) -> None:
    """T-006: config validation."""
    with pytest.raises(ConfigError, match=said):
        load(tiny.folder, overrides)


def test_it_001_a_whole_forward_has_the_right_shape_and_values(engine: Engine, tiny: TinyModel) -> None:
    """IT-001: full model forward, hidden states too."""
    logits, hidden = engine.logits(tiny.ids, output_hidden_states=True)
    assert logits.shape == tiny.logits.shape
    assert (logits - tiny.logits).abs().max() < 1e-4
    for found, expected in zip(hidden[:-1], tiny.hidden_states()[:-1], strict=True):  # the last is before the norm here
        assert (found - expected).abs().max() < 1e-4


def test_it_003_a_batch_of_sequences_of_different_lengths(engine: Engine, tiny: TinyModel) -> None:
    """IT-003: batch inference: each sequence gets the tokens that transformers finds likeliest."""
    prompts = [PROMPT, PROMPT[:3], PROMPT[5:16]]
    for prompt, found in zip(prompts, engine.generate(prompts, max_new_tokens=8, ignore_eos=True), strict=True):
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(tiny.logits_of(torch.tensor([ids]))[0, -1].argmax()))
        assert list(found.token_ids) == ids[len(prompt) :]
