"""Which weights move together: each matrix in one group, vectors in none."""

import pytest
import torch
from support.fake_sources import GPT2, LLAMA, config_of, meta_decoder
from support.packed_matrices import stored_matrix

from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.nn.decoder import Decoder
from graphcore.nn.linear import Linear
from graphcore.weights.groups import Group, movable_groups, split_layers
from graphcore.weights.layout import ALIGNMENT, aligned
from graphcore.weights.slots import Slot


def groups_of(decoder: Decoder, size: int) -> list[Group]:
    parts = [decoder.head.part(rows) for rows in decoder.head_rows()]
    return movable_groups(decoder, split_layers(len(decoder.layers), size), parts)


@pytest.mark.parametrize(
    ("layers", "size", "expected"),
    [
        (6, 2, [[0, 1], [2, 3], [4, 5]]),
        (5, 2, [[0, 1], [2, 3], [4]]),
        (3, 8, [[0, 1, 2]]),
        (1, 1, [[0]]),
        (12, 5, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]),
    ],
)
def test_groups_are_consecutive_layers_and_the_last_may_have_fewer(
    layers: int, size: int, expected: list[list[int]]
) -> None:
    assert [list(group.layers) for group in split_layers(layers, size)] == expected


@pytest.mark.parametrize("raw", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_matrix_moves_with_one_group_and_no_vector_moves(raw: dict, size: int) -> None:
    layers = 12
    counts = {"n_layer": layers} if raw is GPT2 else {"num_hidden_layers": layers}
    decoder = meta_decoder(config_of(raw, **counts))
    groups = groups_of(decoder, size)
    moved = [weight.name for group in groups for weight in group.weights if weight.rows is None]
    matrices = [
        f"layers.{index}.{name}"
        for index, layer in enumerate(decoder.layers)
        for name, tensor in layer.named_buffers()
        if tensor.ndim == 2
    ]
    assert moved == matrices  # 0, 1, 2 ... 10, 11, not 0, 1, 10, 11, 2
    num_layer_groups = -(-layers // size)
    assert [group.index for group in groups] == list(range(1, len(groups) + 1))
    assert [weight.name for group in groups[num_layer_groups:] for weight in group.weights] == ["lm_head.weight"] * (
        len(groups) - num_layer_groups
    )


def test_the_heads_parts_are_all_of_its_rows_in_order() -> None:
    decoder = meta_decoder(config_of(LLAMA, vocab_size=1000))
    parts = [group for group in groups_of(decoder, 1) if group.label.startswith("head")]
    assert len(parts) > 1
    rows = [row for group in parts for weight in group.weights for row in weight.rows or ()]
    assert rows == list(range(1000))
    most = max(group.layout.nbytes for group in groups_of(decoder, 1) if not group.label.startswith("head"))
    assert max(group.layout.nbytes for group in parts) <= most
    assert [group.label for group in parts] == [f"head {at} of {len(parts)}" for at in range(1, len(parts) + 1)]


def test_a_group_is_named_by_its_layers() -> None:
    labels = [group.label for group in groups_of(meta_decoder(config_of(LLAMA, num_hidden_layers=5)), 2)]
    assert labels[:3] == ["layers 0 to 1", "layers 2 to 3", "layer 4"]


def test_a_groups_layout_has_a_place_of_its_own_for_each_weight() -> None:
    for group in groups_of(meta_decoder(config_of(LLAMA)), 2):
        end = 0
        for weight, slot in zip(group.weights, group.layout.places.values(), strict=True):
            assert slot.offset % ALIGNMENT == 0
            assert slot.offset >= end
            assert slot.shape == tuple(weight.tensor.shape)
            end = slot.offset + slot.nbytes
        assert end <= group.layout.nbytes


@pytest.mark.parametrize(("name", "block_nbytes"), [("iq2_xxs", 66), ("q4_k", 148)])
def test_whole_matrices_of_levels_have_the_file_s_bytes_on_the_link(name: str, block_nbytes: int) -> None:
    """The head's slices, and formats whose planes have about the file's size, cross the link as they are."""
    decoder = meta_decoder(config_of(LLAMA, hidden_size=256, intermediate_size=512, head_dim=128))
    for module in decoder.modules():
        if isinstance(module, Linear):
            module.pack(DevicePacking(name, module.outputs, module.inputs), "float")
    *layers, head = groups_of(decoder, 1)
    for group in layers:
        counts = [weight.packing.rows * weight.packing.columns for weight in group.weights if weight.packing]
        assert len(counts) == 7
        assert group.on_link.layout.nbytes == sum(aligned(count // 256 * block_nbytes) for count in counts)
        assert group.is_expanded == (name == "iq2_xxs")
        assert not group.on_link.is_expanded
    assert head.on_link is head


def test_a_group_is_expanded_weight_by_weight_and_others_are_copied() -> None:
    decoder = meta_decoder(config_of(LLAMA, hidden_size=256, intermediate_size=512, head_dim=128))
    layer = decoder.layers[0]
    matrices = {}
    for name, part in layer.named_modules():
        if isinstance(part, Linear):
            format_name = "iq3_s" if name.endswith(("q_proj", "down_proj")) else "q4_k"
            part.pack(DevicePacking(format_name, part.outputs, part.inputs), "float")
            matrices[f"layers.0.{name}.weight"] = stored_matrix(format_name, part.outputs, part.inputs)
    group = groups_of(decoder, 1)[0]
    arrived = Slot(torch.zeros(group.on_link.layout.nbytes, dtype=torch.uint8))
    slot = Slot(torch.zeros(group.layout.nbytes, dtype=torch.uint8))
    expand = group.expansion(arrived, slot)
    for weight in group.on_link.weights:
        assert weight.packing is not None
        packed = weight.packing.pack(matrices[weight.name].rows)
        arrived.views(group.on_link.layout)[weight.name].copy_(packed)
    expand()
    found = slot.views(group.layout)
    assert [*found] == [*matrices]
    for weight in group.weights:
        assert weight.packing is not None
        assert torch.equal(found[weight.name], weight.packing.pack(matrices[weight.name].rows))
