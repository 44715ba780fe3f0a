"""GPTQ's and compressed-tensors' quantization_config: what it means, and what of it is refused."""

from typing import Any

import pytest
from hub_configs import GEMMA3_4B, LLAMA, parse
from integer_files import compressed_config, gptq_config

from graphcore.checkpoint.integer_checkpoint import IntegerScheme, Width
from graphcore.errors import CheckpointError, UnsupportedError

PACKED, INTS = compressed_config("pack-quantized", 4, 128), compressed_config("int-quantized", 8, 0)


@pytest.mark.parametrize(
    ("stated", "scheme"),
    [
        (gptq_config(4, 128), IntegerScheme("gptq", (Width(4, 128),))),
        (gptq_config(8, 0), IntegerScheme("gptq", (Width(8, 0),))),
        (
            {"quant_method": "gptq", "checkpoint_format": "gptq", "desc_act": True},
            IntegerScheme("gptq", has_orders=True),
        ),
        ({**gptq_config(4, 64), "desc_act": True}, IntegerScheme("gptq", (Width(4, 64),), has_orders=True)),
        (
            {**gptq_config(4, 64), "dynamic": {"-:head": {}, "+:.*down.*": {"desc_act": True}}},
            IntegerScheme("gptq", has_orders=True),
        ),
        (gptq_config(4, 64, version=2), IntegerScheme("gptq_v2", (Width(4, 64),))),
        ({**gptq_config(4, 64), "pack_dtype": "int32", "dynamic": {"+:.*down.*": {"bits": 8}}}, IntegerScheme("gptq")),
        (PACKED, IntegerScheme("pack-quantized", (Width(4, 128),))),
        (INTS, IntegerScheme("int-quantized", (Width(8, 0),))),
        ({**INTS, "format": "naive-quantized", "sparsity_config": {}}, IntegerScheme("int-quantized", (Width(8, 0),))),
        (
            {**PACKED, "transform_config": {}, "kv_cache_scheme": None, "quantization_status": "frozen"},
            IntegerScheme("pack-quantized", (Width(4, 128),)),
        ),
    ],
)
@pytest.mark.parametrize("raw", [LLAMA, GEMMA3_4B], ids=["llama", "gemma3"])
def test_a_config_says_how_integers_are_stored(raw: dict, stated: dict, scheme: IntegerScheme) -> None:
    assert parse(raw, quantization_config=stated).integers == scheme


def test_groups_of_several_widths_are_all_kept_and_those_without_weights_are_not() -> None:
    groups = {
        name: compressed_config("pack-quantized", bits, 128)["config_groups"]["group_0"]
        for name, bits in (("group_0", 4), ("group_1", 8))
    }
    groups["group_2"] = {"targets": ["Attention"], "weights": None, "format": None}
    found = parse(LLAMA, quantization_config={**PACKED, "config_groups": groups}).integers
    assert found == IntegerScheme("pack-quantized", (Width(4, 128), Width(8, 128)))


def with_weights(**changes: object) -> dict[str, Any]:
    (group,) = PACKED["config_groups"].values()
    return {**PACKED, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            {**gptq_config(4, 128), "sym": False},
            "quantization_config: sym is False, which is not supported; use another",
        ),
        ({**gptq_config(4, 128), "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**gptq_config(4, 128), "pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({**PACKED, "format": "float-quantized"}, "format is 'float-quantized', which is not supported"),
        ({**PACKED, "format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        ({**PACKED, "format": None}, "format is 'none'"),
        ({**PACKED, "config_groups": {}}, "config_groups has no weights"),
        (with_weights(type="float"), "weights: type is 'float'"),
        (with_weights(symmetric=False), "weights: symmetric is False"),
        ({**PACKED, "quantization_status": "calibration"}, "quantization_status is 'calibration'"),
        (with_weights(strategy="block"), "weights: strategy is 'block'"),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported"),
        ({**PACKED, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config is not supported"),
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq', which is not supported"),
        ({"quant_method": "fp8"}, "quant_method 'fp8', which is not supported"),
    ],
)
def test_what_is_not_read_is_refused_by_name(stated: dict, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as refusal:
        parse(LLAMA, quantization_config=stated)
    assert "use " in str(refusal.value)


def test_a_setting_of_the_wrong_type_is_named() -> None:
    with pytest.raises(CheckpointError, match="'sym' must be true or false"):
        parse(LLAMA, quantization_config={**gptq_config(4, 128), "sym": "yes"})
