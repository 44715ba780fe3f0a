"""Skeletons of transformers models: what is real in them, what is not, and what is refused."""

from pathlib import Path

import pytest
import torch
from support.fallback_models import CONFIGS, build_fallback
from torch import nn

from graphcore.engine.fallback.config import read_transformers_config
from graphcore.engine.fallback.skeleton import build_skeleton, find_layers, untie
from graphcore.errors import ConfigError, UnsupportedError

# With buffers of every kind: rotary, ALiBi, causal masks, relative positions, sinusoids.
KINDS = {
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "vocab_size": 96, "n_positions": 64},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64},
    "gpt_neo": {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 96,
        "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "vocab_size": 96, "n_positions": 64},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96, "vocab_size": 96},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 96, "max_seq_len": 64},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "alibi": True},
}


def config_of(name: str, **changes: object) -> "object":
    from transformers import AutoConfig

    return AutoConfig.for_model(name.partition("_long")[0], **{**(CONFIGS.get(name) or KINDS[name]), **changes})


def skeleton_of(config: object, attention: str = "eager") -> "object":
    return build_skeleton(config, attention, torch.float32, "model")


@pytest.mark.parametrize("name", [*CONFIGS, *KINDS])
def test_buffers_that_no_file_holds_have_the_values_of_a_model_that_transformers_makes(name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = config_of(name)
    whole = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    expected = {key: value for key, value in whole.named_buffers() if key not in whole.state_dict()}
    skeleton = skeleton_of(config)
    found = {key: value for key, value in skeleton.model.named_buffers() if key not in skeleton.weights()}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
        assert found[key].dtype == value.dtype


@pytest.mark.parametrize("name", [*CONFIGS, *KINDS])
def test_no_weight_of_a_skeleton_has_bytes_and_none_is_two(name: str) -> None:
    skeleton = skeleton_of(config_of(name))
    weights = skeleton.weights()
    assert weights
    assert all(weight.is_meta for weight in weights.values())
    assert len({id(weight) for weight in weights.values()}) == len(weights)


def test_a_tied_head_is_a_parameter_of_its_own_that_knows_its_partner() -> None:
    skeleton = skeleton_of(config_of("bloom"))
    assert skeleton.aliases["lm_head.weight"] == ("transformer.word_embeddings.weight", "lm_head.weight")
    assert skeleton_of(config_of("phi3")).aliases == {}


def test_parameters_that_are_one_become_two_of_the_same_shape() -> None:
    model = nn.ModuleDict({"first": nn.Linear(3, 3, bias=False), "second": nn.Linear(3, 3, bias=False)})
    model["second"].weight = model["first"].weight
    assert untie(model) == dict.fromkeys(("first.weight", "second.weight"), ("first.weight", "second.weight"))
    assert model["second"].weight is not model["first"].weight
    assert model["second"].weight.shape == (3, 3)


def test_layers_are_found_by_their_number_and_not_inside_others() -> None:
    layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(1, 1)] * 1)}) for _ in range(2))
    model = nn.ModuleDict({"inner": nn.ModuleDict({"blocks": layers})})
    assert find_layers(model, 2, "model") == "inner.blocks"
    with pytest.raises(UnsupportedError, match="has 0 lists of 3 layers"):
        find_layers(model, 3, "model")
    model["more"] = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    with pytest.raises(UnsupportedError, match="has 2 lists of 2 layers"):
        find_layers(model, 2, "model")


def test_layers_that_are_one_module_are_refused() -> None:
    layer = nn.Linear(1, 1)
    with pytest.raises(UnsupportedError, match="share modules"):
        find_layers(nn.ModuleDict({"layers": nn.ModuleList([layer, layer])}), 2, "model")


def test_an_attention_that_the_class_lacks_is_refused_and_auto_takes_another() -> None:
    with pytest.raises(ConfigError, match=r"model\.attention=sdpa is not possible for model: BloomForCausalLM"):
        skeleton_of(config_of("bloom"), "sdpa")
    assert skeleton_of(config_of("bloom"), "auto").attention == "eager"
    assert skeleton_of(config_of("phi3"), "auto").attention == "sdpa"


def test_the_config_that_was_read_stays_as_it_is() -> None:
    config = config_of("phi3")
    before = config.to_dict()
    build_skeleton(config, "eager", torch.bfloat16, "model")
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("model_type", "says"),
    [("t5", "no plain language model of model_type 't5'"), ("bart", "lists of")],
)
def test_models_that_are_no_decoders_are_refused(model_type: str, says: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(UnsupportedError, match=says):
        skeleton_of(AutoConfig.for_model(model_type, decoder_layers=3))


def test_a_model_type_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}', encoding="utf-8")
    with pytest.raises(UnsupportedError, match=r"config\.json: transformers \S+ cannot run it"):
        read_transformers_config(tmp_path)


def test_code_that_a_checkpoint_brings_along_is_not_run(tmp_path: Path) -> None:
    auto_map = '{"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}'
    (tmp_path / "config.json").write_text(f'{{"model_type": "own", "auto_map": {auto_map}}}', encoding="utf-8")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    with pytest.raises(UnsupportedError, match="cannot run it"):
        read_transformers_config(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_head_is_cut_into_slices_of_at_most_a_layer_and_gives_the_same_logits() -> None:
    from transformers import AutoModelForCausalLM

    config = config_of("stablelm", vocab_size=2000)
    skeleton = skeleton_of(config)
    head = skeleton.sliced_head
    assert head is not None
    assert [part.rows.start for part in head.slices[1:]] == [part.rows.stop for part in head.slices[:-1]]
    assert (head.slices[0].rows.start, head.slices[-1].rows.stop) == (0, 2000)
    layer = AutoModelForCausalLM.from_config(config).model.layers[0]
    most = sum(weight.nbytes for weight in layer.parameters() if weight.dim() > 1)
    assert len(head.slices) > 1
    assert max(part.weight.nbytes for part in head.slices) <= most
    head.weight = nn.Parameter(torch.randn(2000, 64), requires_grad=False)
    head.bind_slices()
    hidden = torch.randn(2, 3, 64)
    torch.testing.assert_close(head(hidden), hidden @ head.weight.T, atol=1e-4, rtol=0)  # sums of 64 products


def test_random_weights_are_drawn_for_no_skeleton() -> None:
    build_fallback("phi3")
    before = torch.random.get_rng_state()
    skeleton_of(config_of("phi3"))
    assert torch.equal(torch.random.get_rng_state(), before)
