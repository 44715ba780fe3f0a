"""The kernels that find and fill slots for experts, against slots that give way by age, written once more."""

import pytest
import torch
from expert_slot_cases import check, layer_of, walk
from mixture_cases import NAN, Case, answers_of, dense_case, packed_case
from support.comparisons import OldestFirst

from graphcore.kernels.gpu.experts.fetch import take_slots
from graphcore.kernels.gpu.experts.launch import launch_add_experts, launch_cached_experts, launch_packed_experts
from graphcore.kernels.ops.expert_slots import ExpertSlots

pytestmark = pytest.mark.thorough

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
@pytest.mark.parametrize(("num_experts", "num_slots", "choices"), [(12, 5, 3), (8, 2, 4), (7, 7, 2), (33, 9, 1)])
def test_a_walk_leaves_what_slots_by_age_leave(num_experts: int, num_slots: int, choices: int, rows: int) -> None:
    experts, model = layer_of(num_experts, num_slots, torch.bfloat16), OldestFirst(num_slots)
    for chosen in walk(rows, num_experts, rows, choices, 12):
        take_slots(chosen, experts)
        model.ask(chosen.flatten().tolist())
        check(experts, chosen, model)
    assert min(model.loads, model.hits) > 0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
@pytest.mark.parametrize("width", [1, 5, 16, 700, 4099])
def test_experts_of_any_size_are_copied_whole(dtype: torch.dtype, width: int) -> None:
    shapes = ((width,), (width,), (2 * width,))
    experts, model = layer_of(5, 2, dtype, shapes), OldestFirst(2)
    for chosen in walk(3, 5, 1, 2, 6):
        take_slots(chosen, experts)
        model.ask(chosen.flatten().tolist())
        check(experts, chosen, model)


def test_padding_changes_nothing_but_the_number_of_calls() -> None:
    experts = layer_of(6, 3, torch.float32)
    take_slots(torch.tensor([[4, 2]]), experts)
    before = [one.clone() for one in (experts.places, experts.holders, experts.last_use, *experts.slots)]
    take_slots(torch.full((3, 2), -1), experts)
    after = (experts.places, experts.holders, experts.last_use, *experts.slots)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert experts.tallies.tolist() == [2, 0, 2, 0]


def case_of(form: str, tokens: int, dtype: torch.dtype) -> Case:
    if form == "dense":
        return dense_case(tokens, dtype)
    return packed_case(form, tokens, dtype, *((256, 256) if form == "q4_k" else (32, 32)), experts=6, top_k=3)


# In the interpreter the kernel of many rows is cheap, and that of few rows takes up to a minute to unpack its weights:
# of those, the next test has a packed one in CI. Eight rows are as three, each a program of the same kernel.
CASES = [(form, rows, torch.bfloat16) for form in ("dense", "mxfp4") for rows in (1, 2, 3, 8, 16)]
CASES += [("dense", 2, dtype) for dtype in (torch.float32, torch.float16)]
CASES += [("q4_0", 2, torch.float32), ("q4_k", 1, torch.float16)]
CASES += [(form, 16, torch.bfloat16) for form in ("q4_0", "q4_k")]
MARKS = {
    ("q4_0", 16): (pytest.mark.thorough,),
    **dict.fromkeys(
        [("dense", 8), ("q4_k", 16), ("mxfp4", 1), ("mxfp4", 2), ("mxfp4", 3), ("mxfp4", 8), ("q4_0", 2), ("q4_k", 1)],
        (pytest.mark.slow,),
    ),
}


@pytest.mark.parametrize(
    ("form", "tokens", "dtype"), [pytest.param(*case, marks=MARKS.get(case[:2], ())) for case in CASES]
)
def test_cached_experts_answer_with_the_bits_of_resident_ones(form: str, tokens: int, dtype: torch.dtype) -> None:
    """Two slots for three choices of a token: some experts are read where they wait."""
    case = case_of(form, tokens, dtype)
    how = (case.biases, case.hidden, case.gating, list(case.formats))
    poison = [torch.full_like(one[:2], NAN if one.is_floating_point() else 255) for one in case.weights]
    experts = ExpertSlots.empty(case.weights, poison)
    model = OldestFirst(2)
    for shift in range(2):
        chosen = (case.chosen + shift) % 6
        if shift == 1:
            chosen[0, 1] = -1
        model.ask(chosen.flatten().tolist())
        found = launch_cached_experts(case.x, chosen, experts, *how)
        resident = launch_packed_experts(case.x, chosen, case.weights, case.biases, None, *how[1:])
        assert torch.equal(found, resident)
        assert experts.tallies.tolist()[1:] == [model.hits, model.loads, model.without]
    assert model.without > 0
    plain = answers_of(case.choosing(chosen.tolist()))
    assert (found.double() - plain).abs().max() < 0.05 * max(float(plain.abs().max()), 1)


@pytest.mark.parametrize(("form", "tokens"), [("dense", 2), ("mxfp4", 1)])
def test_a_step_adds_the_answers_of_experts_in_slots_and_elsewhere(form: str, tokens: int) -> None:
    case = case_of(form, tokens, torch.bfloat16)
    how = (case.hidden, case.gating, list(case.formats))
    waiting = [one.clone() for one in case.weights]
    experts = ExpertSlots.empty(waiting, [torch.zeros_like(one[:2]) for one in case.weights])
    take_slots(case.chosen, experts)
    for one in waiting:  # no expert in a slot is read where it waits
        one[experts.holders] = NAN if one.is_floating_point() else 255
    shares = torch.rand(case.chosen.shape, generator=torch.Generator().manual_seed(1)).to(case.x.dtype)
    found, resident = torch.zeros(2, tokens, case.x.shape[1])
    places = (experts.places, *how, None, experts.waiting)
    launch_add_experts(found, case.x, case.chosen, shares, experts.slots, case.biases, *places)
    launch_add_experts(resident, case.x, case.chosen, shares, case.weights, case.biases, None, *how)
    assert torch.equal(found, resident)
    assert resident.abs().max() > 0
