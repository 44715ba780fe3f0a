"""Compiled programs: as eager ones to rounding, one graph per kind, no recompilation after warm-up."""

from dataclasses import replace

import pytest
import torch
from tiny_graph import FULL, SLIDING, builder_of, feed, model_of, random_ids, scored

from graphcore.graph.builder import GraphBuilder
from graphcore.nn.spec import MLPSpec, MoESpec

pytestmark = pytest.mark.thorough

# float32: fused kernels sum in another order; logits of order one
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def compiled() -> GraphBuilder:
    """A builder of two kinds of layer whose programs for two rows are compiled by Inductor."""
    with torch.inference_mode():
        builder = builder_of(model_of(SLIDING, FULL), "compiled")
        builder.prefill(2)
        builder.decode(2, is_greedy=True)
    return builder


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.thorough
def test_any_prefill_length_gives_eager_s_logits_without_recompiling(compiled: GraphBuilder) -> None:
    eager = builder_of(compiled.decoder.spec, "eager")
    programs = eager.prefill(2), compiled.prefill(2)
    before = graphs()
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (*range(2, 35), 63, 64, 65, 127, 128, 200):
            rows = random_ids(2, tokens, seed=tokens)
            expected, found = (feed(program, rows, [0, 0]) for program in programs)
            assert (found - expected).abs().max() < ROUNDING, tokens
    assert graphs() == before


@pytest.mark.thorough
def test_decode_across_ring_and_context_gives_eager_s_logits_without_recompiling(compiled: GraphBuilder) -> None:
    """The window is 24 and the context 256: the ring wraps ten times, and the last token fills the cache."""
    eager = builder_of(compiled.decoder.spec, "eager")
    rows = [random_ids(5)[:5], random_ids(2)[:2]]
    programs = [(builder.prefill(2), builder.decode(2, is_greedy=False)) for builder in (eager, compiled)]
    with torch.compiler.set_stance("fail_on_recompile"):
        for prefill, _ in programs:
            feed(prefill, rows, [0, 0])
        for position in range(251):
            tokens = random_ids(2, 1, seed=position)
            expected, found = (feed(decode, tokens, [5 + position, 2 + position]) for _, decode in programs)
            assert (found - expected).abs().max() < ROUNDING, position


@pytest.mark.thorough
def test_chunks_after_a_start_give_eager_s_logits_without_recompiling(compiled: GraphBuilder) -> None:
    eager = builder_of(compiled.decoder.spec, "eager")
    ids, at = random_ids(2, 90), 0
    programs = eager.prefill(2), compiled.prefill(2)
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (17, 2, 31, 40):
            rows = [row[at : at + count] for row in ids]
            expected, found = (feed(program, rows, [at, at]) for program in programs)
            assert (found - expected).abs().max() < ROUNDING
            at += count


@pytest.mark.slow
@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize("layers", [2, 8])
def test_number_of_compilations_does_not_depend_on_the_number_of_layers(layers: int) -> None:
    names: list[str] = []
    before = graphs()
    builder = builder_of(model_of(*((SLIDING, FULL) * (layers // 2))), "compiled", names=names)
    programs = builder.prefill(2), builder.decode(2, is_greedy=True)
    builder.prefill(2)
    feed(programs[0], random_ids(2, 9), [0, 0])
    feed(programs[1], random_ids(2, 1), [9, 9])
    assert names == ["block0_prefill_2", "block1_prefill_2", "head_2", "block0_decode_2", "block1_decode_2"]
    assert graphs() - before == 5


@pytest.mark.usefixtures("_traced_only")
def test_compiling_leaves_the_caches_as_they_were() -> None:
    builder = builder_of(model_of(SLIDING, FULL), "compiled")
    for cache in builder.caches:
        cache.k.fill_(3.0)
        cache.v.fill_(4.0)
    builder.prefill(2)
    builder.decode(2, is_greedy=True)
    builder.score(2, is_one_token=False)
    assert all((cache.k == 3.0).all() and (cache.v == 4.0).all() for cache in builder.caches)


@pytest.mark.usefixtures("_traced_only")
def test_more_models_than_the_recompile_limit_live_in_one_process() -> None:
    """Each has its own sizes, so nothing can be shared; the first must still run when the last has been compiled."""
    limit, token = 2, random_ids(2, 1)
    specs = [model_of(replace(FULL, mlp=MLPSpec(size, "silu"))) for size in range(16, 16 + 8 * (limit + 2), 8)]
    with torch._dynamo.config.patch(recompile_limit=limit):
        programs = [builder_of(spec, "compiled").decode(2, is_greedy=True) for spec in specs]
        with torch.compiler.set_stance("fail_on_recompile"):
            for spec, decode in zip(specs, programs, strict=True):
                expected = feed(builder_of(spec, "eager").decode(2, is_greedy=False), token, [9, 9])
                assert (feed(decode, token, [9, 9]) - expected).abs().max() < ROUNDING


@pytest.mark.usefixtures("_traced_only")
def test_heads_of_all_tokens_and_of_one_are_compiled_once_each() -> None:
    names: list[str] = []
    builder = builder_of(model_of(FULL), "compiled", names=names)
    hidden = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    expected = builder.decoder.head(hidden)
    for _ in range(2):
        assert (scored(builder, hidden) - expected).abs().max() < ROUNDING
        assert (scored(builder, hidden[:, 3:4]) - expected[:, 3:4]).abs().max() < ROUNDING
    assert names == ["head_of_all_2", "head_2"]


@pytest.mark.thorough
def test_head_of_all_compiles_for_any_length(compiled: GraphBuilder) -> None:
    compiled.score(2, is_one_token=False)
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (2, 3, 64, 128, 199):
            hidden = torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(tokens))
            assert (scored(compiled, hidden) - compiled.decoder.head(hidden)).abs().max() < ROUNDING


EXPERTS = replace(SLIDING, mlp=MoESpec(experts=5, top_k=2, hidden=20), sandwich=False)


@pytest.mark.usefixtures("_traced_only")
def test_both_halves_of_a_block_with_experts_run_any_length_without_recompiling() -> None:
    names: list[str] = []
    spec = model_of(EXPERTS, FULL, EXPERTS)
    eager, compiled = builder_of(spec, "eager"), builder_of(spec, "compiled", names=names)
    pairs = [
        [builder.prefill(2) for builder in (eager, compiled)],
        [builder.decode(2, is_greedy=False) for builder in (eager, compiled)],
    ]
    assert [name for name in names if name.startswith("block0")] == [
        "block0_prefill_2",
        "block0_experts_prefill_2",
        "block0_decode_2",
        "block0_experts_decode_2",
    ]
    assert len(names) == 7  # and one whole block for each phase, and the head
    with torch.compiler.set_stance("fail_on_recompile"):
        for at, rows in (
            (0, random_ids(2, 2)),
            (2, [random_ids(70)[:70], random_ids(70)[:33]]),
            (80, random_ids(2, 1)),
        ):
            programs = pairs[len(rows[0]) == 1]
            expected, found = (feed(program, rows, [at, at]) for program in programs)
            assert (found - expected).abs().max() < ROUNDING
