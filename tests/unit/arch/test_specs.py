"""What each family computes: specs of the development models, written down by hand."""

from dataclasses import replace

import pytest
from dev_models import (
    BITNET,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    EVERY,
    EXAONE4,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GLM,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT2,
    GPT_OSS,
    LFM2,
    LFM2_MOE,
    LLAMA,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    STABLELM,
    STARCODER2,
    config_of,
)
from support.cases import in_case
from support.hub_configs import KIMI_K2

from graphcore.activations import CLAMPED_SWIGLU, Gating
from graphcore.arch.registry import ARCHITECTURES, GGUF_ARCHITECTURES, architecture_of
from graphcore.errors import CheckpointError, UnsupportedError
from graphcore.nn.rope_spec import DivisorScaling, LinearScaling, Llama3Scaling, LongScaling, RopeSpec, YarnScaling
from graphcore.nn.spec import (
    AttentionSpec,
    BlockSpec,
    ConvSpec,
    DeltaSpec,
    LatentSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
)
from graphcore.routing import ScoredRouting


def spec_of(raw: dict, **changes: object) -> ModelSpec:
    config = config_of(raw, **changes)
    return architecture_of(config).spec(config)


def test_every_architecture_is_found_by_its_names_and_no_two_are_read_from_gguf_by_the_same_one() -> None:
    names = [name for one in ARCHITECTURES.values() if one.is_read_from_gguf for name in one.gguf_names]
    assert len(set(names)) == len(names)
    assert GGUF_ARCHITECTURES.keys() == set(names)
    for model_type, one in ARCHITECTURES.items():
        assert one.model_type == model_type
        assert all(name in GGUF_ARCHITECTURES for name in one.gguf_names)


def test_dispatch_is_by_model_type() -> None:
    for model_type in EVERY:
        with in_case(model_type):
            assert architecture_of(config_of(EVERY[model_type])) is ARCHITECTURES[model_type]
            assert len(spec_of(EVERY[model_type], num_hidden_layers=3, n_layer=3).blocks) == 3


def test_dev_model_list_covers_every_architecture() -> None:
    assert EVERY.keys() == ARCHITECTURES.keys()


def test_unknown_model_type_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"mamba.*llama"):
        config_of(LLAMA, model_type="mamba")


