"""A decode step as a list of native instructions over fixed buffers.

A program references all tensors that its instructions point to, so that they stay alive.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from graphcore.activations import Activation
from graphcore.kernels.cpu.instructions import (
    MOST_ROWS,
    NORM_KINDS,
    STORES,
    Convolve,
    DeltaRule,
    Instruction,
    Norm,
    PerRow,
    Project,
)
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.cpu.library import DTYPE_NUMBERS, Matrix, open_library
from graphcore.kernels.ops.gated_convolution import ConvParts, convolution_arguments
from graphcore.kernels.ops.gated_delta import DeltaParts, delta_arguments
from graphcore.kernels.packing import Packing

ALIGNMENT = 64


@functools.cache
def rows_by_program(sequences: int) -> tuple[int, ...]:
    """Return the number of rows of each program for a step: as few programs as possible, of nearly equal size."""
    programs = -(-sequences // MOST_ROWS)
    return tuple((sequences + other) // programs for other in reversed(range(programs)))


def most_step_rows(sequences: int, draft_tokens: int = 0) -> int:
    """Return the most tokens of a decode step: one for each sequence, and at least MOST_ROWS for several sequences.

    Rows without a sequence of their own take draft tokens, and tokens that a mask forces, because a row costs less than
    another step.

    Args:
        draft_tokens: most draft tokens of one sequence.
    """
    return max(sequences, 1 + draft_tokens, MOST_ROWS if sequences > 1 or draft_tokens else 1)


def widths_of(most: int) -> list[int]:
    """Return the sizes of programs, in rows, that can together run a step of any number of sequences up to `most`."""
    shares = [rows_by_program(sequences) for sequences in range(1, most + 1)]
    return [max(share[at] for share in shares if at < len(share)) for at in range(len(shares[-1]))]


class SealedProgram(NamedTuple):
    """The arguments of the library's function that runs a program whose instructions are complete.

    Attributes:
        function: the library's function.
        table: addresses of the instructions, in order.
        scratch: memory of all threads.
        before, after: its arguments before and after those that name the instructions.
    """

    function: Callable[..., None]
    table: ctypes.Array[Instruction]
    scratch: Tensor
    before: tuple[int, ...]
    after: tuple[int, ...]

    def carry_out(self, first: object, count: int) -> None:
        """Run `count` instructions from the one whose address is `first`."""
        self.function(*self.before, first, count, *self.after)


@dataclass
class NativeProgram:
    """Native instructions in order, with the memory that they use.

    A program has a fixed number of rows, each for one token. A run computes the rows that have a token, and a row's
    results do not depend on rows of other sequences. The rows of one sequence must be adjacent among those that run, at
    consecutive positions.

    Attributes:
        counts: [B] int64, 1 for a row that has a token in the next run, else 0.
        sequences: [B] int64, index of each row's sequence in the caches.
        kept: objects that the instructions point to.
        nbytes: bytes of the tensors that were allocated for the program, without its scratch.
        row_floats: largest number of float32 values of scratch that an instruction needs besides its activations.
        activations: rows and columns of the largest input of a product.
    """

    library: str
    threads: int
    counts: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.int64, device="cpu"))
    sequences: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64, device="cpu"))
    kept: list[object] = field(default_factory=list)
    nbytes: int = 0
    arguments: list[ctypes.Structure] = field(default_factory=list)
    row_floats: int = 0
    activations: tuple[int, int] = (1, 32)
    _in_block: list[Tensor] = field(default_factory=list)
    _free: list[Tensor] = field(default_factory=list)
    _sealed: SealedProgram | None = None

    @property
    def rows(self) -> int:
        """Number of the program's rows."""
        return len(self.counts)

    def add(self, arguments: ctypes.Structure, *kept: object) -> None:
        """Append an instruction, and keep alive the objects it points to."""
        assert self._sealed is None, "the program is sealed by its first run"
        self.arguments.append(arguments)
        self.kept.extend(kept)

    def address(self, tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
        """Return the address of a tensor of that dtype, and keep it alive; None for None."""
        if tensor is None:
            return None
        assert tensor.dtype is dtype, f"{tensor.dtype}, asked for {dtype}"
        assert tensor.is_contiguous(), f"strides {tensor.stride()}, the kernels read one run"
        self.kept.append(tensor)
        return tensor.data_ptr()

    def per_row(self, tensor: Tensor | None) -> PerRow:
        """Return the struct of a float32 array per row: [B, N], or [N] if all rows share it; null for None."""
        if tensor is None:
            return PerRow()
        assert tensor.dtype is torch.float32, f"{tensor.dtype}, asked for float32"
        assert tensor.dim() < 2 or len(tensor) == self.rows, f"{len(tensor)} rows, the program has {self.rows}"
        assert tensor.shape[-1:].numel() == 1 or tensor.stride(-1) == 1, "a row's numbers lie one after another"
        self.kept.append(tensor)
        return PerRow(tensor.data_ptr(), tensor.stride(0) if tensor.dim() == 2 else 0)

    def matrix(self, weight: Tensor, packing: Packing | None) -> Matrix:
        """Return a weight as a matrix: dense [O, I] without a packing, else the packed bytes."""
        self.kept.append(weight)
        if packing is None:
            assert weight.is_contiguous(), "kernels read whole rows"
            return Matrix(weight.data_ptr(), *weight.shape, DTYPE_NUMBERS[weight.dtype], 1.0)
        assert isinstance(packing, KernelPacking), f"no kernel multiplies {packing.format}"
        return packing.matrix(weight)

    def matrix_nbytes(self, matrix: Matrix) -> int:
        """Return the bytes that the rows of a matrix take."""
        return int(open_library(self.library).graphcore_packed_nbytes(matrix.format, matrix.rows, matrix.columns))

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a new tensor that lives as long as the program."""
        return self.own(torch.zeros(shape, dtype=dtype, device="cpu"))

    def buffer(self, size: int) -> Tensor:
        """Return a new buffer, [B, size] float32, that lives as long as the program."""
        return self.zeros(self.rows, size)

    def block_buffer(self, size: int) -> Tensor:
        """Return a buffer, [B, size] float32, for instructions of one block: for those up to `end_block`."""
        fitting = next((index for index, one in enumerate(self._free) if one.shape[1] == size), None)
        self._in_block.append(self.buffer(size) if fitting is None else self._free.pop(fitting))
        return self._in_block[-1]

    def end_block(self) -> None:
        """Release the block's buffers for reuse by the next block; no later instruction may read them."""
        self._free += self._in_block
        self._in_block = []

    def in_float32(self, tensor: Tensor) -> Tensor:
        """Return the tensor in float32: itself, or a copy that lives as long as the program."""
        return tensor if tensor.dtype is torch.float32 else self.own(tensor.float())

    def own(self, tensor: Tensor) -> Tensor:
        """Keep a tensor that was allocated for the program alive, count its bytes, and return it."""
        self.kept.append(tensor)
        self.nbytes += tensor.nbytes
        return tensor

    def needs(self, row_floats: int = 0, rows: int = 1, columns: int = 32) -> None:
        """Make every thread's scratch at least this large."""
        self.row_floats = max(self.row_floats, row_floats)
        nbytes = open_library(self.library).graphcore_activations_nbytes  # it pads columns
        self.activations = max(self.activations, (rows, columns), key=lambda shape: nbytes(*shape))

    def needs_attention(self, head_dim: int, slots: int) -> None:
        """Make the scratch large enough for attention over that many cache slots."""
        self.needs(row_floats=open_library(self.library).graphcore_attend_floats(head_dim, slots, self.rows))

    def run(self, begin: int = 0, count: int | None = None) -> None:
        """Run the instructions from `begin` on, by default all of them."""
        sealed = self._sealed or self._seal()
        length = len(self.arguments) - begin if count is None else count
        sealed.carry_out(ctypes.byref(sealed.table, begin * ctypes.sizeof(Instruction)), length)

    def run_again(self, index: int, times: int) -> None:
        """Run one instruction `times` times, with a barrier after each, as in a program."""
        sealed = self._sealed or self._seal()
        sealed.carry_out((Instruction * times)(*[sealed.table[index]] * times), times)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of all threads' scratch, which is allocated at the first run."""
        return self.threads * self._thread_nbytes()[0] + ALIGNMENT

    def _thread_nbytes(self) -> tuple[int, int]:
        """Return the bytes of one thread's scratch, and of its first part (`row_floats`)."""
        row_nbytes = _aligned(4 * self.row_floats)
        activations = open_library(self.library).graphcore_activations_nbytes(*self.activations)
        return row_nbytes + _aligned(activations) + ALIGNMENT, row_nbytes

    def _seal(self) -> SealedProgram:
        """Fix the instructions and allocate the scratch."""
        table = (Instruction * len(self.arguments))(
            *(Instruction(item.KIND, ctypes.addressof(item)) for item in self.arguments)
        )
        memory = torch.zeros(self.scratch_nbytes, dtype=torch.uint8, device="cpu")
        scratch = memory[-memory.data_ptr() % ALIGNMENT :]
        before = self.threads, self.counts.data_ptr(), self.sequences.data_ptr(), self.rows
        after = scratch.data_ptr(), *self._thread_nbytes()
        self._sealed = SealedProgram(open_library(self.library).graphcore_run, table, scratch, before, after)
        return self._sealed


def norm(program: NativeProgram, kind: str, eps: float, weight: Tensor | None, bias: Tensor | None) -> Norm:
    """Return the struct of a normalisation with float32 weight and bias, each of which may be None."""
    return Norm(NORM_KINDS[kind], eps, program.address(weight), program.address(bias))


def append_project(
    program: NativeProgram,
    x: Tensor,
    matrices: Sequence[tuple[Matrix, Tensor | None, Tensor]],
    rounding: int,
    normalise: Norm,
    store: str = "put",
    activation: Activation = Activation.NONE,
    factor: float = 1.0,
) -> None:
    """Append a Project instruction.

    Args:
        x: [B, I] float32, the inputs before the norm.
        matrices: matrix, float32 bias or None, and output [B, O] float32 of each; a gated pair uses the first output.
        rounding: number of the rounding of x.
        normalise: normalisation of x.
        store: "put", "add" or "gated".
        activation: activation of the output, or of the gate.
        factor: factor of the output, unless it is gated.
    """
    arguments = Project()
    arguments.x = program.per_row(x)
    arguments.norm = normalise
    arguments.rounding, arguments.num_matrices = rounding, len(matrices)
    arguments.store, arguments.activation = STORES[store], activation
    arguments.factor = 0.0 if factor == 1.0 else factor
    for index, (matrix, bias, out) in enumerate(matrices):
        arguments.matrices[index] = matrix
        arguments.biases[index] = program.address(bias)
        arguments.outs[index] = program.per_row(out)
    program.needs(rows=program.rows, columns=matrices[0][0].columns)
    program.add(arguments)


def append_gated_convolution(program: NativeProgram, parts: ConvParts) -> Tensor:
    """Append a gated short convolution for one token of each row; return its outputs [B, C].

    Args:
        parts: the projections [B, 1, 3 C] float32, weights and state, and the tokens' positions and counts.
    """
    out = program.block_buffer(parts.conv_weight.shape[0])
    program.kept.append(parts.mixed)

    def address(tensor: Tensor | None) -> int | None:
        if tensor is None or tensor is parts.mixed:  # its rows need not be adjacent
            return None if tensor is None else tensor.data_ptr()
        return program.address(tensor, tensor.dtype)

    program.add(convolution_arguments(parts, out, address, program.sequences))
    return out


def append_delta_heads(program: NativeProgram, parts: DeltaParts) -> Tensor:
    """Append a Gated DeltaNet layer's heads for one token of each row; return their outputs [B, H M].

    Args:
        parts: the layer's projections [B, 1, ...] float32, weights and states, and the tokens' positions and counts.
    """
    joined, out = program.block_buffer(parts.mixed.shape[-1]), program.block_buffer(parts.z.shape[-1])
    program.kept += [parts.mixed, parts.z, parts.a, parts.b]

    def address(tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        if any(tensor is one for one in parts[:4]):
            return tensor.data_ptr()  # its rows need not be adjacent
        return program.address(tensor, tensor.dtype)

    _, _, key_dim, value_dim = parts.recurrent.shape
    program.needs(row_floats=open_library(program.library).graphcore_delta_floats(key_dim, value_dim))
    for kind in (Convolve, DeltaRule):
        program.add(delta_arguments(kind, parts, joined, out, address, program.sequences))
    return out


def seconds_late(library: str) -> float:
    """Return the seconds for which programs and kernels of this process slept, waiting for a late thread."""
    return float(open_library(library).graphcore_seconds_late(torch.get_num_threads()))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
