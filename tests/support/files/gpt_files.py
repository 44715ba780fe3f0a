"""GGUF files of the GPT-2 family, written by the gguf package, and transformers' model of the same weights.

Each matrix and embedding table can be stored packed. Packed ones are random blocks whose scales are sane: every byte
string is some quantiser's, so the weights that they stand for are what gguf-py's own `dequantize` says.
"""

from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from torch import nn

VOCAB, DIM, HEADS, HIDDEN, POSITIONS, LAYERS = 40, 256, 4, 512, 32, 2
KEYS = {
    "context_length": POSITIONS,
    "embedding_length": DIM,
    "block_count": LAYERS,
    "feed_forward_length": HIDDEN,
    "attention.head_count": HEADS,
}
EPSILON = 1e-5
# The seven that read a matrix or a table, and its shape in numpy order: outputs, inputs.
CONSUMERS = {
    "token_embd": (VOCAB, DIM),
    "position_embd": (POSITIONS, DIM),
    "attn_qkv": (3 * DIM, DIM),
    "attn_output": (DIM, DIM),
    "ffn_up": (HIDDEN, DIM),
    "ffn_down": (DIM, HIDDEN),
    "output": (VOCAB, DIM),
}
OUTSIDE = ("token_embd", "position_embd", "output")


@dataclass
class Stored:
    """A tensor as it is written: values, or bytes [rows, bytes of a row] of a packed type."""

    content: np.ndarray
    packed: Type | None = None

    @property
    def values(self) -> np.ndarray:
        """The weights, float32."""
        return self.content if self.packed is None else dequantize(self.content, self.packed)


@dataclass
class GPTFile:
    """What a file is made of; tests change it before they write it.

    Attributes:
        keys: sizes, under the architecture's prefix.
        tensors: by name, in numpy order.
    """

    tensors: dict[str, Stored]
    architecture: str = "gpt2"
    keys: dict[str, int] = field(default_factory=lambda: dict(KEYS))

    def write(self, path: Path) -> Path:
        """Write the file and return its path."""
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.keys.items():
            writer.add_uint32(f"{self.architecture}.{key}", value)
        writer.add_float32(f"{self.architecture}.attention.layer_norm_epsilon", EPSILON)
        for name, stored in self.tensors.items():
            writer.add_tensor(name, stored.content, raw_dtype=stored.packed)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def reference(self) -> nn.Module:
        """Return transformers' GPT-2 with these weights, float64."""
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": VOCAB, "n_embd": DIM, "n_head": HEADS, "n_layer": LAYERS, "n_inner": HIDDEN}
        is_tied = "output.weight" not in self.tensors
        config = GPT2Config(
            **sizes, n_positions=POSITIONS, layer_norm_epsilon=float(np.float32(EPSILON)), tie_word_embeddings=is_tied
        )
        model = GPT2LMHeadModel(config).double()
        names = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f"}
        leaves = {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        }
        state = {}
        for name, stored in self.tensors.items():
            values = torch.from_numpy(stored.values.astype(np.float64))
            module, _, parameter = name.rpartition(".")
            if name == "output.weight":
                state["lm_head.weight"] = values
            elif module.startswith("blk."):
                _, layer, leaf = module.split(".")
                conv1d = parameter == "weight" and values.ndim == 2  # transformers holds these by input row
                state[f"transformer.h.{layer}.{leaves[leaf]}.{parameter}"] = values.T if conv1d else values
            else:
                state[f"transformer.{names[module]}.{parameter}"] = values
        result = model.load_state_dict(state, strict=False)
        assert not result.unexpected_keys
        assert set(result.missing_keys) == ({"lm_head.weight"} if is_tied else set())
        model.tie_weights()
        model.set_attn_implementation("eager")
        return model.eval()


def small_file(packed: dict[str, Type] | None = None, is_tied: bool = False, seed: int = 0) -> GPTFile:
    """Return a file of two layers; `packed` gives the type of the consumers that are not float32, by name."""
    random = np.random.default_rng(seed)

    def dense(shape: tuple[int, ...], around: float) -> Stored:
        return Stored((around + random.normal(0, 0.3 if len(shape) == 1 else 0.06, shape)).astype(np.float32))

    def consumer(name: str) -> Stored:
        kind = (packed or {}).get(name)
        return (
            dense(CONSUMERS[name], 0.0) if kind is None else Stored(random_blocks(random, kind, CONSUMERS[name]), kind)
        )

    tensors = {f"{name}.weight": consumer(name) for name in OUTSIDE if name != "output" or not is_tied}
    for layer in range(LAYERS):
        for name, shape in CONSUMERS.items():
            if name not in OUTSIDE:
                tensors[f"blk.{layer}.{name}.weight"] = consumer(name)
                tensors[f"blk.{layer}.{name}.bias"] = dense(shape[:1], 0.0)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = dense((DIM,), 1.0)
            tensors[f"blk.{layer}.{name}.bias"] = dense((DIM,), 0.0)
    tensors["output_norm.weight"] = dense((DIM,), 1.0)
    tensors["output_norm.bias"] = dense((DIM,), 0.0)
    return GPTFile(tensors)


def random_blocks(random: np.random.Generator, kind: Type, shape: tuple[int, int]) -> np.ndarray:
    """Return [rows, bytes] of random blocks whose weights have a standard deviation of about 0.06.

    Source of the layouts: ggml-common.h. q4_k: f16 d, f16 dmin, 12 bytes of scales, 128 of codes; mxfp4: e8m0,
    16 of codes.
    """
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // elements, nbytes), dtype=np.uint8)
    if kind is Type.Q4_K:
        scales = random.uniform(0.5, 1.5, (*blocks.shape[:2], 1)).astype(np.float32) * 2e-4
        blocks[..., 0:2] = scales.astype("<f2").view(np.uint8)
        blocks[..., 2:4] = (7.5 * scales).astype("<f2").view(np.uint8)
    else:
        assert kind is Type.MXFP4, kind
        blocks[..., 0] = random.integers(119, 122, blocks.shape[:2])
    return blocks.reshape(shape[0], -1)
