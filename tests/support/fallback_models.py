"""Small random models of architectures that graphcore has none of its own for, saved as transformers saves them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from support.tiny_models import GQA, NO_TOKENS, SIZES, VOCAB, randomise

NEW_TOKENS = 40
LAYERS = {"num_hidden_layers": 3, **NO_TOKENS}
CONFIGS: Mapping[str, dict[str, object]] = {
    "phi3": {**SIZES, **GQA, **LAYERS},  # q, k and v in one matrix, gate and up in another
    "olmo2": {**SIZES, **GQA, **LAYERS},  # norms after attention and MLP, and of q and k
    "granite": {
        **SIZES,
        **GQA,
        **LAYERS,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "stablelm": {**SIZES, **GQA, **LAYERS, "use_qkv_bias": True},  # LayerNorm, a quarter of each head is rotated
    "gpt_neox": {**SIZES, **LAYERS, "num_attention_heads": 4},  # attention and MLP side by side; head called embed_out
    "bloom": {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 3, "n_head": 4, **NO_TOKENS},  # ALiBi; tied
    "phi3_long": {  # two sets of rotary factors, chosen by length
        **SIZES,
        **GQA,
        **LAYERS,
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * at for at in range(8)],
            "long_factor": [1.5 + 0.3 * at for at in range(8)],
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 1.0,
        },
    },
    "opt": {  # learned positions, which attention masks count
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 112,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        **LAYERS,
        "pad_token_id": 1,
    },
    "gpt_bigcode": {  # learned positions, which padding would shift
        "vocab_size": VOCAB,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
        **NO_TOKENS,
    },
    "olmoe": {  # experts, stored one by one
        **SIZES,
        **GQA,
        **LAYERS,
        "intermediate_size": 48,
        "num_experts": 12,
        "num_experts_per_tok": 3,
    },
    "lfm2": {**SIZES, **GQA, **LAYERS, "full_attn_idxs": [1]},  # convolutions between attention; run one by one
    "gemma2": {**SIZES, **GQA, **LAYERS, "head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0},
    # Models whose class fails in the first pass: no token for padding; no layer that attends.
    "camembert": {**SIZES, **LAYERS, "num_attention_heads": 4, "is_decoder": True},
    "bamba": {**SIZES, **GQA, **LAYERS, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8},
}
ISSUE = ("phi3", "olmo2", "granite", "stablelm", "gpt_neox", "bloom")
MORE = ("phi3_long", "opt", "gpt_bigcode", "olmoe", "lfm2", "gemma2")
ALONE = ("phi3_long", "lfm2")
WITHOUT_SDPA = ("bloom", "gemma2")  # transformers has only eager attention for them on the CPU
CASES = [
    (name, kind)
    for name in (*ISSUE, *MORE)
    for kind in ("eager", "sdpa")
    if kind == "eager" or name not in WITHOUT_SDPA
]


@dataclass(frozen=True)
class FallbackModel:
    """A checkpoint folder and the transformers model that it was saved from.

    Attributes:
        reference: float32.
        attention: the implementation that the reference and the engine run.
    """

    name: str
    folder: Path
    reference: "torch.nn.Module"
    attention: str

    @cached_property
    def ids(self) -> Tensor:
        """Two sequences of 50 tokens; one where the model is only itself without neighbours."""
        rows = 1 if self.name in ALONE else 2
        return torch.randint(2, VOCAB, (2, 50), generator=torch.Generator().manual_seed(5))[:rows]

    @property
    def other_ids(self) -> list[list[int]]:
        """Three sequences of other lengths, from either side of where rotary factors change."""
        whole = torch.randint(2, VOCAB, (50,), generator=torch.Generator().manual_seed(6)).tolist()
        return [whole[:7], whole[10:40], whole[35:48]]

    @torch.no_grad()
    def outputs(self, **wanted: bool) -> "object":
        """Return what transformers gives for `ids` in one pass."""
        return self.reference(input_ids=self.ids, use_cache=False, **wanted)

    @torch.no_grad()
    def greedy(self) -> list[list[int]]:
        """Return what transformers' own generate adds to `ids`."""
        made = self.reference.generate(self.ids, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True)
        new: list[list[int]] = made[:, self.ids.shape[1] :].tolist()
        return new


def build_fallback(name: str, attention: str = "eager", **changes: object) -> "torch.nn.Module":
    """Return a model with random weights, float32, ready to run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition("_long")[0], **{**CONFIGS[name], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    randomise(model, 0)
    return model.eval()


def save_fallback(name: str, folder: Path, attention: str = "eager", **changes: object) -> FallbackModel:
    """Save a model as transformers does and return it with its folder."""
    reference = build_fallback(name, attention, **changes)
    reference.save_pretrained(folder)
    return FallbackModel(name, folder, reference, attention)
