"""Token counts and shapes of a run: the true ones, or tiny ones that try the code out on the CPU."""

from collections.abc import Mapping
from dataclasses import dataclass

LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
TINY: Mapping[str, Mapping[str, object]] = {
    "llama": {**LLAMA, "rope_scaling": "null"},
    "gpt_oss": {**LLAMA, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": "null"},
    "bitnet": LLAMA,
}


@dataclass(frozen=True)
class Sizes:
    """How many tokens and repeats.

    Attributes:
        prompt, new: tokens of a decode measurement.
        long_prompt: of a prefill measurement.
        streamed_new: new tokens where each moves gigabytes.
        depths: of the KV cache at which decode is timed; the last is nearly the context.
        context: of that measurement.
        batches: number of sequences: for captured steps, and for what compute can hide copies behind.
        fence: bytes of device memory that a fenced part leaves free.
        ceiling_nbytes: of the buffers that ceilings are measured with.
        gemm: rows and columns of the matrices of the GEMM rate.
    """

    prompt: int = 128
    new: int = 256
    repeats: int = 5
    long_prompt: int = 2048
    streamed_new: int = 16
    depths: tuple[int, ...] = (0, 4096, 16384, 65536, 130000)
    context: int = 131072
    batches: tuple[int, int] = (8, 32)
    fence: int = 14 << 30
    ceiling_nbytes: int = 2 << 30
    gemm: int = 8192


TRUE = Sizes()
DRY = Sizes(
    prompt=8,
    new=4,
    repeats=2,
    long_prompt=48,
    streamed_new=2,
    depths=(0, 32, 96),
    context=128,
    batches=(2, 4),
    fence=64 << 20,
    ceiling_nbytes=4 << 20,
    gemm=64,
)


def model_overrides(model: str, checkpoint: str, is_dry: bool) -> list[str]:
    """Return the settings that name a model of random weights; of a tiny shape in a dry run."""
    chosen = [f"model={model}", f"model.checkpoint='{checkpoint}'"]
    if not is_dry:
        return chosen
    family = model if model in TINY else "llama"
    return [*chosen, *(f"++model.random_config.{key}={value}" for key, value in TINY[family].items())]
