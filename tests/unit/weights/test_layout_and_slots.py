"""Where weights stand in a buffer, and that modules really read them there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphcore.nn.linear import Linear
from graphcore.weights.layout import ALIGNMENT, Layout, aligned, layout_of
from graphcore.weights.slots import Slot, bind

CPU = torch.device("cpu")
SHAPES = st.lists(st.integers(0, 40), min_size=0, max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64])


def layout_of_shapes(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Layout:
    return layout_of((f"w{i}", torch.empty(shape, dtype=dtype, device="meta")) for i, shape in enumerate(shapes))


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 256), (255, 256), (256, 256), (257, 512), (1000, 1024)])
def test_sizes_are_rounded_up_to_256_bytes(nbytes: int, expected: int) -> None:
    assert aligned(nbytes) == expected


def test_places_follow_each_other_in_order_on_the_next_multiple() -> None:
    layout = layout_of_shapes((8, 8), (3,), (64, 2))
    assert {name: (place.offset, place.shape) for name, place in layout.places.items()} == {
        "w0": (0, (8, 8)),
        "w1": (256, (3,)),
        "w2": (512, (64, 2)),
    }
    assert layout.nbytes == 1024


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=8))
def test_every_offset_is_aligned_and_no_two_places_overlap(tensors: list[tuple[list[int], torch.dtype]]) -> None:
    layout = layout_of((f"w{i}", torch.empty(s, dtype=d, device="meta")) for i, (s, d) in enumerate(tensors))
    end = 0
    for place, (shape, dtype) in zip(layout.places.values(), tensors, strict=True):
        assert place.offset % ALIGNMENT == 0
        assert place.offset >= end
        assert place.nbytes == torch.empty(shape, dtype=dtype).nbytes
        end = place.offset + place.nbytes
    assert end <= layout.nbytes < end + ALIGNMENT


@pytest.mark.parametrize("nbytes", [1, 100, 256, 4096, 5000])
def test_a_slot_begins_on_a_multiple_of_256_wherever_the_memory_began(nbytes: int) -> None:
    slots = [Slot.allocate(nbytes, CPU) for _ in range(8)]
    assert all(slot.raw.data_ptr() % ALIGNMENT == 0 and len(slot.raw) == nbytes for slot in slots)


def test_views_are_the_slot_s_own_bytes_at_their_offsets() -> None:
    layout = layout_of_shapes((4, 3), (5,), dtype=torch.bfloat16)
    slot = Slot.allocate(layout.nbytes, CPU)
    views = slot.views(layout)
    slot.raw.zero_()
    views["w1"].copy_(torch.tensor([1.0, 2.0, -3.0, 0.5, 8.0]))
    assert views["w0"].shape == (4, 3)
    assert not views["w0"].any()
    assert slot.raw[256:266].view(torch.bfloat16).tolist() == [1.0, 2.0, -3.0, 0.5, 8.0]
    assert all(view.data_ptr() % ALIGNMENT == 0 for view in views.values())


def test_a_bound_module_reads_the_slot_and_follows_it_when_its_bytes_change() -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"up": Linear(3, 2, bias=True, dtype=torch.float32)})
    layout = layout_of(module.named_buffers())
    slot = Slot.allocate(layout.nbytes, CPU)
    views = slot.views(layout)
    for name, view in views.items():
        bind(module, name, view)
    x = torch.tensor([[1.0, 10.0, 100.0]])
    for factor in (1.0, 2.0):
        views["up.weight"].copy_(factor * torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        views["up.bias"].copy_(torch.tensor([0.5, -0.5]))
        assert module["up"](x).tolist() == [[factor * 321.0 + 0.5, factor * 654.0 - 0.5]]
    assert module["up"].weight.data_ptr() == slot.raw.data_ptr() + layout.places["up.weight"].offset


def test_binding_something_that_is_no_buffer_is_our_own_mistake() -> None:
    module = Linear(3, 2, bias=False, dtype=torch.float32)
    with pytest.raises(AssertionError, match="Linear has no weight wait"):
        bind(module, "wait", torch.zeros(2))