def test_llama_3_2_1b() -> None:
    norm = NormSpec("rms", 1e-5)
    rope = RopeSpec(500_000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    attention = AttentionSpec(heads=32, kv_heads=8, head_dim=64, scale=0.125, rope=rope)
    block = BlockSpec(2048, norm, attention, MLPSpec(8192, "silu"))
    assert spec_of(LLAMA) == ModelSpec(2048, 128_256, (block,) * 16, norm, context=131_072, tied=True)


def test_qwen3_1_7b() -> None:
    norm = NormSpec("rms", 1e-6)
    attention = AttentionSpec(16, 8, 128, 128**-0.5, qk_norm=norm, rope=RopeSpec(1_000_000.0))
    block = BlockSpec(2048, norm, attention, MLPSpec(6144, "silu"))
    assert spec_of(QWEN3) == ModelSpec(2048, 151_936, (block,) * 28, norm, context=40_960, tied=True)


def test_gemma_3_1b() -> None:
    norm = NormSpec("rms", 1e-6, scale_in_float32=True)
    mlp = MLPSpec(6912, "gelu_pytorch_tanh")

    def block(window: int | None, theta: float) -> BlockSpec:
        attention = AttentionSpec(4, 1, 256, 256**-0.5, window=window, qk_norm=norm, rope=RopeSpec(theta))
        return BlockSpec(1152, norm, attention, mlp, sandwich=True)

    spec = spec_of(GEMMA3)
    sliding, full = block(512, 10_000.0), block(None, 1_000_000.0)
    assert spec.blocks == (*((sliding,) * 5 + (full,)) * 4, sliding, sliding)
    assert [i for i, b in enumerate(spec.blocks) if b == full] == [5, 11, 17, 23]
    assert (spec.dim, spec.vocab, spec.norm, spec.context) == (1152, 262_144, norm, 32_768)
    assert spec.embedding_scale == 1152**0.5
    assert spec.tied
    assert spec.ropes == ((RopeSpec(10_000.0), 256), (RopeSpec(1_000_000.0), 256))


def test_starcoder2_3b() -> None:
    norm, rope = NormSpec("layer", 1e-5), RopeSpec(999_999.4420358813)
    attention = AttentionSpec(24, 2, 128, 128**-0.5, window=4096, rope=rope, qkv_bias=True, output_bias=True)
    block = BlockSpec(3072, norm, attention, MLPSpec(12_288, "gelu_pytorch_tanh", gated=False, bias=True))
    assert spec_of(STARCODER2) == ModelSpec(3072, 49_152, (block,) * 30, norm, context=16_384, tied=True)
    bare = spec_of(STARCODER2, use_bias=False, sliding_window=None).blocks[0]
    assert bare.attention == replace(attention, window=None, qkv_bias=False, output_bias=False)
    assert bare.mlp == MLPSpec(12_288, "gelu_pytorch_tanh", gated=False)


def test_stablelm_2_1_6b() -> None:
    norm = NormSpec("layer", 1e-5)
    attention = AttentionSpec(32, 32, 64, 0.125, rope=RopeSpec(10_000.0, width=16), qkv_bias=True)
    block = BlockSpec(2048, norm, attention, MLPSpec(5632, "silu"))
    assert spec_of(STABLELM) == ModelSpec(2048, 100_352, (block,) * 24, norm, context=4096)
    assert spec_of({name: value for name, value in STABLELM.items() if "rotary" not in name}) == spec_of(STABLELM)


@pytest.mark.parametrize("setting", ["qk_layernorm", "use_parallel_residual"])
def test_what_stablelm_2_12b_computes_is_refused_by_name(setting: str) -> None:
    assert spec_of(STABLELM, **{setting: False}) == spec_of(STABLELM)
    with pytest.raises(UnsupportedError, match=f"'{setting}' is True"):
        spec_of(STABLELM, **{setting: True})


def test_phi_4_mini() -> None:
    norm = NormSpec("rms", 1e-5)
    lists = tuple([1.0] * 48), tuple(1.0 + pair for pair in range(48))
    long = LongScaling(*lists, original_context=4096, attention_factor=pytest.approx(1.1902381))
    attention = AttentionSpec(24, 8, 128, 128**-0.5, window=262_144, rope=RopeSpec(10_000.0, long, width=96))
    block = BlockSpec(3072, norm, attention, MLPSpec(8192, "silu"))
    assert spec_of(PHI3) == ModelSpec(3072, 200_064, (block,) * 32, norm, context=131_072, tied=True)


def test_gemma_2b() -> None:
    norm = NormSpec("rms", 1e-6, scale_in_float32=True)
    attention = AttentionSpec(8, 1, 256, 1 / 16, rope=RopeSpec(10_000.0))
    block = BlockSpec(2048, norm, attention, MLPSpec(16_384, "gelu_pytorch_tanh"))
    scale = 2048**0.5
    assert spec_of(GEMMA) == ModelSpec(2048, 256_000, (block,) * 18, norm, 8192, embedding_scale=scale, tied=True)
    assert spec_of(GEMMA, hidden_act="silu").blocks[0].mlp == MLPSpec(16_384, "silu")


def test_gemma_2_27b() -> None:
    norm = NormSpec("rms", 1e-6, scale_in_float32=True)
    full = AttentionSpec(32, 16, 128, 1 / 12, rope=RopeSpec(10_000.0), cap=50.0)
    sliding, full = (
        BlockSpec(4608, norm, one, MLPSpec(36_864, "gelu_pytorch_tanh"), sandwich=True)
        for one in (replace(full, window=4096), full)
    )
    spec = ModelSpec(4608, 256_000, (sliding, full) * 23, norm, 8192, embedding_scale=4608**0.5, tied=True)
    assert spec_of(GEMMA2) == replace(spec, logit_cap=30.0)


def test_soft_caps_of_gemma_2_may_be_null_or_absent() -> None:
    uncapped = spec_of(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.logit_cap, uncapped.attentions[0].cap) == (0.0, 0.0)
    raw = {name: value for name, value in GEMMA2.items() if not name.endswith("softcapping")}
    assert spec_of(raw) == spec_of(GEMMA2)
    with pytest.raises(CheckpointError, match="'attn_logit_softcapping' must be above zero, found 0"):
        spec_of(GEMMA2, attn_logit_softcapping=0.0)


def test_gpt_oss_20b() -> None:
    norm = NormSpec("rms", 1e-5, scale_in_float32=True)
    rope = RopeSpec(150_000.0, YarnScaling(32.0, 4096, pytest.approx(1.3465736), 32.0, 1.0, rounds_ramp=False))
    spec = spec_of(GPT_OSS)
    gating = Gating(CLAMPED_SWIGLU, 7.0, 1.702)
    for index, block in enumerate(spec.blocks):
        window = None if index % 2 else 128
        attention = AttentionSpec(
            64, 8, 64, 0.125, window=window, rope=rope, qkv_bias=True, output_bias=True, sinks=True
        )
        assert block == BlockSpec(2880, norm, attention, MoESpec(32, 4, 2880, gating, bias=True, router_bias=True))
    assert (spec.dim, spec.vocab, len(spec.blocks), spec.norm) == (2880, 201_088, 24, norm)
    assert (spec.context, spec.tied, spec.positions) == (131_072, False, 0)


def test_qwen3_30b_a3b() -> None:
    norm = NormSpec("rms", 1e-6)
    attention = AttentionSpec(32, 4, 128, 128**-0.5, qk_norm=norm, rope=RopeSpec(1_000_000.0))
    block = BlockSpec(2048, norm, attention, MoESpec(128, 8, 768))
    assert spec_of(QWEN3_MOE) == ModelSpec(2048, 151_936, (block,) * 48, norm, context=40_960)


@pytest.mark.parametrize(
    ("raw", "mlp", "kv_heads", "num_layers"),
    [
        (QWEN3_5, MLPSpec(9216, "silu"), 4, 32),
        (QWEN3_5_MOE, MoESpec(256, 8, 512, shared_hidden=512), 2, 40),
        (QWEN3_NEXT, MoESpec(512, 10, 512, shared_hidden=512), 2, 48),
    ],
    ids=["qwen3.5-4b", "qwen3.6-35b-a3b", "qwen3-next-80b-a3b"],
)
def test_every_fourth_layer_attends_with_a_gate_and_the_others_have_a_delta_rule(
    raw: dict, mlp: MLPSpec | MoESpec, kv_heads: int, num_layers: int
) -> None:
    norm = NormSpec("rms", 1e-6, scale_in_float32=True)
    rope = RopeSpec(10_000_000.0, width=64)
    attention = AttentionSpec(16, kv_heads, 256, 1 / 16, qk_norm=norm, rope=rope, output_gate=True)
    delta = DeltaSpec(16, 32, 128, 128, width=4, eps=1e-6)
    spec = spec_of(raw)
    four = [BlockSpec(raw["hidden_size"], norm, mixer, mlp) for mixer in (delta, delta, delta, attention)]
    assert spec.blocks == (*four,) * (num_layers // 4)
    assert (spec.norm, spec.context, spec.tied) == (norm, 262_144, raw["tie_word_embeddings"])


def mixture_of(experts: int, top_k: int, hidden: int, routing: ScoredRouting, shared: int = 1) -> MoESpec:
    """Return experts with an ungated shared expert of `shared` times their width."""
    plain = MoESpec(experts, top_k, hidden, shares=routing, shared_hidden=shared * hidden)
    return replace(plain, shared_gate=False, scores_in_float32=True)


@pytest.mark.parametrize(
    ("changes", "routing", "dense"),
    [
        ({}, ScoredRouting("sigmoid"), 1),
        (
            {"routed_scaling_factor": 2.5, "norm_topk_prob": False, "first_k_dense_replace": 3},
            ScoredRouting("sigmoid", normalises=False, factor=2.5),
            3,
        ),
        ({"n_group": 8, "topk_group": 4, "first_k_dense_replace": 0}, ScoredRouting("sigmoid", 8, 4), 0),
    ],
    ids=str,
)
def test_glm_4_5_air(changes: dict, routing: ScoredRouting, dense: int) -> None:
    norm, rope = NormSpec("rms", 1e-5), RopeSpec(1_000_000.0, width=64)
    attention = AttentionSpec(96, 8, 128, 128**-0.5, rope=rope, qkv_bias=True)
    mixture = replace(mixture_of(128, 8, 1408, routing), selection_bias=True)
    mlps = [MLPSpec(10_944, "silu")] * dense + [mixture] * (46 - dense)
    spec = spec_of(GLM4_MOE, **changes)
    assert spec.blocks == tuple(BlockSpec(4096, norm, attention, mlp) for mlp in mlps)
    assert (spec.norm, spec.context, spec.tied) == (norm, 131_072, False)


def test_glm_4_9b() -> None:
    attention = AttentionSpec(32, 2, 128, 128**-0.5, rope=RopeSpec(10_000.0, width=64), qkv_bias=True)
    for raw, eps, is_sandwich in ((GLM4, 1e-5, True), (GLM, 1.5625e-7, False)):
        norm = NormSpec("rms", eps)
        block = BlockSpec(4096, norm, attention, MLPSpec(13_696, "silu"), sandwich=is_sandwich)
        context = raw["max_position_embeddings"]
        assert spec_of(raw) == ModelSpec(4096, 151_552, (block,) * 40, norm, context=context)


def latent_attention(heads: int, latent: LatentSpec, factor: float, rope: RopeSpec) -> AttentionSpec:
    """Return attention whose scores YaRN multiplies with `factor` squared."""
    scale = (latent.nope + latent.rotated) ** -0.5 * factor**2
    return AttentionSpec(heads, 1, 576, pytest.approx(scale, rel=1e-5), rope=rope, latent=latent)


def test_deepseek_v2_lite_has_one_projection_of_queries_and_a_softmax() -> None:
    yarn = YarnScaling(40.0, 4096, 1.0, rounds_ramp=True)
    latent = LatentSpec(512, 64, 128, 128, query_rank=0, eps=1e-6)
    attention = latent_attention(16, latent, 1.260805, RopeSpec(10_000.0, yarn, width=64))
    mixture = mixture_of(64, 6, 1408, ScoredRouting("softmax", normalises=False, ranked_by=1), shared=2)
    spec = spec_of(DEEPSEEK_V2)
    blocks = [BlockSpec(2048, NormSpec("rms", 1e-6), attention, mlp) for mlp in (MLPSpec(10_944, "silu"), mixture)]
    assert spec.blocks == (blocks[0], *26 * blocks[1:])
    assert (spec.vocab, spec.context, spec.tied) == (102_400, 163_840, False)


@pytest.mark.parametrize(
    ("raw", "heads", "experts", "dense", "routing", "yarn", "factor"),
    [
        (DEEPSEEK_V3, 128, 256, 3, ScoredRouting("sigmoid", 8, 4, factor=2.5), (10_000.0, 40.0, 32.0), 1.368888),
        (KIMI_K2, 64, 384, 1, ScoredRouting("sigmoid", factor=2.827), (50_000.0, 32.0, 1.0), 1.346574),
    ],
    ids=["deepseek_v3", "kimi_k2"],
)
def test_deepseek_v3_and_kimi_k2_differ_in_sizes_alone(
    raw: dict,
    heads: int,
    experts: int,
    dense: int,
    routing: ScoredRouting,
    yarn: tuple[float, ...],
    factor: float,
) -> None:
    theta, extension, beta_fast = yarn
    rope = RopeSpec(theta, YarnScaling(extension, 4096, 1.0, beta_fast=beta_fast, rounds_ramp=True), width=64)
    attention = latent_attention(heads, LatentSpec(512, 64, 128, 128, query_rank=1536, eps=1e-6), factor, rope)
    mixture = replace(mixture_of(experts, 8, 2048, routing), selection_bias=True)
    mlps = [MLPSpec(18_432, "silu")] * dense + [mixture] * (61 - dense)
    spec = spec_of(raw)
    assert spec.blocks == tuple(BlockSpec(7168, NormSpec("rms", 1e-6), attention, mlp) for mlp in mlps)
    assert (spec.vocab, spec.context, spec.tied) == (raw["vocab_size"], raw["max_position_embeddings"], False)


def test_glm_4_7_flash() -> None:
    latent = LatentSpec(512, 64, 192, 256, query_rank=768, eps=1e-6)
    attention = latent_attention(20, latent, 1.0, RopeSpec(1_000_000.0, width=64))
    mixture = replace(mixture_of(64, 4, 1536, ScoredRouting("sigmoid", factor=1.8)), selection_bias=True)
    spec = spec_of(GLM4_MOE_LITE)
    blocks = [BlockSpec(2048, NormSpec("rms", 1e-5), attention, mlp) for mlp in (MLPSpec(10_240, "silu"), mixture)]
    assert spec.blocks == (blocks[0], *46 * blocks[1:])
    assert (spec.vocab, spec.context, spec.tied) == (154_880, 202_752, False)


def test_olmo_2_1b_has_norms_behind_its_sublayers() -> None:
    norm = NormSpec("rms", 1e-6, scale_in_float32=True)
    attention = AttentionSpec(16, 16, 128, 128**-0.5, qk_norm=norm, rope=RopeSpec(5e5), qk_norm_over_heads=True)
    block = BlockSpec(2048, norm, attention, MLPSpec(8192, "silu"), sandwich=True, pre_norm=False)
    assert spec_of(OLMO2) == ModelSpec(2048, 100_352, (block,) * 16, norm, context=4096)


def test_olmo_3_7b_scales_the_rotation_of_full_layers_alone() -> None:
    norm = NormSpec("rms", 1e-6, scale_in_float32=True)
    yarn = YarnScaling(8.0, 8192, 1.2079441541679836, rounds_ramp=True)
    sliding = AttentionSpec(
        32, 32, 128, 128**-0.5, window=4096, qk_norm=norm, rope=RopeSpec(5e5), qk_norm_over_heads=True
    )
    full = replace(sliding, window=None, rope=RopeSpec(5e5, yarn))
    spec = spec_of(OLMO3)
    four = [
        BlockSpec(4096, norm, one, MLPSpec(11_008, "silu"), sandwich=True, pre_norm=False)
        for one in (sliding, sliding, sliding, full)
    ]
    assert spec.blocks == (*four,) * 8
    assert spec.context == 65_536


def test_exaone_4_rotates_sliding_layers_alone_if_any_slides() -> None:
    norm, rope = NormSpec("rms", 1e-5), RopeSpec(1e6, Llama3Scaling(16.0, 1.0, 4.0, 8192))
    sliding = AttentionSpec(40, 8, 128, 128**-0.5, window=4096, qk_norm=norm, rope=rope)
    kinds = (*(sliding,) * 3, replace(sliding, window=None, rope=None))
    blocks = tuple(BlockSpec(5120, norm, one, MLPSpec(27_392, "silu"), sandwich=True, pre_norm=False) for one in kinds)
    assert spec_of(EXAONE4).blocks == blocks * 16
    (without,) = set(spec_of(EXAONE4, sliding_window=None, sliding_window_pattern=None).blocks)
    assert without.attention == replace(sliding, window=None)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(4, "SSSFSSSF"), (3, "SSFSSFSS"), ("LLG", "SSFSSFSF"), ("LLLG", "SSSFSSSF"), ("G", "FFFFFFFF")],
)
def test_layers_of_exaone_follow_a_number_or_letters(pattern: int | str, expected: str) -> None:
    blocks = spec_of(EXAONE4, sliding_window_pattern=pattern, num_hidden_layers=8).blocks
    assert "".join("S" if block.attention.window else "F" for block in blocks) == expected


