"""What the instructions of a native decode step are, for who times them one by one."""

import ctypes
from collections.abc import Sequence

from graphcore.kernels import instructions
from graphcore.kernels import native_step as native
from graphcore.kernels.library import Matrix, open_library
from graphcore.kernels.packed import FORMAT_NUMBERS
from graphcore.tasks.operation import Operation, OperationName

FORMAT_NAMES = {number: name for name, number in FORMAT_NUMBERS.items()}
KINDS = {
    instructions.Embed: "embed",
    instructions.Linear: "linear",
    instructions.Attend: "attend",
    instructions.AddNorm: "add_norm",
    instructions.Choose: "argmax",
    instructions.Advance: "advance",
    instructions.Route: "route",
    instructions.ExpertsUp: "experts_up",
    instructions.ExpertsDown: "experts_down",
}


def native_operations(program: native.NativeProgram, logits: int) -> list[Operation]:
    """Return the program's instructions as operations, in order.

    Args:
        logits: address of the logits, by which the head is known.
    """

    def operation(index: int, arguments: ctypes.Structure) -> Operation:
        name, nbytes = name_of(arguments, logits), weight_nbytes(arguments, program.library)
        return Operation(name, nbytes, lambda: program.run(index, 1), lambda times: program.run_again(index, times))

    return [operation(index, arguments) for index, arguments in enumerate(program.arguments)]


def name_of(arguments: ctypes.Structure, logits: int) -> OperationName:
    """Return what an instruction is called: kind, shape ("outputs x inputs" of each matrix) and weight format."""
    kind = KINDS[type(arguments)]
    match arguments:
        case instructions.Linear():
            matrices = [arguments.matrices[index] for index in range(arguments.num_matrices)]
            return OperationName("head" if arguments.outs[0] == logits else kind, *_described(matrices))
        case instructions.Embed():
            return OperationName(kind, *_described([arguments.table]))
        case instructions.Attend():
            window = f", window {arguments.window}" if arguments.window else ""
            shape = f"{arguments.heads} heads, {arguments.kv_heads} kv, {arguments.head_dim}{window}"
            return OperationName(kind, shape, FORMAT_NAMES[arguments.cache_format])
        case instructions.ExpertsUp():
            shape, name = _described([arguments.gate, arguments.up])
            return OperationName(kind, f"{arguments.used} of ({shape})", name)
        case instructions.ExpertsDown():
            shape, name = _described([arguments.down])
            return OperationName(kind, f"{arguments.used} of ({shape})", name)
        case instructions.AddNorm():
            return OperationName(kind, str(arguments.dim), "f32")
        case instructions.Choose():
            return OperationName(kind, str(arguments.vocab), "f32")
        case instructions.Route():
            return OperationName(kind, f"{arguments.used} of {arguments.experts}", "f32")
    return OperationName(kind, "", "")


def _described(matrices: Sequence[Matrix]) -> tuple[str, str]:
    shapes = " + ".join(f"{matrix.rows}x{matrix.columns}" for matrix in matrices)
    names = dict.fromkeys(FORMAT_NAMES[matrix.format] for matrix in matrices)
    return shapes, "+".join(names)


def weight_nbytes(arguments: ctypes.Structure, library: str) -> int:
    """Return the bytes of weight matrices that an instruction reads: of the embedding a row, of experts the chosen."""
    functions = open_library(library)

    def nbytes(matrix: Matrix) -> int:
        return int(functions.graphcore_packed_nbytes(matrix.format, matrix.rows, matrix.columns))

    match arguments:
        case instructions.Linear():
            return sum(nbytes(arguments.matrices[index]) for index in range(arguments.num_matrices))
        case instructions.Embed():
            tables = [matrix for matrix in (arguments.table, arguments.positions) if matrix.bytes]
            return sum(nbytes(matrix) // matrix.rows for matrix in tables)
        case instructions.ExpertsUp():
            return int(arguments.used) * (nbytes(arguments.gate) + nbytes(arguments.up))
        case instructions.ExpertsDown():
            return int(arguments.used) * nbytes(arguments.down)
    return 0
