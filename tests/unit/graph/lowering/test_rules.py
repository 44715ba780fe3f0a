"""Each rule on the smallest module that shows it: what the operations are before and after, and what stops it."""

import threading
from collections.abc import Callable

import pytest
import torch
from block_specs import ARCHITECTURES, DIM, PLAIN, attending
from support.cases import in_case
from tiny_graph import NORM
from torch import Tensor, nn

from graphcore.graph.lowering import operations, residual_adds, rules
from graphcore.graph.lowering.tracing import Rule, Traced, operation_name, trace
from graphcore.kernels.ops.attend import attend
from graphcore.nn.attention import Attention
from graphcore.nn.block import Block
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import ActivationModule
from graphcore.nn.norm import build_norm
from graphcore.nn.rope import rotate


class Parts(nn.Module):
    """Modules to write a forward with."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b = (Linear(DIM, DIM, bias=False, dtype=torch.float32) for _ in range(2))
        self.one = Linear(DIM, 1, bias=False, dtype=torch.float32)
        self.norm, self.after, self.head_norm = (build_norm(NORM, size) for size in (DIM, DIM, 8))
        self.act = ActivationModule("silu")
        self.attention = Attention(PLAIN.attention, DIM, torch.float32)
        self.written = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.written(self, x)


def calls(traced: Traced) -> list[str]:
    """Return what is called, in order."""
    nodes = [node for node in traced.nodes() if node.op.startswith("call")]
    return [operation_name(node, traced.modules).rpartition(" ")[2] for node in nodes]


def written(forward: Callable[..., Tensor], *rules: Rule) -> list[str]:
    return calls(trace(Parts(forward), rules))


def test_views_of_heads_are_nothing_and_cuts_are_parts() -> None:
    assert not {"flatten", "unflatten"} & set(calls(trace(Block(PLAIN, torch.float32))))
    assert written(lambda m, x: m.a(x).split([16, 16], dim=-1)[0]) == ["a", "parts", "getitem"]
    assert written(lambda m, x: m.a(x).chunk(2, dim=-1)[1]) == ["a", "parts", "getitem"]


def test_arguments_are_found_by_place_however_they_were_given() -> None:
    traced = trace(Parts(lambda m, x: m.a(x=m.norm(x, dtype=torch.float16))), (rules.products, rules.norm_and_product))
    assert [node.args[1] for node in traced.nodes(operations.project)] == [operations.NormCall("norm", torch.float16)]


class Doubled(Linear):
    """No Linear: a leaf of that name would leave half of it out."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_what_does_not_fit_is_a_misfit() -> None:
    for forward, reason in [
        (lambda m, x: m.a(x).unflatten(-1, (-1, 8)).chunk(2, dim=-1)[0], "chunk"),
        (lambda m, x: m.head_norm(m.a(x).unflatten(-1, (-1, 8))).flatten(-2), "flatten"),
        (lambda m, x: m.a(x).unflatten(-1, (-1, 8)) * m.b(x).unflatten(-1, (-1, 8)), "mul"),
        (lambda m, x: m.act(m.one(x)) * m.b(x), "mul"),  # broadcast
        (lambda m, x: x + m.one(m.norm(x)), "add"),
        (lambda m, x: m.head_norm(m.a(x)), "RMSNorm head_norm"),
        (lambda m, x: m.a(x)[..., 16:], "getitem"),
        (lambda m, x: m.a(x).chunk(2)[1], "chunk"),  # of the batch
        (lambda m, x: m.a(x) * (1 + m.norm.weight), "a tensor that the forward computes from weights"),
        (lambda m, x: m.a(x) if x.sum() > 0 else x, "symbolically traced variables cannot be used as inputs"),
        (lambda m, x: m.a(x) * len(x), "'len' is not supported in symbolic tracing by default"),
        (lambda m, x: m.a(x, 3), "too many positional arguments"),
    ]:
        with in_case(forward, reason):
            found = trace(Parts(forward), IN_PLACE).misfit
            assert found is not None
            assert found.startswith(reason)


def test_a_subclass_is_not_taken_for_what_it_is_derived_from() -> None:
    parts = Parts(lambda m, x: m.a(x))
    parts.a = Doubled(DIM, DIM, bias=False, dtype=torch.float32)
    assert trace(parts).misfit is not None


