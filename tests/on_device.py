"""Lets tests that give CPU tensors to Triton kernels run on a GPU as they are.

Tests of kernels know no device: without a GPU Triton's interpreter runs the kernels on CPU memory. With one, each
launch gets copies on the device of the memory that its tensors lie in, and what the kernel wrote is copied back.
Tensors that share memory share its copy, and offsets stay, so that what a kernel sees differs in nothing but the
address.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Mirror:
    """The memory of one launch's arguments, on the device."""

    device: torch.device
    copies: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def moved(self, argument: Any) -> Any:
        """Return an argument of a launch with its CPU tensors on the device."""
        if isinstance(argument, tuple) and hasattr(argument, "_fields"):  # a layout: a constant without tensors
            return argument
        if isinstance(argument, tuple | list):
            return type(argument)(map(self.moved, argument))
        if not isinstance(argument, Tensor) or argument.device.type != "cpu":
            return argument
        storage = argument.untyped_storage()
        if storage.data_ptr() not in self.copies:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.copies[storage.data_ptr()] = (whole, whole.to(self.device, copy=True))
        copied = self.copies[storage.data_ptr()][1].untyped_storage()
        view = torch.empty(0, dtype=argument.dtype, device=self.device)
        return view.set_(copied, argument.storage_offset(), argument.size(), argument.stride())

    def bring_back(self) -> None:
        """Copy everything back, once the kernel has run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for whole, copied in self.copies.values():
            whole.copy_(copied)


def launch_on(device: torch.device, launch: Any) -> Any:
    """Return what takes the place of `triton.JITFunction.run`."""

    def run(self: Any, *args: object, **kwargs: object) -> object:
        mirror = Mirror(device)
        answer = launch(self, *map(mirror.moved, args), **{key: mirror.moved(value) for key, value in kwargs.items()})
        mirror.bring_back()
        return answer

    return run
