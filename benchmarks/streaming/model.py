"""The model of the streaming comparison in the forms that its engines read, made once in the cache folder."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cases import packed_file

if TYPE_CHECKING:
    from torch import Tensor

LLAMA_1B = {  # Llama 3.2 1B's shape
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True)
class StreamedModel:
    """A Hugging Face folder, and where what engines make of it is kept.

    Attributes:
        scratch: GGUF file, AirLLM's second copy, offload folders; named after the folder's path, size and time, so
            that another model does not find this one's.
    """

    folder: Path
    scratch: Path

    @classmethod
    def of(cls, folder: Path, cache: Path) -> "StreamedModel":
        folder = folder.resolve()
        states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in weight_files(folder)]
        if not states:
            raise SystemExit(f"{folder} has no *.safetensors; name a Hugging Face model folder")
        mark = hashlib.sha256(json.dumps(states).encode()).hexdigest()[:8]
        return cls(folder, cache / f"{folder.name}-{mark}")

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in weight_files(self.folder))

    @property
    def largest_file(self) -> Path:
        return max(weight_files(self.folder), key=lambda path: path.stat().st_size)

    def files(self) -> list[Path]:
        """Return every file that an engine may read weights from."""
        return [*weight_files(self.folder), *sorted(self.scratch.rglob("*.safetensors")), *self.scratch.glob("*.gguf")]

    def gguf(self) -> Path:
        """Return the same weights in the same dtype as a GGUF file, written now if it is not there."""
        return packed_file(self.scratch, "stored", "stored", [f"model.checkpoint={self.folder}"])


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def random_model(cache: Path, num_layers: int) -> Path:
    """Return a folder with seeded random bf16 weights of Llama 3.2 1B's shape, written now if it is not there."""
    folder = cache / f"llama1b-bf16-{num_layers}"
    path = folder / "model.safetensors"
    if not path.exists():
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        config = {**LLAMA_1B, "num_hidden_layers": num_layers}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        made = path.with_suffix(".part")
        save_file(random_weights(num_layers), made, metadata={"format": "pt"})
        made.replace(path)
    return folder


def random_weights(num_layers: int) -> "dict[str, Tensor]":
    import torch

    generator = torch.Generator().manual_seed(1)
    dim, inner, vocab = 2048, 8192, 128256
    shapes = {
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (512, dim),
        "self_attn.v_proj": (512, dim),
        "self_attn.o_proj": (dim, dim),
        "mlp.gate_proj": (inner, dim),
        "mlp.up_proj": (inner, dim),
        "mlp.down_proj": (dim, inner),
    }

    def matrix(rows: int, columns: int) -> "Tensor":
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    weights = {"model.embed_tokens.weight": matrix(vocab, dim)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = torch.ones(dim, dtype=torch.bfloat16)
    weights["model.norm.weight"] = torch.ones(dim, dtype=torch.bfloat16)
    return weights
