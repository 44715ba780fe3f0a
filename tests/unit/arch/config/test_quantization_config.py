"""GPTQ's and compressed-tensors' quantization_config: what it means, and what of it is refused."""

from itertools import product as every_pair
from typing import Any

import pytest
from support.cases import in_case
from support.files.integer_files import compressed_config, gptq_config
from support.hub_configs import GEMMA3_4B, LLAMA, parse

from graphcore.checkpoint.quantized.scheme import QuantizedScheme, Width
from graphcore.errors import CheckpointError, UnsupportedError

PACKED, INTS = compressed_config("pack-quantized", 4, 128), compressed_config("int-quantized", 8, 0)


def test_a_config_says_how_integers_are_stored() -> None:
    for (stated, scheme), raw in every_pair(
        [
            (gptq_config(4, 128), QuantizedScheme(("gptq",), (Width(4, 128),))),
            (gptq_config(8, 0), QuantizedScheme(("gptq",), (Width(8, 0),))),
            (
                {"quant_method": "gptq", "checkpoint_format": "gptq", "desc_act": True},
                QuantizedScheme(("gptq",), has_orders=True),
            ),
            ({**gptq_config(4, 64), "desc_act": True}, QuantizedScheme(("gptq",), (Width(4, 64),), has_orders=True)),
            (
                {**gptq_config(4, 64), "dynamic": {"-:head": {}, "+:.*down.*": {"desc_act": True}}},
                QuantizedScheme(("gptq",), (), None, has_orders=True),
            ),
            (gptq_config(4, 64, version=2), QuantizedScheme(("gptq_v2",), (Width(4, 64),))),
            (
                {**gptq_config(4, 64), "pack_dtype": "int32", "dynamic": {"+:.*down.*": {"bits": 8}}},
                QuantizedScheme(("gptq",), (), None),
            ),
            (PACKED, QuantizedScheme(("pack-quantized",), (Width(4, 128),))),
            (INTS, QuantizedScheme(("int-quantized",), (Width(8, 0),))),
            (
                {**INTS, "format": "naive-quantized", "sparsity_config": {}},
                QuantizedScheme(("fp8", "int-quantized"), (Width(8, 0),)),
            ),
            ({**gptq_config(4, 64), "sym": False}, QuantizedScheme(("gptq",), (Width(4, 64),), False)),
            ({"quant_method": "awq", "bits": 4, "group_size": 128}, QuantizedScheme(("awq",), (Width(4, 128),), False)),
            (
                {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "zero_point": False, "version": "GEMM"},
                QuantizedScheme(("awq",), (Width(4, 0),), True),
            ),
            (
                {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"},
                QuantizedScheme(("awq",), (Width(4, 32),), True),
            ),
            (
                {"quant_method": "auto-round", "bits": 4, "sym": False, "extra_config": {"lm_head": {"bits": 8}}},
                QuantizedScheme(("gptq",), (), None),
            ),
            ({"quant_method": "fp8"}, QuantizedScheme(("fp8",), block=(128, 128))),
            ({"quant_method": "fp8", "weight_block_size": None}, QuantizedScheme(("fp8",))),
            ({"quant_method": "auto-round", "packing_format": "auto_round"}, QuantizedScheme(("gptq_v2",))),
            ({"quant_method": "fp8", "weight_block_size": [128, 64]}, QuantizedScheme(("fp8",), block=(128, 64))),
            ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, QuantizedScheme(("fp8",))),
            ({"quant_method": "modelopt", "quant_algo": "fp8"}, QuantizedScheme(("fp8",))),
            ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, QuantizedScheme(("modelopt-nvfp4",))),
            ({"quant_method": "bitsandbytes", "_load_in_8bit": True}, QuantizedScheme(("bnb-8bit",))),
            ({"quant_method": "bitsandbytes", "load_in_4bit": True}, QuantizedScheme(("bnb-4bit",))),
            (
                {**PACKED, "transform_config": {}, "kv_cache_scheme": None, "quantization_status": "frozen"},
                QuantizedScheme(("pack-quantized",), (Width(4, 128),)),
            ),
        ],
        [LLAMA, GEMMA3_4B],
    ):
        with in_case(stated, scheme, raw):
            assert parse(raw, quantization_config=stated).quantized == scheme


def test_groups_of_several_widths_are_all_kept_and_those_without_weights_are_not() -> None:
    groups = {
        name: compressed_config("pack-quantized", bits, 128)["config_groups"]["group_0"]
        for name, bits in (("group_0", 4), ("group_1", 8))
    }
    groups["group_2"] = {"targets": ["Attention"], "weights": None, "format": None}
    found = parse(LLAMA, quantization_config={**PACKED, "config_groups": groups}).quantized
    assert found == QuantizedScheme(("pack-quantized",), (Width(4, 128), Width(8, 128)))


