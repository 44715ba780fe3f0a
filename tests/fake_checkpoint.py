"""A checkpoint that is a dict of tensors, and a small model of each kind to match with it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config_from_json import parse_model_config
from graphcore.arch.registry import architecture_of
from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.nn.decoder import Decoder

ENCODINGS = {dtype: name for name, dtype in DENSE_DTYPES.items()}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 20, "num_attention_heads": 2}
LLAMA = {**SIZES, "model_type": "llama", "num_key_value_heads": 1, "tie_word_embeddings": False}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12, "vocab_size": 20}


class FakeCheckpoint(Checkpoint):
    """Tensors by name; `packed` says what type and shape the uint8 tensors of those names have."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        layout: str = "hf",
        packed: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    ) -> None:
        self.source = "fake.safetensors"
        self.layout = layout
        self.held = dict(tensors)
        packed = packed or {}
        infos = {}
        for name, tensor in self.held.items():
            encoding, shape = packed.get(name, (ENCODINGS[tensor.dtype], tuple(tensor.shape)))
            infos[name] = TensorInfo(name, shape, encoding, None, 0, tensor.nbytes)
        self.tensors = MappingProxyType(infos)

    def spans(self, name: str) -> tuple[FileSpan, ...]:
        self.find(name)
        return ()

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        self.find(name)
        return self.held[name].clone()


def config_of(raw: dict, **changes: object) -> ModelConfig:
    return parse_model_config({**raw, **changes}, "config.json")


def meta_decoder(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    with torch.device("meta"):
        return Decoder(architecture_of(config).spec(config), dtype)


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of the decoder's weights, by name."""
    groups = meta_decoder(config).groups()
    return {prefix + name: tuple(t.shape) for prefix, module in groups for name, t in module.named_buffers()}


def stored_tensors(config: ModelConfig, prefix: str = "model.", seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random tensors under Hugging Face's names for a family that stores each weight as it is."""
    generator = torch.Generator().manual_seed(seed)
    names = {name: name if name == "lm_head.weight" else prefix + name for name in shapes_of(config)}
    return {names[name]: torch.randn(shape, generator=generator) for name, shape in shapes_of(config).items()}


def stored_gpt2(prefix: str = "", layers: int = 2, dim: int = 16) -> dict[str, torch.Tensor]:
    """Return random tensors under GPT-2's names and shapes, as transformers' GPT2Model holds them."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (20, dim), "wpe.weight": (12, dim)}
    for leaf in ("weight", "bias"):
        shapes[f"ln_f.{leaf}"] = (dim,)
        shapes.update({f"h.{i}.{norm}.{leaf}": (dim,) for i in range(layers) for norm in ("ln_1", "ln_2")})
    for module, inputs, outputs in (
        ("attn.c_attn", dim, 3 * dim),
        ("attn.c_proj", dim, dim),
        ("mlp.c_fc", dim, 4 * dim),
        ("mlp.c_proj", 4 * dim, dim),
    ):
        shapes.update({f"h.{i}.{module}.weight": (inputs, outputs) for i in range(layers)})
        shapes.update({f"h.{i}.{module}.bias": (outputs,) for i in range(layers)})
    generator = torch.Generator().manual_seed(0)
    return {prefix + name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
