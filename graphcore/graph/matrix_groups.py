"""The order in which a decode step uses the matrices of a layer, and the groups of them that stream together.

q k v o | gate | up | down        groups of neighbours of one layer, none larger than the model's largest matrix

In a small model groups may be larger: `Decoder.least_part_nbytes`.
"""

from collections.abc import Iterator, Sequence

from torch import fx, nn

from graphcore.errors import GraphError
from graphcore.graph.block_parts import trace_parts
from graphcore.graph.lowering.operations import reorder
from graphcore.graph.lowering.targets import lower_to_instructions
from graphcore.graph.lowering.tracing import Traced
from graphcore.nn.block import Block
from graphcore.nn.decoder import Decoder, is_movable
from graphcore.nn.latent_attention import HeadLinear
from graphcore.nn.linear import Linear, projection_of
from graphcore.nn.spec import BlockSpec
from graphcore.weights.groups import LayerGroup
from graphcore.weights.layout import aligned

Together = tuple[str, ...]  # projections that have to be in one group


def matrix_groups(decoder: Decoder) -> list[LayerGroup]:
    """Return the layer groups of a decoder whose unit is a matrix; a layer that cannot be cut is a group of its own."""
    orders: dict[BlockSpec, Sequence[Together]] = {}
    sizes: dict[int, list[tuple[Together, int]]] = {}
    for index, block in decoder.blocks():
        if block.spec not in orders:
            orders[block.spec] = _order_of(block)
        sizes[index] = [(names, _nbytes(block, names)) for names in orders[block.spec]]
    most = max(decoder.least_part_nbytes, *(nbytes for layer in sizes.values() for _, nbytes in layer))
    return [
        LayerGroup(range(index, index + 1), names if len(packed) > 1 else ())
        for index, layer in sizes.items()
        for packed in [_packed(layer, most)]
        for names in packed
    ]


def _packed(layer: Sequence[tuple[Together, int]], most: int) -> list[Together]:
    """Return neighbours joined to groups of at most `most` bytes; one group without names if there are none."""
    groups: list[Together] = []
    size = 0
    for names, nbytes in layer:
        if groups and size + nbytes <= most:
            groups[-1] += names
            size += nbytes
        else:
            groups.append(names)
            size = nbytes
    return groups or [()]


def _nbytes(block: nn.Module, names: Together) -> int:
    """Return the bytes of projections and their low-rank factors in a slot; of all matrices if no names are given."""
    prefixes = tuple(f"{name}." for name in names) or ("",)
    movable = (one for name, one in block.named_buffers() if name.startswith(prefixes) and is_movable(name, one))
    return sum(aligned(one.nbytes) for one in movable)


def _order_of(block: Block) -> Sequence[Together]:
    """Return the projections of a block that stream, in the order of use; an item without names if it cannot be cut."""
    traced = lower_to_instructions(block)
    movable = {name.rpartition(".")[0] for name, one in block.named_buffers() if is_movable(name, one)}
    used = [*_used(traced)]
    if traced.misfit is not None or set(used) != movable:
        return [()]
    order = _in_one_place([projection_of(name) for name in used])
    try:
        trace_parts(block, order)  # each alone: then any neighbours can be together
    except GraphError:
        return [()]
    return order


def _used(traced: Traced) -> Iterator[str]:
    """Yield the projections of a lowered block in the order in which its operations multiply with them."""
    for node in traced.nodes():
        if node.target is reorder:
            continue
        named = [node.target] if node.op == "call_module" else [*node.args]
        for one in named:
            names = one if isinstance(one, tuple | list) and not isinstance(one, fx.Node) else (one,)
            for name in names:
                if isinstance(name, str) and isinstance(traced.modules.get(name), Linear | HeadLinear):
                    yield name


def _in_one_place(used: Sequence[str]) -> list[Together]:
    """Return names in the order of their first use; those between two uses of one are together with it."""
    last = {name: place for place, name in enumerate(used)}
    items: list[Together] = []
    end = -1
    for place, name in enumerate(used):
        if place > end:
            items.append((name,))
        elif name not in items[-1]:
            items[-1] += (name,)
        end = max(end, last[name])
    return items
