"""The fingerprint of a saved cache: all that the bits of keys and values depend on. It must be equal to load a cache.

Settings that change no bit of a prompt are left out: streaming, decode graphs, the number of sequences, and threads
where the C++ kernels multiply everything.
"""

from collections.abc import Mapping

WEIGHTS, SOURCE, PAGE, CONTEXT = "weights", "model.checkpoint", "page", "context_length"
LONGROPE = "longrope"  # which of LongRoPE's lists of divisors keys are rotated with, which follows from the context
PRODUCTS = "products"  # of prompts: the C++ kernels', or torch's with its threads and instructions
LAYERS = "layers"  # of a rank of a ring, whose file has the caches of no others
ABOUT = frozenset({SOURCE, CONTEXT})  # of no effect on bits; messages name them
SETTINGS = frozenset({"dtype", "kv_dtype", "quant", "quant.activations", "prefill_chunk", "graph"})
ADVICE = {
    WEIGHTS: "save the prompt again with this model",
    LAYERS: "start as many ranks as then with the same streaming and parallel.split, or save it again",
    LONGROPE: "set a context_length that has it, or save it again",
    "device": "save it again on this one",
    "kernels": "save it again with these",
    PRODUCTS: "set threads and the environment's instruction sets as then, or save it again",
    "torch": "save it again with this one",
}


def difference(saved: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Return in words the first condition that differs, and what to do; empty if none does."""
    if LAYERS in saved and LAYERS not in here:
        return f"has only the layers {saved[LAYERS]}; load it with parallel=ring, or save it again"
    key = next((key for key in here if key not in ABOUT and saved.get(key) != here[key]), None)
    if key is None:
        return ""
    there = saved.get(key, "nothing")
    if key == WEIGHTS:
        return f"belongs to other weights, of {saved.get(SOURCE, 'another model')}, not {here[SOURCE]}; {ADVICE[key]}"
    if key == PAGE:
        context = saved.get(CONTEXT, "null")
        return (
            f"has pages of {there} positions, and with context_length={here[CONTEXT]} they have {here[PAGE]}; set "
            f"context_length={context}, or save it again"
        )
    advice = f"set {key}={there}, or save it again" if key in SETTINGS else ADVICE[key]
    return f"was saved with {key}={there}, and this run has {key}={here[key]}; {advice}"
