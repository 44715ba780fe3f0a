"""How much of what a cache holds serves a new prompt that begins alike: the turns of a chat."""

from collections.abc import Sequence

from graphcore.nn.kv_cache import LayerCache


def reusable_prefix(cached: Sequence[int], prompt: Sequence[int], caches: Sequence[LayerCache]) -> int:
    """Return how many tokens of the prompt need not be run again; at least one always runs, for its logits.

    A full-attention layer can go back to any earlier position. A ring that has wrapped has lost the keys before its
    window, so it can only go on from where it is.

    Args:
        cached: tokens whose keys and values the caches hold.
        prompt: the new prompt.
        caches: of all layers; their slots say which are rings.
    """
    same = next((at for at, (old, new) in enumerate(zip(cached, prompt, strict=False)) if old != new), None)
    common = min(len(cached), len(prompt)) if same is None else same
    common = min(common, len(prompt) - 1)
    fewest_slots = min(cache.k.shape[2] for cache in caches)
    has_wrapped = len(cached) > fewest_slots
    return common if not has_wrapped or common == len(cached) else 0