def test_lfm2_1_2b_and_8b_a1b() -> None:
    norm, rope = NormSpec("rms", 1e-5), RopeSpec(1_000_000.0)
    attends = AttentionSpec(32, 8, 64, 64**-0.5, qk_norm=norm, rope=rope)
    mixture = MoESpec(32, 4, 1792, shares=ScoredRouting("sigmoid", eps=1e-6), selection_bias=True)
    for raw, layers, mlps in (
        (LFM2, (2, 5, 8, 10, 12, 14), [MLPSpec(8192, "silu")] * 16),
        (LFM2_MOE, (2, 6, 10, 14, 18, 21), [MLPSpec(7168, "silu")] * 2 + [mixture] * 22),
    ):
        mixers = [attends if layer in layers else ConvSpec(2048, 3) for layer in range(len(mlps))]
        blocks = tuple(BlockSpec(2048, norm, *parts) for parts in zip(mixers, mlps, strict=True))
        assert spec_of(raw) == ModelSpec(2048, 65_536, blocks, norm, context=128_000, tied=True)


def test_listed_layer_types_come_before_the_interval() -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    blocks = spec_of(QWEN3_5, layer_types=kinds, num_hidden_layers=3).blocks
    assert [isinstance(block.attention, DeltaSpec) for block in blocks] == [False, True, True]


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"mlp_only_layers": [0, 5]}, {0, 5}),
        ({"decoder_sparse_step": 2}, {0, 2, 4}),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, {0, 1, 3, 4, 5}),
        ({"mlp_only_layers": None}, set()),
    ],
    ids=str,
)
def test_layers_of_a_mixture_without_experts_have_an_mlp_of_its_own_width(changes: dict, dense: set[int]) -> None:
    blocks = spec_of(QWEN3_MOE, num_hidden_layers=6, **changes).blocks
    assert {index for index, block in enumerate(blocks) if block.mlp == MLPSpec(6144, "silu")} == dense
    assert all(block.mlp == MoESpec(128, 8, 768) for index, block in enumerate(blocks) if index not in dense)


