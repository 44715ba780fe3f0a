"""Small random ternary models in each of Hugging Face's forms, with transformers' own layers as the reference.

transformers loads such checkpoints only with accelerate, so its BitLinear and AutoBitLinear are put into its model
here, as its quantizer does, and given the stored tensors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import BUILDERS, VOCAB, randomise
from torch import Tensor, nn

FORMS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "bitlinear": {"linear_class": "bitlinear"},
    "autobitlinear": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}


@dataclass(frozen=True)
class TernaryModel:
    """A checkpoint folder and transformers' float32 model of the same tensors."""

    folder: Path
    reference: nn.Module
    ids: Tensor

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return transformers' logits of `ids`: [2, 50, V]."""
        with torch.compiler.set_stance("force_eager"):
            return self.reference(input_ids=self.ids, use_cache=False).logits.float()


def save_ternary(
    name: str, form: str, seed: int, folder: Path, changes: Mapping[str, object] | None = None
) -> TernaryModel:
    """Save a family's model with random ternary projections and return it with its folder.

    Args:
        name: in `BUILDERS`.
        form: in `FORMS`.
        seed: of the weights.
        folder: to write to.
        changes: of the family's config.
    """
    torch.manual_seed(seed)
    plain = BUILDERS[name](**(changes or {}))
    randomise(plain, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    stored = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
    if plain.config.tie_word_embeddings:
        del stored["lm_head.weight"]
    for key in [key for key in stored if key.endswith("_proj.weight")]:
        if form != "online":
            stored.update(packed(key, stored[key], form, generator))
    settings = {"quant_method": "bitnet", **FORMS[form]}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**plain.config.to_dict(), "quantization_config": settings}))
    ids = torch.randint(0, VOCAB, (2, 50), generator=generator)
    return TernaryModel(folder, with_transformers_layers(plain, stored, form), ids)


def packed(key: str, weight: Tensor, form: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Return a weight of random signs as stored: bytes by transformers' own packer, and a scale in bf16."""
    from transformers.integrations.bitnet import pack_weights

    ternary = torch.randint(-1, 2, weight.shape, generator=generator, dtype=torch.int8)
    scale = (1.0 + torch.rand(1, generator=generator)) * (1.5 / weight.shape[1]) ** 0.5
    stated = scale if form == "autobitlinear" else 1.0 / scale
    return {key: pack_weights(ternary.clone()), f"{key}_scale": stated.to(torch.bfloat16)}


def with_transformers_layers(plain: nn.Module, stored: Mapping[str, Tensor], form: str) -> nn.Module:
    """Return the model with transformers' ternary layers in place of its Linears, float32, eager attention."""
    from transformers import BitNetQuantConfig
    from transformers.integrations.bitnet import replace_with_bitnet_linear, unpack_weights

    settings = BitNetQuantConfig(**FORMS[form])
    model = replace_with_bitnet_linear(plain, ["lm_head"], settings)
    with torch.compiler.set_stance("force_eager"):
        tensors = {
            key: unpack_weights(tensor, torch.float32)
            if form == "autobitlinear" and tensor.dtype is torch.uint8
            else tensor
            for key, tensor in stored.items()
        }
    tensors = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}
    found = model.load_state_dict(tensors, strict=False, assign=True)
    assert set(found.missing_keys) <= {"lm_head.weight"}, found
    assert not found.unexpected_keys, found
    model.tie_weights()
    model.set_attn_implementation("eager")
    return model.eval()
