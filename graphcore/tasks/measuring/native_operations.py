"""Names and bytes of a native decode step's instructions, so that they can be timed one by one."""

import ctypes
from collections.abc import Sequence

from graphcore.kernels.cpu import instructions
from graphcore.kernels.cpu import program as native
from graphcore.kernels.cpu.library import FORMAT_NUMBERS, Matrix
from graphcore.tasks.measuring.decode_operations import Operation, OperationName

FORMAT_NAMES = {number: name for name, number in FORMAT_NUMBERS.items()}
KINDS = {
    instructions.Embed: "embed",
    instructions.Project: "linear",
    instructions.Attend: "attend",
    instructions.AddNorm: "add_norm",
    instructions.Choose: "argmax",
    instructions.Advance: "advance",
    instructions.Route: "route",
    instructions.ExpertsUp: "experts_up",
    instructions.ExpertsDown: "experts_down",
    instructions.Elementwise: "elementwise",
    instructions.Convolve: "convolve",
    instructions.DeltaRule: "delta_rule",
    instructions.Reorder: "reorder",
    instructions.GatedConvolution: "gated_convolution",
    instructions.ProjectHeads: "heads",
}


def native_operations(program: native.NativeProgram, logits: int) -> list[Operation]:
    """Return the program's instructions as operations, in order.

    Args:
        logits: address of the logits; the head is the instruction that writes there.
    """

    def operation(index: int, arguments: ctypes.Structure) -> Operation:
        name, nbytes = instruction_name(arguments, logits), weight_nbytes(arguments, program)
        return Operation(name, nbytes, lambda: program.run(index, 1), lambda times: program.run_again(index, times))

    return [operation(index, arguments) for index, arguments in enumerate(program.arguments)]


def instruction_name(arguments: ctypes.Structure, logits: int) -> OperationName:
    """Return an instruction's name: kind, shape ("outputs x inputs" of each matrix) and weight format."""
    kind = KINDS[type(arguments)]
    match arguments:
        case instructions.Project():
            matrices = [arguments.matrices[index] for index in range(arguments.num_matrices)]
            return OperationName("head" if arguments.outs[0].first == logits else kind, *_described(matrices))
        case instructions.Embed():
            return OperationName(kind, *_described([arguments.table]))
        case instructions.Attend():
            window = f", window {arguments.window}" if arguments.window else ""
            shape = f"{arguments.heads} heads, {arguments.kv_heads} kv, {arguments.head_dim}{window}"
            kept = dict.fromkeys(FORMAT_NAMES[number] for number in (arguments.k_format, arguments.v_format))
            return OperationName(kind, shape, ",".join(kept))
        case instructions.ProjectHeads():
            shape, name = _described([arguments.matrix])
            return OperationName(kind, f"{arguments.heads} of ({shape})", name)
        case instructions.ExpertsUp():
            shape, name = _described([arguments.gate, arguments.up])
            return OperationName(kind, f"{arguments.used} of ({shape})", name)
        case instructions.ExpertsDown():
            shape, name = _described([arguments.down])
            return OperationName(kind, f"{arguments.used} of ({shape})", name)
        case instructions.AddNorm():
            shape = f"{arguments.parts} x {arguments.dim}" if arguments.parts > 1 else str(arguments.dim)
            return OperationName(kind, shape, "f32")
        case instructions.Choose():
            return OperationName(kind, str(arguments.vocab), "f32")
        case instructions.Route():
            return OperationName(kind, f"{arguments.used} of {arguments.experts}", "f32")
        case instructions.DeltaRule():
            return OperationName(kind, f"{arguments.heads} heads, {arguments.key_dim} x {arguments.value_dim}", "f32")
        case instructions.Convolve():
            keys = 2 * arguments.key_heads * arguments.key_dim
            return OperationName(kind, f"{keys + arguments.heads * arguments.value_dim} x {arguments.width}", "f32")
        case instructions.GatedConvolution():
            return OperationName(kind, f"{arguments.channels} x {arguments.width}", "f32")
        case instructions.Elementwise() | instructions.Reorder():
            return OperationName(kind, str(arguments.size), "f32")
    return OperationName(kind, "", "")


def _described(matrices: Sequence[Matrix]) -> tuple[str, str]:
    shapes = " + ".join(f"{matrix.rows}x{matrix.columns}" for matrix in matrices)
    names = dict.fromkeys(FORMAT_NAMES[matrix.format] for matrix in matrices)
    return shapes, "+".join(names)


def weight_nbytes(arguments: ctypes.Structure, program: native.NativeProgram) -> int:
    """Return the bytes of weights that an instruction reads; one row of an embedding, and only the routed experts."""
    nbytes = program.matrix_nbytes
    match arguments:
        case instructions.Project():
            return sum(nbytes(arguments.matrices[index]) for index in range(arguments.num_matrices))
        case instructions.Embed():
            tables = [matrix for matrix in (arguments.table, arguments.positions) if matrix.bytes]
            return sum(nbytes(matrix) // matrix.rows for matrix in tables)
        case instructions.ProjectHeads():
            return int(arguments.heads) * nbytes(arguments.matrix)
        case instructions.ExpertsUp():
            return int(arguments.used) * (nbytes(arguments.gate) + nbytes(arguments.up))
        case instructions.ExpertsDown():
            return int(arguments.used) * nbytes(arguments.down)
    return 0