def test_shares_of_a_mixture_that_does_not_normalise_them_are_of_all_experts() -> None:
    (block,) = set(spec_of(QWEN3_MOE, norm_topk_prob=False).blocks)
    assert block.mlp == MoESpec(128, 8, 768, shares="all")


def test_every_layer_of_a_mixture_slides_if_any_does() -> None:
    """max_window_layers, which its config.json has, counts for dense Qwen only."""
    blocks = spec_of(QWEN3_MOE, use_sliding_window=True, sliding_window=512, max_window_layers=48).blocks
    assert {block.attention.window for block in blocks} == {512}


def test_gemma_27b_divides_scores_by_its_own_scalar_not_by_head_dim() -> None:
    spec = spec_of(GEMMA3, query_pre_attn_scalar=168, head_dim=128)
    assert {block.attention.scale for block in spec.blocks} == {168**-0.5}


def test_gemma_s_linear_scaling_is_for_full_layers_only() -> None:
    spec = spec_of(GEMMA3, rope_scaling={"factor": 8.0, "rope_type": "linear"})
    scalings = [block.attention.rope.scaling for block in spec.blocks if block.attention.rope]
    assert scalings == [None] * 5 + [LinearScaling(8.0)] + ([None] * 5 + [LinearScaling(8.0)]) * 3 + [None] * 2