def with_weights(**changes: object) -> dict[str, Any]:
    (group,) = PACKED["config_groups"].values()
    return {**PACKED, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


def test_what_is_not_read_is_refused_by_name() -> None:
    for stated, message in [
        (
            {**gptq_config(4, 128), "checkpoint_format": "marlin"},
            "quantization_config: checkpoint_format is 'marlin', which is not supported; use another",
        ),
        ({**gptq_config(4, 128), "pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({**PACKED, "format": "marlin-24"}, "format is 'marlin-24', which is not supported"),
        ({**PACKED, "format": None}, "format is 'none'"),
        ({**PACKED, "config_groups": {}}, "config_groups has no weights"),
        (with_weights(type="mx"), "weights: type is 'mx'"),
        ({**PACKED, "quantization_status": "calibration"}, "quantization_status is 'calibration'"),
        (with_weights(strategy="block"), "weights: strategy is 'block'"),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported"),
        ({**PACKED, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config is not supported"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8"),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "version is 'gemv'"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type is 'mx_fp'"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
            "packing_format is 'auto_round:llm_comp",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        ({"quant_method": "hqq"}, "quant_method 'hqq', which is not supported"),
    ]:
        with in_case(stated, message):
            with pytest.raises(UnsupportedError, match=message) as refusal:
                parse(LLAMA, quantization_config=stated)
            assert "use " in str(refusal.value)


def test_formats_of_several_groups_are_all_looked_for() -> None:
    mixed = {**PACKED, "format": "mixed-precision"}
    groups = {"group_0": PACKED["config_groups"]["group_0"], "group_1": floats_of_blocks("128x128")}
    found = parse(LLAMA, quantization_config={**mixed, "config_groups": groups}).quantized
    layouts = ("fp8", "int-quantized", "mxfp4", "nvfp4", "pack-quantized")
    assert found == QuantizedScheme(layouts, (), True, (128, 128))
    groups = {"group_0": {**groups["group_0"], "format": "pack-quantized"}, "group_1": groups["group_1"]}
    groups["group_1"] |= {"format": "float-quantized"}
    found = parse(LLAMA, quantization_config={**mixed, "config_groups": groups}).quantized
    assert found == QuantizedScheme(("fp8", "pack-quantized"), (), True, (128, 128))


def floats_of_blocks(structure: object) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": structure}
    return {"targets": ["Linear"], "weights": weights}


def test_groups_that_are_not_all_symmetric_and_groups_of_floats_are_known() -> None:
    one = with_weights(symmetric=False)["config_groups"]["group_0"]
    groups = {"group_0": PACKED["config_groups"]["group_0"], "group_1": one}
    assert parse(LLAMA, quantization_config={**PACKED, "config_groups": groups}).quantized.is_symmetric is None
    assert parse(LLAMA, quantization_config=with_weights(symmetric=False)).quantized.is_symmetric is False
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 64}
    floats = {**PACKED, "format": "float-quantized", "config_groups": {"group_0": {"weights": weights}}}
    assert parse(LLAMA, quantization_config=floats).quantized.block == (1, 64)


@pytest.mark.parametrize("stated", [{}, {"load_in_4bit": False}])
def test_a_bitsandbytes_config_whose_flags_are_off_describes_dense_weights(stated: dict) -> None:
    found = parse(LLAMA, quantization_config={"quant_method": "bitsandbytes", **stated})
    assert found.quantized is None
    assert "quantization_config is ignored" in found.notes[-1]


@pytest.mark.parametrize("structure", ["128", [128], [128, 0], [1.5, 2], "axb", [1, 2, 3], 7, ["9" * 5000, 1]])
def test_blocks_that_are_no_two_sizes_are_refused(structure: object) -> None:
    stated = {**PACKED, "format": "float-quantized", "config_groups": {"group_0": floats_of_blocks(structure)}}
    with pytest.raises(CheckpointError, match="'block_structure' must be two sizes, such as"):
        parse(LLAMA, quantization_config=stated)


def test_blocks_of_several_sizes_are_refused() -> None:
    groups = {f"group_{size}": floats_of_blocks([size, size]) for size in (64, 128)}
    with pytest.raises(UnsupportedError, match="block_structure is "):
        parse(LLAMA, quantization_config={**PACKED, "format": "float-quantized", "config_groups": groups})


def test_a_setting_of_the_wrong_type_is_named() -> None:
    with pytest.raises(CheckpointError, match="'sym' must be true or false"):
        parse(LLAMA, quantization_config={**gptq_config(4, 128), "sym": "yes"})
