"""Runs a block's own operations in parts, so that a part of its matrices is enough at any time.

    forward   norm  q  k  v  attend  o  +  norm  gate  up  *  down  +
    part      1.......................2..........3.....4.............      parts begin where they need the next matrix

`Block.forward` is traced once for each kind of block and each choice of parts. A part runs the operations whose inputs
and matrices are there, one after another, with the modules' own functions and kernels, so the bits are those of
`Block.forward`. Values that later parts read are kept in the state, and each is dropped after its last reader.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from graphcore.errors import GraphError
from graphcore.graph.lowering.operations import Call
from graphcore.graph.lowering.tracing import trace_eager
from graphcore.graph.state import StepState
from graphcore.graph.step import BoundBlock, FetchedBlock, Step
from graphcore.nn.block import Block

Values = dict[Call, Any]
Calls = Mapping[str, Callable[..., Tensor]]
EXPERTS = "mlp.experts"  # name of the module in a block


@dataclass(frozen=True)
class PartOperation:
    """An operation of a trace, and the values that nothing reads after it."""

    node: Call
    dropped: tuple[Call, ...]


@dataclass(frozen=True)
class BlockParts:
    """The operations of one kind of block, by part.

    Attributes:
        inputs: names of the inputs of `Block.forward`, in order, each with the node that stands for it.
        parts: operations of each part, in order.
        output: node of the block's result.
    """

    inputs: Mapping[str, Call]
    parts: Sequence[Sequence[PartOperation]]
    output: Call

    def run(self, part: int, values: Values, modules: Mapping[str, nn.Module], calls: Calls) -> None:
        """Run a part's operations, which read and change the values.

        Args:
            values: inputs and results of earlier operations, by node.
            modules: modules of the block, by name.
            calls: functions that are called in place of some modules, by the modules' names.
        """

        def value_of(node: Call) -> Any:
            return values[node]

        for operation in self.parts[part]:
            node = operation.node
            arguments, named = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
            match node.op:
                case "get_attr":
                    owner, _, name = node.target.rpartition(".")
                    values[node] = getattr(modules[owner], name)
                case "call_method":
                    values[node] = getattr(arguments[0], node.target)(*arguments[1:], **named)
                case "call_module":
                    values[node] = (calls.get(node.target) or modules[node.target])(*arguments, **named)
                case _:
                    values[node] = node.target(*arguments, **named)
            for dropped in operation.dropped:
                del values[dropped]


def trace_parts(block: Block, parts: Sequence[Sequence[str]]) -> BlockParts:
    """Return the operations of a block's forward by part.

    Args:
        parts: names of the projections of each part, in the order of use.

    Raises:
        GraphError: torch.fx cannot trace the forward, or a projection reads a result of a later part.
    """
    graph = trace_eager(block)
    part_of = _part_of_nodes(graph, {name: part for part, names in enumerate(parts) for name in names})
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    nodes.sort(key=part_of.__getitem__)  # stable: within a part as in the forward
    output = next(node.args[0] for node in graph.nodes if node.op == "output")
    last_reader = {one: node for node in nodes for one in (node, *node.all_input_nodes)} | {output: None}
    by_part: list[list[PartOperation]] = [[] for _ in parts]
    for node in nodes:
        dropped = tuple(one for one in (node, *node.all_input_nodes) if last_reader[one] is node)
        by_part[part_of[node]].append(PartOperation(node, dropped))
    return BlockParts({str(node.target): node for node in graph.nodes if node.op == "placeholder"}, by_part, output)


def _part_of_nodes(graph: fx.Graph, part_of_matrix: Mapping[str, int]) -> dict[Call, int]:
    """Return the first part in which each operation can run: its inputs are there, and its matrix if it has one."""
    part_of: dict[Call, int] = {}
    for node in graph.nodes:
        ready = max((part_of[one] for one in node.all_input_nodes), default=0)
        own = part_of_matrix.get(str(node.target), ready) if node.op == "call_module" else ready
        if own < ready:
            raise GraphError(f"{node.target} of part {own} reads a result of part {ready}")
        part_of[node] = own
    return part_of


@dataclass
class PartStep:
    """A step that runs one part of a block: the operations that need one layer group's matrices.

    Attributes:
        number: number of the part in the block.
        calls: functions that are called in place of some of the block's modules, by the modules' names.
    """

    group: int
    state: StepState
    bound: BoundBlock
    parts: BlockParts
    number: int
    modules: Mapping[str, nn.Module]
    calls: Calls

    @property
    def is_last(self) -> bool:
        """Whether the block ends with this part."""
        return self.number + 1 == len(self.parts.parts)

    def replay(self) -> None:
        """Run the part; the first one reads `hidden`, and the last one writes it."""
        state, parts = self.state, self.parts
        if self.number == 0:
            state.carried = dict(zip(parts.inputs.values(), self.bound.arguments(state), strict=False))
        parts.run(self.number, state.carried, self.modules, self.calls)
        if self.is_last:
            state.hidden, state.carried = state.carried[parts.output], {}


def part_steps(bound: BoundBlock, parts: BlockParts, first: int, state: StepState) -> list[Step]:
    """Return the steps of a block's parts, whose groups are numbered from `first` on."""
    modules, run = dict(bound.block.named_modules()), bound.run
    calls: Calls = {EXPERTS: partial(run.run_experts, bound.block)} if isinstance(run, FetchedBlock) else {}
    return [PartStep(first + number, state, bound, parts, number, modules, calls) for number in range(len(parts.parts))]
