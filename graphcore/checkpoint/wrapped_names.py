"""Names of tensors that a training program saved through wrappers around the model, and the names that are left.

    module._orig_mod.model.layers.0.self_attn.q_proj.weight   ->   model.layers.0.self_attn.q_proj.weight

torch.compile, FSDP and activation checkpointing wrap whole models or single layers, under names that nothing else has.
DistributedDataParallel's "module." and PEFT's "base_model.model." are taken off where all tensors have them.
"""

from collections.abc import Iterable, Mapping, Sequence

from graphcore.errors import CheckpointError, quoted

TORCH_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # anywhere in a name
SHARED_WRAPPERS = ("module.", "base_model.model.")  # in front of all names


def unwrapped_names(names: Iterable[str], source: str) -> dict[str, str]:
    """Return the name of each tensor without wrappers, by its stored name.

    Args:
        names: stored names.
        source: name of the checkpoint, for messages.

    Raises:
        CheckpointError: two tensors have the same name without wrappers.
    """
    found = {name: ".".join(part for part in name.split(".") if part not in TORCH_WRAPPERS) for name in names}
    while prefix := _shared_prefix([plain for plain in found.values() if "." in plain]):
        found = {name: plain.removeprefix(prefix) for name, plain in found.items()}
    stored: dict[str, str] = {}
    for name, plain in found.items():
        if stored.setdefault(plain, name) != name:
            raise CheckpointError(
                f"{source}: tensors {quoted(stored[plain])} and {quoted(name)} are both {quoted(plain)} without the "
                "names of wrappers; save the model without wrappers"
            )
    return found


def _shared_prefix(names: Sequence[str]) -> str:
    """Return the wrapper that all names begin with; empty if there is none."""
    return next((one for one in SHARED_WRAPPERS if names and all(name.startswith(one) for name in names)), "")


def note_on_wrappers(unwrapped: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note that shows one of the names that lost its wrappers, or none."""
    example = next((name for name, plain in unwrapped.items() if plain != name), None)
    if example is None:
        return ()
    return (f"names of wrappers were taken off tensors' names, as in {quoted(example)}",)
