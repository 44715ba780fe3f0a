"""Programs that run eager: their steps, what a pass leaves behind, and that passes can be cut anywhere."""

import pytest
import torch
from support.engine_fakes import same, snapshot
from tiny_graph import CPU, FULL, SLIDING, VOCAB, builder_of, feed, model_of, random_ids, scored

from graphcore.graph.builder import GraphBuilder
from graphcore.graph.state import StepState
from graphcore.graph.step import BlocksStep, EmbedStep, GreedyStep, HeadStep
from graphcore.nn.block import Block
from graphcore.nn.decoder import Head
from graphcore.nn.rope import rope_table
from graphcore.nn.span import Span
from graphcore.weights.groups import LayerGroup, split_layers

SPEC = model_of(SLIDING, FULL, SLIDING)
EXACT = 2e-5  # float32, logits of order one; the order of a sum may differ


def eager(groups: list[LayerGroup] | None = None, batch: int = 2) -> GraphBuilder:
    return builder_of(SPEC, "eager", batch, groups)


def test_a_program_is_embedding_then_each_group_then_head_and_each_step_knows_its_group() -> None:
    steps = eager(split_layers(3, 2)).prefill(2).steps
    assert [type(step) for step in steps] == [EmbedStep, BlocksStep, BlocksStep, HeadStep]
    assert [step.group for step in steps] == [0, 1, 2, 3]
    assert [len(step.blocks) for step in steps if isinstance(step, BlocksStep)] == [2, 1]


def test_a_greedy_decode_ends_with_the_choice_which_reads_no_weights_that_move() -> None:
    builder = eager()
    plain, greedy = builder.decode(2, is_greedy=False), builder.decode(2, is_greedy=True)
    assert [type(step) for step in greedy.steps] == [*(type(step) for step in plain.steps), GreedyStep]
    assert greedy.steps[-1].group == 0


def test_a_pass_is_the_modules_one_after_the_other_each_with_its_own_rope_and_cache() -> None:
    builder, tokens = eager(), 9
    rows, decoder = random_ids(2, tokens), builder.decoder
    span = Span(torch.zeros(2, dtype=torch.int64), torch.full((2,), tokens))
    x = decoder.embed_tokens(torch.tensor(rows), span)
    for spec, layer in zip(SPEC.blocks, decoder.layers, strict=True):
        assert spec.attention.rope is not None
        rope = rope_table(spec.attention.rope, 8, tokens)[None].expand(2, -1, -1, -1)
        size = (2, 2, spec.attention.window or tokens, 8)
        x = layer(x, rope, span, torch.zeros(size), torch.zeros(size), torch.tensor([[0], [1]], dtype=torch.int32))
    assert (feed(builder.prefill(2), rows, [0, 0]) - decoder.head(x)[:, -1]).abs().max() < EXACT


def test_eager_functions_are_the_modules_own() -> None:
    builder = eager()
    runs = {bound.run for step in builder.prefill(2).steps if isinstance(step, BlocksStep) for bound in step.blocks}
    assert runs == {Block.forward}
    heads = [step.run for step in builder.score(2, is_one_token=False).steps if isinstance(step, HeadStep)]
    assert heads == [Head.forward]
    assert builder.functions.compiled == {}


def test_groups_of_any_size_give_the_same_logits() -> None:
    rows = random_ids(2, 9)
    one_each, together = eager(), eager(split_layers(3, 3))
    assert torch.equal(feed(one_each.prefill(2), rows, [0, 0]), feed(together.prefill(2), rows, [0, 0]))


@pytest.mark.parametrize("cuts", [(30,), (1, 29), (13, 17), (7, 7, 7, 9), (29, 1), (1,) * 30])
def test_a_prompt_may_be_cut_anywhere_around_the_window_of_24(cuts: tuple[int, ...]) -> None:
    rows = random_ids(2, 60)
    at_once = feed(eager().prefill(2), rows, [0, 0])
    builder = eager()
    prefill, decode = builder.prefill(2), builder.decode(2, is_greedy=False)
    at = 0
    for count in (30, *cuts):
        program = decode if count == 1 else prefill
        logits = feed(program, [row[at : at + count] for row in rows], [at, at])
        at += count
    assert (logits - at_once).abs().max() < EXACT