def test_products_that_round_differently_stay_apart() -> None:
    def forward(m: Parts, x: Tensor) -> Tensor:
        return m.act(m.a(x)) * m.b(x)

    parts = Parts(forward)
    assert calls(trace(parts, GATED)) == ["gated"]
    parts.b.int8_order = "online"
    assert "gated" not in calls(trace(parts, GATED))


def test_casts_are_nothing_where_everything_is_float32() -> None:
    assert written(lambda m, x: m.a(x.to(torch.float16)).float()) == ["to", "a", "float"]
    assert written(lambda m, x: m.a(x.to(torch.float16)).float(), rules.without_casts) == ["a"]


GATED = (rules.gate_and_up, rules.product_and_activation, rules.products, rules.gates)


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        (lambda m, x: m.act(m.a(x)) * m.b(x), ["gated"]),
        (lambda m, x: m.act(m.a(x).float()) * m.b(x).float(), ["gated"]),
        (lambda m, x: m.act(m.a(x)), ["project"]),
        (lambda m, x: m.a(x) * m.b(x), ["project", "project", "gate"]),
        (lambda m, x: m.act(m.a(x)) * m.b(m.norm(x)), ["project", "norm", "project", "gate"]),  # two inputs
        (lambda m, x: m.act(x) * m.b(x), ["project", "gate"]),
        (lambda m, x: m.b(x) * m.act(x), ["project", "gate"]),
    ],
)
def test_activations_are_part_of_a_product_or_a_gate(forward: Callable[..., Tensor], found: list[str]) -> None:
    assert written(forward, *GATED) == found


def test_a_gate_that_somebody_else_reads_stays_a_product() -> None:
    def forward(m: Parts, x: Tensor) -> Tensor:
        gate = m.a(x)
        return m.act(gate) * m.b(x) + gate

    assert "gated" not in written(forward, *GATED)


@pytest.mark.parametrize("spec", ["llama", "qwen3", "gpt2"])
def test_attention_takes_norms_and_rotation_and_its_products_are_one(spec: str) -> None:
    block = Block(ARCHITECTURES[spec], torch.float32)
    traced = trace(block, (rules.heads, rules.queries_keys_values))
    (attend,), (project,) = traced.nodes(operations.attend_heads), traced.nodes(operations.project)
    assert project.args[2] == ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    assert (attend.args[3] is None) == (spec == "gpt2")
    assert [norm and norm.name for norm in attend.args[4:6]] == (
        ["self_attn.q_norm", "self_attn.k_norm"] if spec == "qwen3" else [None, None]
    )


class HalfRotated(Parts):
    """Attention whose queries alone are rotated."""

    def __init__(self) -> None:
        super().__init__(lambda _, x: x)

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, starts: Tensor, counts: Tensor
    ) -> Tensor:
        return attend(rotate(self.a(x), rope), self.b(x), self.b(x), k_cache, v_cache, table, starts, counts, 0, 1.0)


def test_only_what_rotates_both_is_taken() -> None:
    names = calls(trace(HalfRotated(), (rules.heads,)))
    assert "rotate" in names
    assert "attend_heads" not in names


IN_PLACE = (
    rules.products,
    residual_adds.sums_when_read,
    residual_adds.product_and_sum,
    residual_adds.norm_and_sum,
    residual_adds.scaled_sums,
)


def test_a_sum_changes_the_stream_only_where_nobody_reads_it_behind() -> None:
    for forward, found in [
        (lambda m, x: x + m.a(m.act(x)), ["add_project"]),
        (lambda m, x: m.a(m.act(x)) + x, ["add_project"]),
        (lambda m, x: x + m.norm(m.a(x)), ["project", "add_normed"]),
        (lambda m, x: x + m.a(x) * 0.5, ["project", "add_scaled"]),
        (lambda m, x: x + 0.5 * m.a(x), ["project", "add_scaled"]),
        (lambda m, x: x + m.a(m.act(x)) + m.b(m.act(x)), ["add_project", "add_project"]),
        (
            lambda m, x: (x + m.a(m.act(x))) + (x + m.b(m.act(x))),
            ["project", "scaled_sum", "add_project", "add_scaled"],
        ),
        (lambda m, x: x + m.b(x + m.a(x)), ["project", "scaled_sum", "add_project"]),  # x is read behind the first
        # a row of the sum would be written while others are still computed from the stream
        (lambda m, x: x + m.a(x), ["project", "add_scaled"]),
        (lambda m, x: x + m.a(m.norm(x).to(torch.float16)), ["norm", "to", "project", "add_scaled"]),
        # h is x, or may be
        (lambda m, x: x.float() * m.b(x + m.a(m.act(x))), ["float", "project", "scaled_sum", "project", "gate"]),
        (lambda m, x: x + m.a(m.act(x)) + 1.0, ["add_project", "add"]),
    ]:
        with in_case(forward, found):
            names = written(forward, rules.gates, *IN_PLACE)
            assert [name for name in names if name not in ("mul", "act")] == found