def test_qwen2_has_biases_on_q_k_and_v_alone() -> None:
    attention = spec_of(QWEN2).blocks[0].attention
    assert (attention.qkv_bias, attention.output_bias, attention.qk_norm) == (True, False, None)


def test_mistral_is_llama_with_a_window_on_every_layer() -> None:
    assert {block.attention.window for block in spec_of(MISTRAL).blocks} == {4096}
    assert {block.attention.window for block in spec_of(MISTRAL, sliding_window=None).blocks} == {None}


def test_gpt2_has_layer_norms_biases_learned_positions_and_no_rotation() -> None:
    norm = NormSpec("layer", 1e-5)
    attention = AttentionSpec(12, 12, 64, 0.125, qkv_bias=True, output_bias=True)
    block = BlockSpec(768, norm, attention, MLPSpec(3072, "gelu_new", gated=False, bias=True))
    assert spec_of(GPT2) == ModelSpec(768, 50_257, (block,) * 12, norm, context=1024, positions=1024, tied=True)


def test_bitnet_2b_4t() -> None:
    norm = NormSpec("rms", 1e-5)
    attention = AttentionSpec(20, 5, 128, 128**-0.5, rope=RopeSpec(500_000.0), sub_norm=norm)
    plain = BlockSpec(2560, norm, attention, MLPSpec(6912, "relu2", sub_norm=norm))
    assert spec_of(BITNET) == ModelSpec(2560, 128_256, (plain,) * 30, norm, context=4096, tied=True)
    packed = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    ternary = replace(plain, int8_activations="multiplied")
    assert spec_of(BITNET, quantization_config=packed).blocks == (ternary,) * 30


