"""Proof that every weight lies where it was planned to lie: on the device, in one allocation, at its aligned place.

    [ token embedding | positions | layer 0 | layer 1 | ... | final norm | head ]    a tied head has no bytes of its own

What runs reads addresses that were taken once (native programs, captured graphs). A buffer that was bound to something
else afterwards would leave them reading old bytes, which no result shows at once.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from graphcore.errors import ResidencyError
from graphcore.nn.decoder import Decoder
from graphcore.weights.layout import ALIGNMENT, Layout, Place
from graphcore.weights.matching import EMBEDDING, HEAD
from graphcore.weights.slots import Slot

ADVICE = "load the model again, and leave its buffers where the loader put them"


def check_resident(
    decoder: Decoder, slot: Slot, layouts: Sequence[Layout], device: torch.device, moved: Collection[str] = ()
) -> None:
    """Return if all weights lie where the layouts say.

    Args:
        slot: the one allocation.
        layouts: of the decoder's groups, in order; they lie one after another in the slot.
        device: where the weights are to be.
        moved: names of weights that have no place here.

    Raises:
        ResidencyError: a weight lies elsewhere; the message names it, its expected and its found place.
    """
    expected = dict(_places(decoder, layouts))
    end = 0
    for name, tensor in _buffers(decoder):
        if name in moved:
            continue
        place = expected.pop(name, None)
        if place is None:
            _check_tied(decoder, name, tensor)
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


def _buffers(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its whole name, in order of use; a tied head's too."""
    for prefix, group in decoder.groups():
        for name, tensor in group.named_buffers():
            yield prefix + name, tensor


def _places(decoder: Decoder, layouts: Sequence[Layout]) -> Iterator[tuple[str, Place]]:
    """Yield each weight's place, its offset counted from the slot's first byte."""
    start = 0
    for (prefix, _), layout in zip(decoder.groups(), layouts, strict=True):
        for name, place in layout.places.items():
            yield prefix + name, Place(start + place.offset, place.shape, place.dtype)
        start += layout.nbytes


def _check_tied(decoder: Decoder, name: str, tensor: Tensor) -> None:
    if name != HEAD:
        raise ResidencyError(f"weight '{name}' has no place in any layout; {ADVICE}")
    if tensor is not decoder.embed_tokens.weight:
        raise ResidencyError(f"weight '{HEAD}' must be the tensor of '{EMBEDDING}', but is another one; {ADVICE}")


def _fault(tensor: Tensor, place: Place, slot: Slot, device: torch.device) -> str | None:
    """Return in words where or what the tensor is instead, or None if all is well."""
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
