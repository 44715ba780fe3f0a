"""Each weight gets the format that llama.cpp's own quantiser gives it in a plain file type."""

import json
from itertools import product as every_pair
from pathlib import Path

import pytest
from support.cases import in_case

from graphcore.config.validate import QUANT_FORMATS
from graphcore.errors import UnsupportedError
from graphcore.quant import FORMATS
from graphcore.quant.format_choice import STORED, choose_format, packable_names

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "libggml" / "file_types.json").read_text(encoding="utf-8"))
NAMES = {
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "output_norm": "norm",
    "blk.0.attn_norm": "layers.0.input_layernorm",
    "blk.0.ffn_norm": "layers.0.post_attention_layernorm",
    "blk.0.attn_q": "layers.0.self_attn.q_proj",
    "blk.0.attn_k": "layers.0.self_attn.k_proj",
    "blk.0.attn_v": "layers.0.self_attn.v_proj",
    "blk.0.attn_output": "layers.0.self_attn.o_proj",
    "blk.0.ffn_gate": "layers.0.mlp.gate_proj",
    "blk.0.ffn_up": "layers.0.mlp.up_proj",
    "blk.0.ffn_down": "layers.0.mlp.down_proj",
}
BONUS = ("q4_k", "blk.0.attn_v.weight")  # Q4_K_S gives the first layers' values a bit more


def test_formats_are_llama_cpps() -> None:
    for asked, model in every_pair(sorted(GOLDEN["wide tied"]), sorted(GOLDEN)):
        with in_case(asked, model):
            for stored, (shape, given) in GOLDEN[model][asked].items():
                name = NAMES[stored.removesuffix(".weight")] + ".weight"
                chosen = choose_format(name, shape, asked, is_tied=model.endswith(" tied"))
                if (asked, stored) != BONUS:
                    assert chosen == (None if given in ("f32", "f16") else given), stored


def test_stored_leaves_everything() -> None:
    assert choose_format("layers.0.mlp.up_proj.weight", (64, 256), STORED, is_tied=False) is None


@pytest.mark.parametrize(
    "name",
    ["layers.0.mlp.up_proj.bias", "norm.weight", "layers.0.self_attn.q_norm.weight", "embed_tokens.positions",
     "layers.0.mlp.router.weight"],
)  # fmt: skip
def test_biases_norms_routers_and_positions_are_never_packed(name: str) -> None:
    assert choose_format(name, (256, 256), "q8_0", is_tied=False) is None


def test_experts_are_packed() -> None:
    assert choose_format("layers.0.mlp.experts.down_proj.weight", (4, 64, 256), "mxfp4", is_tied=False) == "mxfp4"


def test_dense_types_apply_to_every_matrix() -> None:
    assert choose_format("lm_head.weight", (32, 48), "bf16", is_tied=False) == "bf16"


@pytest.mark.parametrize("asked", ["iq4_xs", "q9_9"])
def test_what_cannot_be_packed_is_refused_with_what_can(asked: str) -> None:
    with pytest.raises(UnsupportedError, match=r"unknown packing format .*known: .*q4_k.*q8_0"):
        choose_format("lm_head.weight", (32, 256), asked, is_tied=False)


def test_the_settings_offer_what_can_be_packed() -> None:
    assert set(QUANT_FORMATS) == {STORED, *packable_names()}
    assert set(packable_names()) <= FORMATS.keys()
