"""Buffers that no checkpoint holds, such as rotary frequencies, filled as transformers' from_pretrained fills them.

A model made on the meta device has no values in them. Each class computes them in `_init_weights`, which is called
twice for the modules that hold such buffers, on memory of different contents. A buffer that differs afterwards was not
written, and is refused rather than guessed.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from graphcore.engine.fallback.config import refusing
from graphcore.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILLS = (0, 1)
MOST_NBYTES = 1 << 30  # of one buffer; masks of 8192 positions, the largest that a known class has, take 64 MiB


def materialise_buffers(model: "PreTrainedModel", source: str) -> None:
    """Fill every buffer that is no weight with its values, on the CPU.

    Raises:
        UnsupportedError: the model's class does not compute one of them, or one is too large to be meant.
    """
    for name, module, owner in _owned_modules(model):
        leaves = [leaf for leaf in module._non_persistent_buffers_set if module._buffers[leaf] is not None]
        if not leaves:
            continue
        for leaf in leaves:
            nbytes = module.get_buffer(leaf).nbytes
            if nbytes > MOST_NBYTES:
                raise UnsupportedError(
                    f"{source}: {type(model).__name__} would compute {nbytes / 2**30:.3g} GiB for its buffer "
                    f"'{joined(name, leaf)}'; correct the size in config.json that it follows from"
                )
        first, second = (_filled(module, leaves, owner, fill, source) for fill in FILLS)
        for leaf in leaves:
            if not torch.equal(first[leaf], second[leaf]):
                raise UnsupportedError(
                    f"{source}: {type(model).__name__} does not say what its buffer '{joined(name, leaf)}' holds; "
                    "model.fallback=transformers cannot run it"
                )
    _refuse_plain_tensors(model, source)


@torch.no_grad()
def _filled(
    module: nn.Module, leaves: list[str], owner: "PreTrainedModel", fill: int, source: str
) -> dict[str, Tensor]:
    """Return the buffers as the class writes them, over memory filled with the byte `fill`."""
    for leaf in leaves:
        buffer = module.get_buffer(leaf)
        module._buffers[leaf] = torch.full(buffer.shape, fill, dtype=buffer.dtype, device="cpu")
    # The module's parameters are on the meta device, so that nothing is drawn for them.
    with refusing(source, owner.config.model_type):
        owner._init_weights(module)  # type: ignore[no-untyped-call]  # as transformers leaves it
    return {leaf: module.get_buffer(leaf) for leaf in leaves}


def _owned_modules(model: "PreTrainedModel") -> Iterator[tuple[str, nn.Module, "PreTrainedModel"]]:
    """Yield each module with its name and the innermost transformers model that it belongs to."""
    from transformers import PreTrainedModel

    owners: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        owners[name] = module if isinstance(module, PreTrainedModel) else owners[name.rpartition(".")[0]]
        yield name, module, owners[name]


def _refuse_plain_tensors(model: nn.Module, source: str) -> None:
    """Raise UnsupportedError for meta tensors that are neither parameters nor buffers: nothing would fill them."""
    for name, module in model.named_modules():
        for leaf, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise UnsupportedError(
                    f"{source}: {type(model).__name__} keeps a tensor outside its buffers ('{joined(name, leaf)}'); "
                    "model.fallback=transformers cannot run it"
                )


def joined(name: str, leaf: str) -> str:
    """Return the full name of a leaf of the module `name`, which is empty for the model itself."""
    return f"{name}.{leaf}" if name else leaf
