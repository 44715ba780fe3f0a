"""Backends of a model: implementations of token mixers, of packed weights, and of sampling on the CPU.

    TorchBackend    the ops of kernels/ops/ in plain torch; packed weights are unpacked for each use      anywhere
    TritonBackend   the same ops, for which kernels/gpu/ registers kernels; weights packed in planes      GPU
    NativeBackend   the library of C++ kernels (kernels/cpu/)                                             CPU

Legend: B batch, T tokens, H heads, K kv heads, E head dim, M value dim, C channels, P pages, N pages of a sequence,
G positions of a page. A backend is chosen once, when a model is loaded. No code outside this package handles the C++
library's path.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, fx

from graphcore.errors import GraphError
from graphcore.kernels.cpu.attention import cache_number
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.cpu.library import find_runnable_library, loads, prebuilt_library
from graphcore.kernels.cpu.program import NativeProgram, seconds_late
from graphcore.kernels.cpu.quantize import quantize_weights
from graphcore.kernels.cpu.token_rows import TokenRows, runs_now
from graphcore.kernels.cpu.torch_ops import are_implemented_by, native_attend
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.registration import register
from graphcore.kernels.ops.attend import attend
from graphcore.kernels.ops.attention_parameters import AttentionParameters
from graphcore.kernels.ops.draw import DrawKernel
from graphcore.kernels.ops.gated_convolution import ConvParts, gated_convolution
from graphcore.kernels.ops.gated_delta import DeltaParts, delta_heads
from graphcore.kernels.packing import Packing
from graphcore.kernels.stored_packing import StoredPacking
from graphcore.progress import Progress, ignore_progress
from graphcore.quant.packing_error import SquaredError
from graphcore.quant.registry import FORMATS

# A torch.fx trace of a module (graph/lowering/tracing.py) stops at these functions, whichever backend calls them.
fx.wrap("attend")
fx.wrap("delta_heads")
fx.wrap("gated_convolution")

KVPages = tuple[Tensor, Tensor, Tensor]
"""Pools of keys and of values, [P, K, G, E] each, and the table of each sequence's pages, [B, N] int32."""
Positions = tuple[Tensor, Tensor]
"""Number of tokens in each sequence's cache, and of new tokens in this pass, [B] int64 each: `starts` and `counts`."""


class KernelTracer(fx.Tracer):
    """A torch.fx tracer whose graphs call the kernels that eager code calls, because they run on tensors of the CPU."""


def keeps_kernels(x: object) -> bool:
    """Return whether `x` stands for a tensor in a trace of a `KernelTracer`."""
    return isinstance(x, fx.Proxy) and isinstance(x.tracer, KernelTracer)


class Backend:
    """Interface of the backends; a backend is stateless, so that modules can share it.

    Attributes:
        has_kernels: True if graphcore's own kernels multiply packed weights.
    """

    has_kernels: ClassVar[bool] = True

    @property
    def kernels_name(self) -> str:
        """Name of the kernels' build, part of a saved KV cache's fingerprint; "none" without C++ kernels."""
        return "none"

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVPages,
        span: Positions,
        how: AttentionParameters,
    ) -> Tensor:
        """Append keys and values to the cache and attend, as the op `attend` does; returns [B, T, H, E].

        Args:
            query: [B, T, H, E] compute dtype.
            key, value: [B, T, K, E] compute dtype; None if another layer has appended its own in this pass.
            how: settings of the attention; the backend itself sets its library.
        """
        return attend(  # fields one by one, for mypy
            *(query, key, value, *cache, *span), how.window, how.scale, how.sinks, how.library, how.cap, how.values_from
        )

    def delta_heads(self, parts: DeltaParts) -> Tensor:
        """Run the heads of a delta rule, as the op `delta_heads` does; the backend itself sets the library.

        Returns:
            [B, T, H M] compute dtype.
        """
        return delta_heads(*parts)

    def gated_convolution(self, parts: ConvParts) -> Tensor:
        """Run a gated short convolution, as the op `gated_convolution` does; the backend itself sets the library.

        Returns:
            [B, T, C] compute dtype.
        """
        return gated_convolution(*parts)

    def token_rows(self, _x: Tensor) -> TokenRows | None:
        """Return fused kernels for norms, rotary embeddings, gates and residual sums of the tokens in `x`.

        None without such kernels, and where torch.fx or torch.compile traces `x`: the compiler fuses plain operations.
        """
        return None

    def choose_packing(self, name: str, rows: int, columns: int) -> Packing | None:
        """Return the packing for a matrix in a stored format; None (dense) if a row is not a whole number of blocks.

        Args:
            name: name of the format.
            rows, columns: output and input features.
        """
        return None if columns % FORMATS[name].block_elements else self._packing(name, rows, columns)

    def _packing(self, name: str, rows: int, columns: int) -> Packing:
        """Return the packing of a matrix whose rows are whole blocks."""
        return StoredPacking(name, rows, columns)

    def quantize(self, name: str, dense: Tensor) -> tuple[Tensor, SquaredError]:
        """Return dense weights quantised to a format's blocks, and their squared error, as `quantize_weights` does.

        Args:
            name: name of the format.
            dense: [..., I] any float dtype, on the CPU.
        """
        return quantize_weights(FORMATS[name], dense)

    def draw_kernel(self) -> DrawKernel | None:
        """Return a new kernel that samples tokens from logits on the CPU; None to sample with torch."""
        return None

    def seconds_late(self) -> float | None:
        """Return the seconds for which kernels of this process slept, waiting for a late thread; None without C++."""
        return None


