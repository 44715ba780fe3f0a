"""Capturing: what is asked of CUDA and in which order, what is left behind, and what is said where it fails."""

import gc
from dataclasses import dataclass

import pytest
import torch
from support.fake_cuda import FakeCuda
from tiny_graph import CPU, FULL, SLIDING, builder_of, feed, model_of, random_ids

from graphcore.errors import GraphError
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.gpu.capture import CapturedStep, Captures
from graphcore.graph.gpu.kernel_decode import DeviceBlocks
from graphcore.graph.state import StepState
from graphcore.kernels.gpu.pdl import pdl_options

SPEC = model_of(SLIDING, FULL)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda.install(monkeypatch)


def capturing_builder(batch: int = 2) -> GraphBuilder:
    """Return a builder that captures blocks which were not compiled."""
    builder = builder_of(SPEC, "eager", batch)
    builder.kind = "captured"
    return builder


@dataclass
class Doing:
    """A step that does what a test says."""

    work: object
    group: int = 1

    def replay(self) -> None:
        self.work()  # type: ignore[operator]


def test_the_warm_up_is_on_the_stream_of_the_capture_and_the_rest_waits_for_it(cuda: FakeCuda) -> None:
    state, log = StepState.empty(1, 1, CPU), cuda.log
    step = CapturedStep(1, state, [Doing(lambda: log.append(f"run in {cuda.current.name}"))], Captures(CPU))
    with pytest.raises(AssertionError, match="not captured"):  # nothing was enqueued
        step.replay()
    before_capture = [
        "in main",
        "side 0 waits for main",
        "in side 0",
        *["run in side 0"] * 2,
        "in main",
        "main waits for side 0",
    ]
    assert log == [*before_capture, "capture 0", "run in side 0", "captured 0", "in main"]
    assert cuda.captures == [((0, 1), "side 0", "thread_local")]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("uses_pdl", [False, True])
def test_kernels_are_launched_dependently_in_captures_that_say_so_and_nowhere_else(uses_pdl: bool) -> None:
    seen: list[dict[str, bool]] = []
    steps = [Doing(lambda: seen.append(pdl_options()))]
    CapturedStep(1, StepState.empty(1, 1, CPU), steps, Captures(CPU, uses_pdl)).prepare()
    assert seen == [{"DEPENDENT": True, "launch_pdl": True} if uses_pdl else {"DEPENDENT": False}] * 3
    assert pdl_options() == {"DEPENDENT": False}


def test_no_garbage_is_collected_during_a_capture(cuda: FakeCuda) -> None:
    seen: list[bool] = []

    def run() -> None:
        seen.append(gc.isenabled())
        if len(seen) > 2:
            raise RuntimeError("broken")

    captures = Captures(CPU)
    captures.capture("a step", lambda: seen.append(gc.isenabled()), run)
    assert seen == [True, False], "warm-ups may collect"
    assert gc.isenabled()
    with pytest.raises(GraphError, match="broken"):
        captures.capture("a step", lambda: None, run)
    assert gc.isenabled(), "after a failure, too"


def test_the_second_graph_shares_pool_and_stream_with_the_first(cuda: FakeCuda) -> None:
    builder = capturing_builder()
    for batch, is_greedy in ((1, True), (2, True), (2, False)):
        feed_once(builder.decode(batch, is_greedy), batch)
    assert cuda.captures == [((0, 1), "side 0", "thread_local")] * 3
    assert builder.captures.num_graphs == 3


def feed_once(program: object, batch: int) -> torch.Tensor:
    return feed_inputs(program, random_ids(batch, 1))


def feed_inputs(program: object, rows: list[list[int]]) -> torch.Tensor:
    """Run one token of each row; a captured program's inputs stay where they are."""
    state = program.state  # type: ignore[attr-defined]
    state.token_ids.copy_(torch.tensor(rows))
    state.span.counts.fill_(1)
    for step in program.steps:  # type: ignore[attr-defined]
        step.replay()
    return state.logits.clone()


def test_preparing_runs_nothing_and_the_first_replay_is_as_if_nothing_had_been(cuda: FakeCuda) -> None:
    rows = random_ids(2, 7)
    builder, plain = capturing_builder(), builder_of(SPEC, "eager", 2)
    for one in (builder, plain):
        feed(one.prefill(2), rows, [0, 0])
    before = [(cache.k.clone(), cache.v.clone()) for cache in builder.caches]
    program = builder.decode(2, is_greedy=True)
    program.state.span.starts.fill_(7)
    (step,) = program.steps
    assert isinstance(step, CapturedStep)
    step.prepare()
    step.prepare()
    assert (len(cuda.graphs), cuda.graphs[0].num_replays) == (1, 0)
    for cache, (k, v) in zip(builder.caches, before, strict=True):
        assert torch.equal(cache.k, k)
        assert torch.equal(cache.v, v)
    assert program.state.span.starts.tolist() == [7, 7]
    found = feed_inputs(program, [[3], [4]])
    assert torch.equal(found, feed(plain.decode(2, is_greedy=False), [[3], [4]], [7, 7]))
    assert torch.equal(program.state.token_ids[:, 0], found.argmax(-1))


