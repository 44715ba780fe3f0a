"""Tokens chosen in captured graphs and read some steps behind are the tokens that the host would have chosen.

Where a test compares tokens of batches or log probabilities, Triton's interpreter runs the sampling kernels; elsewhere
they are in plain torch.
"""

import pytest
import torch
from support.engine_fakes import choose_plainly
from support.fake_cuda import CountedOps, FakeCuda, captured_engine, engine_of, fake_cuda
from support.queues import Paced

from graphcore import Engine
from graphcore.engine.batching.device_decode_loop import LAG
from graphcore.errors import GraphError
from graphcore.sampling_params import SamplingParams
from graphcore.tasks.measuring.random_batch import RandomBatch

pytestmark = pytest.mark.thorough

PROMPT = [1, 2, 3, 4, 5, 6]
PROMPTS = [PROMPT, [9, 8], [20, 21, 22, 23]]
NUCLEUS = {"temperature": 1.3, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 5}
PLAIN = {"temperature": 1.0, "min_p": 0.01, "seed": 1}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    choose_plainly(monkeypatch)
    return fake_cuda(monkeypatch)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """CUDA whose sampling kernels run in Triton's interpreter."""
    return fake_cuda(monkeypatch)


def end_at(engine: Engine, *ends: int) -> None:
    object.__setattr__(engine.loaded.config, "eos_token_ids", ends)


def tokens_of(engine: Engine, prompts: list[list[int]], count: int, **sampling: float) -> list[tuple[int, ...]]:
    return [each.token_ids for each in engine.generate(prompts, count, ignore_eos=True, **sampling)]


@pytest.mark.parametrize(("name", "count"), [pytest.param("qwen3", 256, marks=pytest.mark.thorough), ("gemma3", 40)])
def test_greedy_tokens_are_those_of_eager_blocks(name: str, count: int, cuda: FakeCuda) -> None:
    expected = tokens_of(engine_of(name), [PROMPT], count)
    engine = captured_engine(name)
    assert tokens_of(engine, [PROMPT], count) == expected
    assert len(set(expected[0])) > 6  # a repeating answer would not show a lost token
    assert tokens_of(engine, [PROMPT], 12) == [expected[0][:12]]
    assert engine.runner.captures.num_graphs == 1  # captured once, whatever is generated


@pytest.mark.parametrize(("sampling", "count"), [({}, 8), (NUCLEUS, 3), (PLAIN, 5)], ids=["greedy", "nucleus", "plain"])
def test_batches_choose_what_the_host_chooses_and_a_seed_gives_the_same_again(
    sampling: dict[str, float], count: int, interpreted: FakeCuda
) -> None:
    expected = tokens_of(engine_of(), PROMPTS, count, **sampling)
    engine = captured_engine()
    assert tokens_of(engine, PROMPTS, count, **sampling) == expected
    assert tokens_of(engine, PROMPTS[:2], count, **sampling) == expected[:2]
    assert engine.runner.captures.num_graphs == 1
    assert len({address for address, *_ in interpreted.captures}) == 1


def test_other_settings_of_sampling_take_the_same_graph(cuda: FakeCuda) -> None:
    engine, eager = captured_engine(), engine_of()
    for sampling in (NUCLEUS, {**NUCLEUS, "top_k": 0, "seed": 9}, {**NUCLEUS, "temperature": 0.4}):
        assert tokens_of(engine, [PROMPT], 4, **sampling) == tokens_of(eager, [PROMPT], 4, **sampling)
    assert engine.runner.captures.num_graphs == 1
    tokens_of(engine, [PROMPT], 4)
    tokens_of(engine, [PROMPT], 4, **PLAIN)
    tokens_of(engine, PROMPTS, 4)
    assert engine.runner.captures.num_graphs == 3
    pools = {pool for pool, *_ in cuda.captures}
    assert (len(pools), cuda.num_pools, len(cuda.streams)) == (1, 1, 1)


