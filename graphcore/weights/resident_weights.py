"""Loading of resident weights: allocate one block of memory, fill it, bind the modules to it, and check.

    [ token embedding | positions | layer 0 | layer 1 | ... | final norm | head ]    a tied head has no bytes of its own

Native programs and captured graphs keep the weights' addresses. If a buffer were bound to other memory later, they
would read stale bytes, which might go unnoticed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from graphcore.errors import ResidencyError
from graphcore.nn.decoder import Decoder
from graphcore.progress import Progress
from graphcore.weights.groups import Group, resident_groups
from graphcore.weights.layout import ALIGNMENT, Layout, Place
from graphcore.weights.loader import Loader
from graphcore.weights.matching import EMBEDDING, HEAD
from graphcore.weights.slots import Slot, bind

CPU = torch.device("cpu")
ADVICE = "load the model again, and leave its buffers where the loader put them"


def load_resident(
    loader: Loader,
    decoder: Decoder,
    device: torch.device,
    on_progress: Progress,
    moved: Collection[str] = (),
) -> int:
    """Allocate memory for a decoder's resident weights, fill it from the checkpoint, and bind the buffers to it.

    Args:
        decoder: decoder on the meta device.
        on_progress: callback, called with "load", the index of the loaded group, bytes done and bytes in all.
        moved: names of weights that are not resident; they stay on the meta device.

    Returns:
        The bytes of all resident weights.

    Raises:
        CheckpointError: the file changed, or holds values that are not valid weights.
        ResidencyError: a weight is not at its planned place.
    """
    groups = resident_groups(decoder, loader.is_tied, moved)
    layouts = [group.layout for group in groups]
    whole = load_groups(loader, groups, device, on_progress)
    shared = {HEAD: EMBEDDING} if loader.is_tied else {}
    if shared and HEAD not in moved:
        bind(decoder.head, HEAD, decoder.embed_tokens.weight)
    check_resident(named_weights(decoder), whole, layouts, device, moved, shared)
    return whole.raw.nbytes


def load_groups(loader: Loader, groups: Sequence[Group], device: torch.device, on_progress: Progress) -> Slot:
    """Allocate one block of memory for groups of weights, fill it, and bind the modules to it; return the block.

    Args:
        groups: groups of weights on the meta device; they will lie in this order.
        on_progress: callback as for `load_resident`.

    Raises:
        CheckpointError: the file changed, or holds values that are not valid weights.
    """
    layouts = [group.layout for group in groups]
    whole = Slot.allocate(sum(layout.nbytes for layout in layouts), device)
    done = 0
    for index, (group, layout, slot) in enumerate(zip(groups, layouts, whole.split(layouts), strict=True)):
        # The CPU converts the weights; for another device they are converted in RAM, then copied in one piece.
        made = slot if device.type == "cpu" else Slot.allocate(layout.nbytes, CPU)
        group.fill(loader, made)
        if made is not slot:
            slot.raw.copy_(made.raw)
        group.bind(slot)
        done += layout.nbytes
        on_progress("load", index, done, whole.raw.nbytes)
    return whole


def named_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every weight, in the order of use; a tied head is included."""
    for prefix, group in decoder.groups():
        for name, tensor in group.named_buffers():
            yield prefix + name, tensor


def check_resident(
    weights: Iterable[tuple[str, Tensor]],
    slot: Slot,
    layouts: Sequence[Layout],
    device: torch.device,
    moved: Collection[str] = (),
    shared: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that all resident weights lie where the layouts say.

    Args:
        weights: name and tensor of every weight of the model, in the order of the layouts.
        slot: allocation that holds all resident weights.
        layouts: layouts of the groups, which lie one after another in the slot.
        device: device of the weights.
        moved: names of weights that are not resident.
        shared: names of weights without bytes of their own, each with the name of the weight whose bytes it reads.

    Raises:
        ResidencyError: a weight lies elsewhere; the message names it, its expected place and the actual one.
    """
    tensors, expected = dict(weights), dict(_places(layouts))
    end = 0
    for name, tensor in tensors.items():
        if name in moved:
            continue
        place = expected.pop(name, None)
        if place is None:
            _check_shared(name, tensor, shared.get(name), tensors)
            continue
        wanted = f"{place.nbytes} bytes at byte {place.offset} of the weights' allocation on {device}"
        found = _fault(tensor, place, slot, device)
        if found is None and place.offset < end:
            found = f"overlaps the weight before it, which ends at byte {end}"
        if found is not None:
            raise ResidencyError(f"weight '{name}' must be {wanted}, but {found}; {ADVICE}")
        end = place.offset + place.nbytes
    if expected:
        raise ResidencyError(f"weights {sorted(expected)} have a place, but no buffer holds them; {ADVICE}")


def _places(layouts: Sequence[Layout]) -> Iterator[tuple[str, Place]]:
    """Yield each weight's name and place, with its offset from the slot's first byte."""
    start = 0
    for layout in layouts:
        for name, place in layout.places.items():
            yield name, Place(start + place.offset, place.shape, place.dtype)
        start += layout.nbytes


def _check_shared(name: str, tensor: Tensor, partner: str | None, tensors: Mapping[str, Tensor]) -> None:
    if partner is None:
        raise ResidencyError(f"weight '{name}' has no place in any layout; {ADVICE}")
    if tensor.is_meta or tensor.data_ptr() != tensors[partner].data_ptr():
        raise ResidencyError(f"weight '{name}' must be the tensor of '{partner}', but is another one; {ADVICE}")


def _fault(tensor: Tensor, place: Place, slot: Slot, device: torch.device) -> str | None:
    """Return in words how a tensor differs from its place in the slot; None if it does not."""
    offset = tensor.data_ptr() - slot.raw.data_ptr()
    if tensor.is_meta:
        return "is on the meta device, without bytes"
    if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
        return f"is on {tensor.device}"
    if tensor.untyped_storage().data_ptr() != slot.raw.untyped_storage().data_ptr():
        return "is in another allocation"
    if offset != place.offset:
        return f"is at byte {offset}"
    if tensor.data_ptr() % ALIGNMENT:
        return f"is at an address that is no multiple of {ALIGNMENT}"
    if (tuple(tensor.shape), tensor.dtype) != (place.shape, place.dtype) or not tensor.is_contiguous():
        return f"is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
    if offset + place.nbytes > slot.raw.nbytes:
        return f"ends at byte {offset + place.nbytes}, behind the slot's {slot.raw.nbytes}"
    return None