def test_nothing_that_a_capture_made_stays_in_the_state(cuda: FakeCuda) -> None:
    program = capturing_builder().decode(2, is_greedy=False)
    feed_once(program, 2)
    assert program.state.hidden.numel() == 0
    assert program.state.ropes == ()


def test_memory_and_seconds_are_counted(cuda: FakeCuda) -> None:
    builder = capturing_builder()
    assert (builder.captures.num_graphs, builder.captures.nbytes, builder.captures.seconds) == (0, 0, 0.0)
    for batch in (1, 2):
        feed_once(builder.decode(batch, is_greedy=True), batch)
    assert builder.captures.nbytes == 2 * cuda.nbytes_of_a_graph
    assert builder.captures.seconds > 0


@pytest.mark.thorough
@pytest.mark.parametrize("layers", [1, 3])
def test_a_gpus_own_kernels_are_captured_where_they_change_what_pieces_hand_on(cuda: FakeCuda, layers: int) -> None:
    """Each piece is captured when it first runs, between others, and prepares the first norm of the next."""
    rows, spec = random_ids(1, 4), model_of(*[FULL] * layers)
    builder, plain = builder_of(spec, "captured", 1), builder_of(spec, "eager", 1)
    builder.functions.decode_kernels = DeviceBlocks.allocate(builder.caches, CPU)
    builder.streamed = range(1, layers + 1)
    for one in (builder, plain):
        feed(plain.prefill(1), rows, [0])
        for cache, filled in zip(one.caches, plain.caches, strict=True):
            cache.k.copy_(filled.k)
            cache.v.copy_(filled.v)
    found, expected = builder.decode(1, is_greedy=True), plain.decode(1, is_greedy=True)
    token = [[int(plain.prefill(1).state.token_ids[0, 0])]]
    found.state.span.starts.fill_(4)
    assert torch.allclose(feed_inputs(found, token), feed(expected, token, [4]), atol=1e-4)
    assert [step.group for step in found.steps] == [*range(layers + 2)]
    for step in found.steps:  # the token that was chosen, at the next position, without anybody's help
        step.replay()
    again = feed(expected, found_token(expected), [5])
    assert torch.allclose(found.state.logits, again, atol=1e-4)


def found_token(program: object) -> list[list[int]]:
    return program.state.chosen[:, None].tolist()  # type: ignore[attr-defined, no-any-return]


def test_graphs_that_were_given_back_are_not_captured_again(cuda: FakeCuda) -> None:
    builder = capturing_builder()
    program = builder.decode(2, is_greedy=True)
    feed_once(program, 2)
    builder.captures.release()
    assert [graph.is_reset for graph in cuda.graphs] == [True]
    assert cuda.log[-3:] == ["synchronize", "reset 0", "empty_cache"]
    with pytest.raises(AssertionError, match="given back"):
        feed_once(program, 2)
    with pytest.raises(GraphError, match="the engine is closed"):
        feed_once(builder.decode(1, is_greedy=True), 1)


def read_back() -> None:
    float(torch.ones(1))


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the manual.")


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (read_back, "operation not permitted when stream is capturing; use graph=compiled$"),
        (out_of_memory, r"CUDA out of memory. Tried to allocate 2.00 GiB.; leave more memory free: a smaller context"),
    ],
)
def test_a_failure_says_what_where_why_and_what_to_do(work: object, said: str, cuda: FakeCuda) -> None:
    state = StepState.empty(3, 1, CPU)
    steps = [Doing(lambda: state.chosen.zero_(), group=2), Doing(work, group=3)]
    step = CapturedStep(2, state, steps, Captures(CPU))
    start = r"a decode step of 3 sequences \(layer groups 2 to 3\) could not be captured as a CUDA graph on cpu: "
    with pytest.raises(GraphError, match=start + ".*" + said):
        step.replay()
    assert cuda.current.name == "main"


def test_an_error_of_our_own_is_left_as_it_is(cuda: FakeCuda) -> None:
    def refuse() -> None:
        raise GraphError("not here; do that instead")

    with pytest.raises(GraphError, match=r"^not here; do that instead$"):
        CapturedStep(1, StepState.empty(1, 1, CPU), [Doing(refuse)], Captures(CPU)).replay()


def test_a_capture_that_draws_from_a_generator_is_refused(cuda: FakeCuda) -> None:
    generator, out = torch.Generator().manual_seed(3), torch.zeros(5)
    with pytest.raises(GraphError, match="not in capture mode"):
        Captures(CPU).capture("noise", lambda: None, lambda: out.exponential_(generator=generator))
