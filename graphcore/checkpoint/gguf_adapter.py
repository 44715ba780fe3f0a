"""The reader of LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

    general.type "adapter"   adapter.type "lora"   adapter.lora.alpha   general.architecture of the base model
    blk.0.attn_q.weight.lora_a    [R, I]
    blk.0.attn_q.weight.lora_b    [O, R]; rows in the order that the base model's GGUF file has

A product is scaled by alpha / R; an alpha of 0 stands for no scale. Source: llama.cpp, src/llama-adapter.cpp and .h.
"""

import re
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from types import MappingProxyType

from graphcore.checkpoint.adapter import MERGE, Adapter, paired, refuse_experts
from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.gguf_checkpoint import place_tensors
from graphcore.checkpoint.gguf_header import GGUFHeader, read_gguf_header
from graphcore.errors import CheckpointError, UnsupportedError, quoted

ALPHA = "adapter.lora.alpha"
INVOCATION = "adapter.alora.invocation_tokens"
FACTOR_NAME = re.compile(r"(?P<module>.+)\.weight\.lora_(?P<which>[ab])", re.DOTALL)


def read_gguf_adapter(path: Path) -> Adapter:
    """Return the adapter in a GGUF file.

    Raises:
        CheckpointNotFoundError: the path does not exist.
        UnsupportedError: the file is a model, or an adapter of another kind than LoRA.
        CheckpointError: the file is damaged.
    """
    header = read_gguf_header(path)
    alpha, architecture = _checked(header)
    placed = place_tensors(header, architecture)
    factors = list(_factors(placed, str(path)))
    ranks = {module: info.shape[-1] for module, which, info in factors if which == "B"}
    scales = {module: alpha / ranks.get(module, 1) if alpha else 1.0 for module, _, _ in factors}
    files = MappingProxyType({path: header.identity})
    return Adapter(str(path), "gguf", architecture, paired(str(path), factors, scales), files)


def _checked(header: GGUFHeader) -> tuple[float, str]:
    """Return alpha and the architecture of an adapter's header."""
    path, metadata = header.path, header.metadata
    if metadata.get("general.type") != "adapter":
        raise UnsupportedError(f"{path}: is no adapter (general.type is not 'adapter'); name it in model.checkpoint=")
    if metadata.get("adapter.type") != "lora":
        kind = quoted(metadata.get("adapter.type"))
        raise UnsupportedError(f"{path}: is an adapter of type {kind}, and only LoRA adapters are read; {MERGE}")
    if metadata.get(INVOCATION):
        raise UnsupportedError(f"{path}: has activated LoRA ({INVOCATION}), which is not supported")
    alpha, architecture = metadata.get(ALPHA), metadata.get("general.architecture")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not isfinite(alpha):
        raise CheckpointError(f"{path}: {ALPHA} is {quoted(alpha)}, not a number; convert the adapter again")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path}: lacks general.architecture; convert the adapter again")
    return alpha, architecture


def _factors(placed: dict[str, TensorInfo], source: str) -> Iterator[tuple[str, str, TensorInfo]]:
    """Yield module, "A" or "B", and description of each factor; refuse every other tensor."""
    for name, info in placed.items():
        match = FACTOR_NAME.fullmatch(name)
        if match is None:
            raise UnsupportedError(f"{source}: tensor {quoted(name)} is no LoRA factor of a matrix; {MERGE}")
        refuse_experts(source, match["module"])
        yield match["module"], match["which"].upper(), info