@pytest.mark.parametrize("raw", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_ternary_weights_bring_int8_activations_to_any_family(raw: dict) -> None:
    spec = spec_of(raw, quantization_config={"quant_method": "bitnet"})
    assert {block.int8_activations for block in spec.blocks} == {"divided"}
    assert {block.int8_activations for block in spec_of(raw).blocks} == {None}


def test_llama_with_biases_has_them_in_all_projections() -> None:
    block = spec_of(LLAMA, attention_bias=True, mlp_bias=True).blocks[0]
    assert (block.attention.qkv_bias, block.attention.output_bias, block.mlp.bias) == (True, True, True)


def test_stored_frequency_divisors_take_the_place_of_a_scaling() -> None:
    divisors = tuple(1.0 + i for i in range(32))
    plain = config_of(LLAMA)
    assert plain.rope is not None
    config = replace(plain, rope=replace(plain.rope, freq_divisors=divisors))
    rope = architecture_of(config).spec(config).ropes
    assert rope == ((RopeSpec(500_000.0, DivisorScaling(divisors)), 64),)


def test_layers_of_one_kind_have_equal_specs() -> None:
    """Equal specs share a compiled graph, so their number must not grow with the layers."""
    for raw in EVERY.values():
        with in_case(raw):
            few, many = spec_of(raw, num_hidden_layers=12, n_layer=12), spec_of(raw, num_hidden_layers=60, n_layer=60)
            assert set(few.blocks) == set(many.blocks)
            assert len(set(many.blocks)) <= (
                3 if raw["model_type"] == "lfm2_moe" else 2
            )  # a dense layer is a third kind