@pytest.mark.parametrize("sampling", [{}, PLAIN], ids=["greedy", "plain"])
def test_where_weights_stream_each_group_is_a_graph_and_the_last_one_chooses(
    sampling: dict[str, float], cuda: FakeCuda
) -> None:
    expected = tokens_of(engine_of(), [PROMPT], 12, **sampling)
    with captured_engine("qwen3", "streaming=on") as engine:
        assert tokens_of(engine, [PROMPT], 12, **sampling) == expected
        program = engine.runner.programs.sampling_program([SamplingParams(**sampling)])
        assert [graph.num_replays for graph in cuda.graphs] == [11] * len(cuda.graphs)
        assert program.choice in program.steps[-1].steps
        assert len(cuda.graphs) > len(engine.runner.builder.layer_groups)


def test_log_probabilities_are_those_of_the_unchanged_logits(interpreted: FakeCuda) -> None:
    for sampling in ({}, PLAIN):
        expected = engine_of().generate(PROMPTS, 4, logprobs=True, ignore_eos=True, **sampling)
        found = captured_engine().generate(PROMPTS, 4, logprobs=True, ignore_eos=True, **sampling)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_rows_end_at_their_own_end_tokens_and_their_caches_stay(cuda: FakeCuda) -> None:
    full = tokens_of(engine_of(), PROMPTS, 20)
    ends = frozenset({full[0][4], full[2][11]})
    engine = captured_engine()
    end_at(engine, *ends)
    answers = engine.generate(PROMPTS, 20)
    expected = [next(at + 1 for at, token in enumerate([*row[:-1], -1]) if token in ends or at == 19) for row in full]
    assert [len(each.token_ids) for each in answers] == expected
    assert answers[1].token_ids == full[1][: expected[1]]
    state = engine.runner.programs.sampling_rows.state
    lengths = [len(prompt) + count - 1 for prompt, count in zip(PROMPTS, expected, strict=True)]
    assert state.span.starts.tolist() == lengths
    assert state.span.counts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("lengths", [(1,), (2,), (7,), (1, 5)])
def test_no_step_is_wasted_where_the_length_is_known(lengths: tuple[int, ...], cuda: FakeCuda) -> None:
    engine = captured_engine()
    for length in lengths:
        before = sum(graph.num_replays for graph in cuda.graphs)
        assert len(tokens_of(engine, [PROMPT], length)[0]) == length
        assert sum(graph.num_replays for graph in cuda.graphs) - before == length - 1


def test_a_full_context_ends_a_row_without_a_step_too_many(cuda: FakeCuda) -> None:
    engine, eager = (make("qwen3", "context_length=12") for make in (captured_engine, engine_of))
    found, expected = (one.generate([PROMPT], 50, ignore_eos=True)[0] for one in (engine, eager))
    assert (found.finish_reason, found.token_ids) == ("context", expected.token_ids)
    assert sum(graph.num_replays for graph in cuda.graphs) == len(found.token_ids) - 1


def test_a_stop_that_only_the_host_sees_wastes_at_most_the_lag_and_tells_what_the_cache_holds(cuda: FakeCuda) -> None:
    full = tokens_of(engine_of(), [PROMPT], 20)[0]
    engine = captured_engine()
    stream = Paced(engine, PROMPT, 20, ignore_eos=True, reuse_cache=True)
    for _ in range(5):
        next(stream)
    stream.close()
    again = engine.submit([*PROMPT, *full], 1, reuse_cache=True)
    again.result()
    assert len(PROMPT) + 4 <= again.cached <= len(PROMPT) + 5 + LAG


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_chat_goes_on_after_steps_too_many_as_if_it_had_run_everything_again(name: str, cuda: FakeCuda) -> None:
    """Gemma's rings of 8 have moved on with tokens that are no part of the chat: nothing of them may be reused."""
    engine, eager = captured_engine(name), engine_of(name)
    history = list(PROMPT)
    for _ in range(2):
        stream = Paced(engine, history, 30, ignore_eos=True, reuse_cache=True)
        answer = [next(stream).token_id for _ in range(12)]
        stream.close()
        assert answer == list(tokens_of(eager, [history], 12)[0])
        history += [*answer, 7, 8]


def test_an_end_token_is_seen_by_the_device_and_the_whole_answer_is_reused(cuda: FakeCuda) -> None:
    full = tokens_of(engine_of("gemma3"), [PROMPT], 30)[0]
    engine = captured_engine("gemma3")
    end_at(engine, full[20])
    answer = engine.submit(PROMPT, 30, reuse_cache=True).result().token_ids
    assert answer[-1] == full[20]
    again = engine.submit([*PROMPT, *answer, 3], 1, reuse_cache=True)
    again.result()
    assert again.cached == len(PROMPT) + len(answer) - 1