def test_rows_of_different_lengths_do_not_see_each_other_or_the_padding() -> None:
    rows = [random_ids(11)[:11], random_ids(4, seed=1)[:4]]
    together = feed(eager().prefill(2), rows, [0, 0])
    for row, ids in enumerate(rows):
        alone = feed(eager(batch=1).prefill(1), [ids], [0])
        assert (together[row] - alone[0]).abs().max() < EXACT


def test_greedy_decode_feeds_its_choice_back_and_moves_on_one_position() -> None:
    rows = random_ids(2, 7)
    builder = eager()
    greedy, plain = builder.decode(2, is_greedy=True), builder.decode(2, is_greedy=False)
    first = feed(builder.prefill(2), rows, [0, 0]).argmax(-1)
    feed(greedy, first[:, None].tolist(), [7, 7])
    chosen = [greedy.state.chosen.clone()]
    for _ in range(30):
        assert torch.equal(greedy.state.token_ids[:, 0], chosen[-1])
        assert greedy.state.span.starts.tolist() == [7 + len(chosen)] * 2
        for step in greedy.steps:
            step.replay()
        chosen.append(greedy.state.chosen.clone())
    again = eager()
    plain = again.decode(2, is_greedy=False)
    tokens = feed(again.prefill(2), rows, [0, 0]).argmax(-1)
    for position, expected in enumerate(chosen, start=7):
        tokens = feed(plain, tokens[:, None].tolist(), [position, position]).argmax(-1)
        assert torch.equal(tokens, expected)


def test_a_row_without_tokens_neither_moves_nor_writes() -> None:
    builder = eager()
    feed(builder.prefill(2), random_ids(2, 5), [0, 0])
    before = snapshot(builder.caches, 1)
    program = builder.decode(2, is_greedy=True)
    program.state.span.starts.copy_(torch.tensor([5, 5]))
    program.state.span.counts.copy_(torch.tensor([1, 0]))
    for _ in range(3):
        for step in program.steps:
            step.replay()
    assert program.state.span.starts.tolist() == [8, 5]
    assert same(snapshot(builder.caches, 1), before)


def test_a_decode_program_reads_its_inputs_at_one_address_for_its_whole_life() -> None:
    """A captured graph reads them there."""
    program = eager().decode(2, is_greedy=True)
    state = program.state
    addresses = [t.data_ptr() for t in (state.token_ids, state.span.starts, state.span.counts, state.chosen)]
    state.span.counts.fill_(1)
    for _ in range(2):
        for step in program.steps:
            step.replay()
    after = program.state
    assert addresses == [t.data_ptr() for t in (after.token_ids, after.span.starts, after.span.counts, after.chosen)]


def test_head_reads_each_row_s_last_real_token() -> None:
    builder = eager()
    program = builder.prefill(2)
    rows = [random_ids(6)[:6], random_ids(3)[:3]]
    logits = feed(program, rows, [0, 0])
    hidden = program.state.hidden
    expected = builder.decoder.head(hidden)
    assert (logits - torch.stack((expected[0, 5], expected[1, 2]))).abs().max() < EXACT
    assert logits.shape == (2, VOCAB)


def test_head_of_one_token_is_the_head_of_all_of_it() -> None:
    builder = eager()
    hidden = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(scored(builder, hidden), builder.decoder.head(hidden))


def test_an_empty_state_has_zero_inputs_of_its_batch() -> None:
    state = StepState.empty(3, 4, CPU)
    assert state.token_ids.shape == (3, 4)
    assert state.token_ids.dtype == state.span.starts.dtype == state.span.counts.dtype == torch.int64
    assert not any(t.any() for t in (state.token_ids, state.span.starts, state.span.counts, state.chosen))


def test_rows_are_padded_to_the_longest_and_to_the_state_s_batch() -> None:
    state = StepState.empty(3, 1, CPU)
    state.put_rows([[5, 6], [7]], [4, 9])
    assert state.token_ids.tolist() == [[5, 6], [7, 0], [0, 0]]
    assert (state.span.starts.tolist(), state.span.counts.tolist()) == ([4, 9, 0], [2, 1, 0])


def test_rows_of_one_token_keep_the_inputs_at_their_address() -> None:
    state = StepState.empty(2, 1, CPU)
    inputs = (state.token_ids, state.span.starts, state.span.counts)
    state.put_rows([[5]], [4])
    assert [tensor.tolist() for tensor in inputs] == [[[5], [0]], [4, 0], [1, 0]]
    assert state.token_ids is inputs[0]