def test_a_sum_waits_for_its_first_reader() -> None:
    """b reads x before the sum of x and a, which Python computes first, changes it."""
    traced = trace(Parts(lambda m, x: x + m.a(m.act(x)) + m.b(m.norm(x)) + m.a(m.after(x))), IN_PLACE)
    assert "scaled_sum" not in calls(traced)


def test_a_product_that_is_cast_stays_float32() -> None:
    traced = trace(Parts(lambda m, x: m.a(x).float()), (rules.products, rules.wide_products))
    assert [node.args[4] for node in traced.nodes(operations.project)] == [True]


def test_norms_go_into_what_reads_them() -> None:
    def both(m: Parts, x: Tensor) -> Tensor:
        fed = m.norm(x, torch.float16)
        return m.a(fed) + m.b(fed)

    every = trace(Parts(both), (rules.products, rules.norm_and_products))
    assert calls(every) == ["project", "project", "add"]
    assert {node.args[1] for node in every.nodes(operations.project)} == {operations.NormCall("norm", torch.float16)}
    assert written(both, rules.products, rules.norm_and_product) == ["norm", "project", "project", "add"]
    assert written(lambda m, x: m.a(m.norm(x)), rules.products, rules.norm_and_product) == ["project"]


def test_a_norm_is_not_moved_behind_a_sum_that_changes_what_it_reads() -> None:
    def forward(m: Parts, x: Tensor) -> Tensor:
        fed = m.norm(x)
        total = x + m.a(x)
        return total + m.act(total) * m.b(fed)

    names = written(forward, *IN_PLACE, rules.norm_and_products)
    assert "norm" in names


def test_a_sum_of_a_normalised_answer_is_normalised_in_one_go() -> None:
    block = Block(ARCHITECTURES["gemma3"], torch.float32)
    names = calls(trace(block, (*IN_PLACE, residual_adds.norm_of_sum)))
    assert names.count("add_normed_and_norm") == 1
    assert names.count("add_normed") == 1


def test_experts_and_their_weighted_sum_are_one() -> None:
    block = Block(ARCHITECTURES["gpt_oss"], torch.float32)
    names = calls(trace(block, (rules.products, residual_adds.sums_when_read, residual_adds.experts_and_sum)))
    assert names[-1] == "add_experts"
    assert not {"weighted_sum", "mlp.experts"} & set(names)


def test_blocks_of_one_spec_share_their_operations() -> None:
    blocks = [Block(attending(window=8), torch.float32) for _ in range(2)]
    first, second = (trace(block, IN_PLACE) for block in blocks)
    assert str(first.graph) == str(second.graph)


def test_a_thread_that_computes_meanwhile_is_not_traced() -> None:
    x, other = torch.ones(1, DIM), Parts(lambda parts, x: parts.b(parts.act(parts.norm(parts.a(x)))))
    for weight in other.buffers():
        weight.fill_(0.5)
    expected, found = other(x), []

    def forward(parts: Parts, y: Tensor) -> Tensor:
        threads = [threading.Thread(target=lambda one=one: found.append(one(x))) for one in (other, parts.a)]
        for thread in threads:
            thread.start()
            thread.join()
        return parts.b(parts.a(y))

    traced = trace(Parts(forward))
    assert calls(traced) == ["a", "b"]
    assert torch.equal(found[0], expected)
    assert found[1].shape == (1, DIM)


def test_threads_trace_one_after_the_other() -> None:
    has_begun, found, call = threading.Event(), [], nn.Module.__call__

    def second(parts: Parts, x: Tensor) -> Tensor:
        has_begun.set()
        return parts.b(x)

    thread = threading.Thread(target=lambda: found.append(trace(Parts(second))))

    def first(parts: Parts, x: Tensor) -> Tensor:
        thread.start()
        assert not has_begun.wait(0.1)
        return parts.a(x)

    assert calls(trace(Parts(first))) == ["a"]
    thread.join()
    assert calls(found[0]) == ["b"]
    assert nn.Module.__call__ is call