def test_a_generation_after_one_that_was_abandoned_is_not_disturbed_by_steps_under_way(cuda: FakeCuda) -> None:
    engine = captured_engine()
    expected = tokens_of(engine, [[7, 7]], 9)
    stream = engine.stream(PROMPT, 30)
    next(stream), next(stream)
    del stream
    assert tokens_of(engine, [[7, 7]], 9) == expected


@pytest.mark.parametrize("sampling", [{}, NUCLEUS], ids=["greedy", "nucleus"])
def test_logits_that_mean_nothing_end_in_an_error(sampling: dict[str, float], cuda: FakeCuda) -> None:
    engine = captured_engine()
    with torch.inference_mode():
        engine.runner.builder.decoder.head.norm.weight.fill_(float("nan"))
    with pytest.raises(GraphError, match="not finite"):
        engine.generate([PROMPT], 4, **sampling)


def test_host_asks_torch_for_one_copy_a_step_and_nothing_else(cuda: FakeCuda) -> None:
    engine = captured_engine()
    for sampling, count in (({}, 32), (PLAIN, 16)):
        counted, log = CountedOps(), [0, 0]  # lengths of the log

        def count_steps(
            stage: str, group: object, done: int, total: int, counted=counted, log=log, count=count
        ) -> None:
            """Count what the engine's thread asks for between the tokens 10 and 10 + count."""
            if stage == "generate" and done == 10:
                log[0] = len(cuda.log)
                counted.__enter__()
            elif stage == "generate" and done == 10 + count:
                counted.__exit__(None, None, None)
                log[1] = len(cuda.log)

        engine._on_progress = count_steps
        engine.submit(PROMPT, 12 + count, ignore_eos=True, **sampling).result()
        assert counted.counts == {"aten.copy_.default": count}
        steps = cuda.log[slice(*log)]
        assert len(steps) == 3 * count  # a replay, its copy's mark, a wait for an earlier one's
        assert [word.split()[0] for word in steps[0::3]] == ["replay"] * count
        assert all(word.endswith("recorded in main") for word in steps[1::3])
        marks = [word.split()[1] for word in steps[1::3]]
        waited = [word.split()[1] for word in steps[2::3]]
        assert waited[LAG:] == marks[:-LAG]


def test_closing_gives_graphs_and_pool_back(cuda: FakeCuda) -> None:
    engine = captured_engine()
    tokens_of(engine, [PROMPT], 3)
    tokens_of(engine, PROMPTS, 3, **PLAIN)
    stats = engine.stats
    assert stats["captured_graphs"] == 2
    assert stats["captured_bytes"] == 2 * cuda.nbytes_of_a_graph
    assert isinstance(stats["capture_seconds"], float)
    engine.close()
    assert all(graph.is_reset for graph in cuda.graphs)
    assert cuda.log[-4:] == ["synchronize", "reset 0", "reset 1", "empty_cache"]


def test_warming_up_captures_what_will_run(cuda: FakeCuda) -> None:
    engine = captured_engine()
    engine.warm_up(1, SamplingParams(**NUCLEUS))
    assert len(cuda.graphs) == 1
    assert cuda.graphs[0].num_replays == 0
    assert tokens_of(engine, [PROMPT], 5, **NUCLEUS) == tokens_of(engine_of(), [PROMPT], 5, **NUCLEUS)
    assert len(cuda.graphs) == 1


def test_a_timed_decode_takes_as_many_steps_as_it_says_each_time(cuda: FakeCuda) -> None:
    engine = captured_engine()
    tokens_of(engine, [PROMPT], 3)  # the limits of a generation are not those of a measurement
    work = RandomBatch(engine, 3, 4, 3, 6, seed=1)
    work.fill()
    starts = engine.runner.programs.sampling_rows.state.span.starts
    for _ in range(2):
        before = cuda.graphs[0].num_replays
        work.decode()
        assert cuda.graphs[0].num_replays - before == 6
        assert starts.tolist() == [10, 10, 10]