@dataclass(frozen=True)
class TorchBackend(Backend):
    """The ops of kernels/ops/ in plain torch."""

    has_kernels = False


@dataclass(frozen=True)
class TritonBackend(TorchBackend):
    """Triton's kernels on a GPU, which are registered as implementations of the ops (kernels/gpu/registration.py).

    Attributes:
        library: path of the C++ kernels' file, for weights that are packed in RAM; empty if none was built in advance.
    """

    library: str = ""
    has_kernels = True

    def _packing(self, name: str, rows: int, columns: int) -> Packing:
        if FORMATS[name].planes is None:
            return super()._packing(name, rows, columns)
        return DevicePacking(name, rows, columns, self.library)


@dataclass(frozen=True)
class NativeBackend(Backend):
    """The C++ kernels on the CPU.

    Attributes:
        library: path of the kernels' file, a str because torch ops take no Path.
    """

    library: str

    def copy_library(self, folder: Path) -> Path:
        """Copy the library's file to a folder, and return the copy."""
        return Path(shutil.copy(self.library, folder))

    @property
    def kernels_name(self) -> str:
        """Name of the library's file, a fingerprint of its sources, compiler and processor."""
        return Path(self.library).stem

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVPages,
        span: Positions,
        how: AttentionParameters,
    ) -> Tensor:
        """Attend in C++; in compiled code without Python in between."""
        if torch.compiler.is_compiling() and are_implemented_by(self.library) and not how.values_from:
            of_key, of_value = (None if one is None else one.contiguous() for one in (key, value))
            k_cache, v_cache, table = cache
            return native_attend(
                query.contiguous(),
                of_key,
                of_value,
                k_cache,
                v_cache,
                table,
                *span,
                cache_number(k_cache),
                cache_number(v_cache),
                how.window,
                how.scale,
                None if how.sinks is None else how.sinks.float(),
                how.cap,
            )
        return super().attend(query, key, value, cache, span, how._replace(library=self.library))

    def delta_heads(self, parts: DeltaParts) -> Tensor:
        """Run the heads in C++."""
        return super().delta_heads(parts._replace(library=self.library))

    def gated_convolution(self, parts: ConvParts) -> Tensor:
        """Run the convolution in C++."""
        return super().gated_convolution(parts._replace(library=self.library))

    def token_rows(self, x: Tensor) -> TokenRows | None:
        """Return the kernels if `x` is a CPU tensor in eager mode, or stands for one in a trace that keeps kernels."""
        return TokenRows(self.library) if runs_now(x) or keeps_kernels(x) else None

    def _packing(self, name: str, rows: int, columns: int) -> Packing:
        if FORMATS[name].kernel_number is None:
            return super()._packing(name, rows, columns)
        return KernelPacking(name, rows, columns, self.library)

    def quantize(self, name: str, dense: Tensor) -> tuple[Tensor, SquaredError]:
        """Return the stored bytes of dense weights and their error, computed in C++."""
        return quantize_weights(FORMATS[name], dense, self.library)

    def draw_kernel(self) -> DrawKernel:
        """Return a new sampling kernel that uses all of torch's threads."""
        return DrawKernel(self.library, torch.get_num_threads())

    def seconds_late(self) -> float:
        """Return the seconds for which kernels of this process slept, waiting for a late thread."""
        return seconds_late(self.library)

    def new_program(self, counts: Tensor, sequences: Tensor) -> NativeProgram:
        """Return an empty program of B rows for all of torch's threads; the arguments are those of `NativeProgram`."""
        return NativeProgram(self.library, torch.get_num_threads(), counts, sequences)


def find_backend(device: torch.device, cache_dir: Path, on_progress: Progress = ignore_progress) -> tuple[Backend, str]:
    """Return the best backend for a device, and a note for the user about the C++ kernels, which may be empty.

    On the CPU, the C++ kernels are built now if they are missing; on a GPU, Triton's kernels are registered.

    Args:
        cache_dir: folder for built code; kernels are stored in its subfolder `kernels`.
        on_progress: callback while kernels are built.
    """
    if device.type != "cpu":
        built = prebuilt_library()
        triton = TritonBackend("" if built is None else str(built))
        return (triton if device.type == "cuda" and register() else TorchBackend()), ""
    try:
        library, note = find_runnable_library(cache_dir / "kernels", on_progress)
    except GraphError as error:
        return TorchBackend(), f"graphcore's kernels are missing: {error}"
    if library is None:
        without = "none were built when it was installed, and no C++ compiler works here"
        return TorchBackend(), f"graphcore's kernels are missing: {without}"
    return NativeBackend(str(library)), note


def backend_of(library: Path | None) -> Backend:
    """Return the C++ kernels of a library's file, which was built for this processor; None for plain PyTorch.

    Raises:
        GraphError: this system cannot load the library.
    """
    if library is None:
        return TorchBackend()
    if not loads(library):
        raise GraphError(f"{library} cannot be loaded by this system; it was built on a newer one, or is damaged")
    return NativeBackend(str(library))


def prebuilt_backend(device: torch.device) -> Backend:
    """Return the C++ kernels if they were built in advance and the device is the CPU, else torch; builds nothing."""
    library = prebuilt_library() if device.type == "cpu" else None
    return TorchBackend() if library is None else NativeBackend(str(library))
