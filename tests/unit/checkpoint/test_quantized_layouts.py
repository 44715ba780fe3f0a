"""Every layout of quantised weights: values by hand, and broken tensors on one line each."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.cases import in_case
from support.files.quantized_files import FOLDER_LAYOUTS, FolderLayout
from torch import Tensor

from graphcore.arch.config.quantization_config import read_quantized_scheme
from graphcore.arch.config.typed_fields import Fields
from graphcore.checkpoint.quantized.quantized_checkpoint import LAYOUTS, QuantizedCheckpoint
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.errors import CheckpointError, GraphcoreError, UnsupportedError
from graphcore.quant import FORMATS

STEM = "model.layers.0.mlp.down_proj"
Change = Callable[[dict[str, Tensor]], object]


def view_of(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> QuantizedCheckpoint:
    save_file({f"{STEM}.{suffix}": one.contiguous() for suffix, one in tensors.items()}, folder / "model.safetensors")
    scheme = read_quantized_scheme(Fields({"quantization_config": config}, "config.json"))
    assert scheme is not None, config
    return QuantizedCheckpoint(SafetensorsCheckpoint(folder), scheme)


def dense_of(view: QuantizedCheckpoint) -> Tensor:
    info = view.find(f"{STEM}.weight")
    return FORMATS[info.encoding].dequantize(view.read(info.name), info.shape)


def test_every_layout_has_a_writer() -> None:
    schemes = [
        read_quantized_scheme(Fields({"quantization_config": one.config}, "")) for one in FOLDER_LAYOUTS.values()
    ]
    assert {name for scheme in schemes if scheme for name in scheme.layouts} == set(LAYOUTS)


def test_values_are_those_of_the_layouts_definition(tmp_path: Path) -> None:
    for layout, columns, rows in product(FOLDER_LAYOUTS, [64, 192], [8, 40]):
        with in_case(rows, columns, layout):
            one = FOLDER_LAYOUTS[layout]
            tensors, dense = one.write(rows, columns, 5)
            view = view_of(tmp_path, tensors, one.config)
            assert set(view.tensors) == {f"{STEM}.weight"}
            assert view.tensors[f"{STEM}.weight"].encoding == one.format
            assert torch.equal(dense_of(view), dense)


def test_negative_scales_are_read(tmp_path: Path) -> None:
    """auto-round writes them."""
    one = FOLDER_LAYOUTS["gptq_v2 4"]
    tensors, dense = one.write(8, 64, 5)
    tensors["scales"] = -tensors["scales"]
    assert torch.equal(dense_of(view_of(tmp_path, tensors, one.config)), -dense)


def test_words_of_zeros_carry_as_gptqmodel_subtracts(tmp_path: Path) -> None:
    """A zero of 0 is stored as 15 and takes one from its neighbour: golden data of gptqmodel has such words, too."""
    one = FOLDER_LAYOUTS["gptq 4"]
    tensors, _ = one.write(8, 32, 5)
    zeros = torch.tensor([0, 3, 0, 0, 15, 1, 0, 9])
    word = sum(int(zero) << 4 * index for index, zero in enumerate(zeros)) - 0x11111111
    tensors["qzeros"] = torch.tensor([[(word + (1 << 31)) % (1 << 32) - (1 << 31)]], dtype=torch.int32)
    tensors["qweight"] = torch.zeros_like(tensors["qweight"])
    expected = -zeros.float() * tensors["scales"].float()[0]
    assert torch.equal(dense_of(view_of(tmp_path, tensors, one.config))[:, 0], expected)


def replaced(name: str, value: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: value(tensors[name])})


def restated(**changes: object) -> Change:
    """Return a change of the JSON beside a weight of bitsandbytes."""

    def change(tensors: dict[str, Tensor]) -> None:
        name = "weight.quant_state.bitsandbytes__nf4"
        stated = {**json.loads(bytes(tensors[name].numpy())), **changes}
        tensors[name] = torch.tensor(list(json.dumps(stated).encode()), dtype=torch.uint8)

    return change


NAN = float("nan")
REFUSED: list[tuple[str, str, Change, type[GraphcoreError], str]] = [
    ("awq", "rows", replaced("scales", lambda t: t[:, :5]), CheckpointError, "are no awq weight; fetch"),
    ("awq", "zeros", replaced("qzeros", lambda t: t[:, :3]), CheckpointError, "qzeros.* are no awq weight"),
    ("awq", "no scales", lambda t: t.pop("scales"), CheckpointError, "Missing required tensor: .*scales"),
    ("awq", "groups", replaced("scales", lambda t: t[:0]), CheckpointError, "are no awq weight"),
    (
        "packed 4 bf16",
        "zeros",
        replaced("weight_zero_point", lambda t: t[:3]),
        CheckpointError,
        "zero_point.* no pack-quantized weight",
    ),
    (
        "int8 groups",
        "zeros",
        replaced("weight_zero_point", lambda t: t[:, :1]),
        CheckpointError,
        "zero_point.* no int-quantized weight",
    ),
    ("int8 groups", "nan", replaced("weight_scale", lambda t: t * NAN), CheckpointError, "weight_scale' is not finite"),
    ("fp8 rows", "no scale", lambda t: t.pop("weight_scale"), CheckpointError, "one must be there, and 0 are"),
    (
        "fp8 rows",
        "two scales",
        lambda t: t.update(weight_scale_inv=torch.ones(1)),
        CheckpointError,
        "one must be there, and 2 are",
    ),
    ("fp8 rows", "shape", replaced("weight_scale", lambda t: t[:5]), CheckpointError, "are no fp8 weight"),
    (
        "fp8 blocks",
        "shape",
        replaced("weight_scale_inv", lambda t: t.repeat(3, 1)),
        CheckpointError,
        "are no fp8 weight",
    ),
    (
        "fp8 rows",
        "nan",
        replaced("weight_scale", lambda t: t * NAN),
        CheckpointError,
        "its scales have NaN or infinity",
    ),
    (
        "fp8 rows",
        "nan code",
        replaced("weight", lambda t: (t.view(torch.uint8) | 0x7F).view(torch.float8_e4m3fn)),
        CheckpointError,
        "have NaN or infinity",
    ),
    ("nvfp4", "shape", replaced("weight_scale", lambda t: t[:, :1]), CheckpointError, "no nvfp4-pack-quantized weight"),
    ("nvfp4", "zero", replaced("weight_global_scale", lambda t: t * 0), CheckpointError, "are not finite"),
    ("mxfp4", "shape", replaced("weight_scale", lambda t: t[:, :1]), CheckpointError, "no mxfp4-pack-quantized weight"),
    ("int8 bnb", "no scale", lambda t: t.pop("SCB"), CheckpointError, "Missing required tensor: .*SCB"),
    ("int8 bnb", "shape", replaced("SCB", lambda t: t[:3]), CheckpointError, "are no bitsandbytes 8-bit weight"),
    ("int8 bnb", "nan", replaced("SCB", lambda t: t * NAN), CheckpointError, "SCB' is not finite"),
    ("int8 bnb", "order", replaced("weight_format", lambda t: t + 1), UnsupportedError, "another order than"),
    ("nf4", "no map", lambda t: t.pop("weight.quant_map"), CheckpointError, "required tensor: .*quant_map"),
    ("nf4", "levels", replaced("weight.quant_map", lambda t: t + 0.1), UnsupportedError, "other levels than nf4"),
    ("nf4", "nan", replaced("weight.absmax", lambda t: t * NAN), CheckpointError, "absmax' is not finite"),
    ("nf4", "few", replaced("weight.absmax", lambda t: t[:3]), CheckpointError, "no bitsandbytes 4-bit weight"),
    ("nf4", "shape", restated(shape=[32, 64, 1]), CheckpointError, "no description .*shape or blocksize is missing"),
    ("nf4", "size", restated(shape=[32, 96]), CheckpointError, "no bitsandbytes 4-bit weight"),
    ("nf4", "true", restated(blocksize=True), CheckpointError, "shape or blocksize is missing"),
    ("nf4", "offset", restated(nested_offset="0"), CheckpointError, "nested_blocksize or nested_offset is no number"),
    (
        "nf4",
        "json",
        lambda t: t.update({"weight.quant_state.bitsandbytes__nf4": torch.zeros(3, dtype=torch.uint8)}),
        CheckpointError,
        "is no description of a weight",
    ),
    (
        "nf4",
        "two",
        lambda t: t.update({"weight.quant_state.bitsandbytes__fp4": torch.zeros(3, dtype=torch.uint8)}),
        CheckpointError,
        "Missing required tensor: .*bitsandbytes__nf4",
    ),
    ("nf4 nested", "one", lambda t: t.pop("weight.nested_absmax"), CheckpointError, "required tensor: .*nested_absmax"),
    (
        "nf4 nested",
        "map",
        replaced("weight.nested_quant_map", lambda t: t[:7]),
        CheckpointError,
        "nested_absmax' does not fit with",
    ),
    ("nf4 nested", "blocks", restated(nested_blocksize=1), CheckpointError, "does not fit with"),
    ("nf4 nested", "no offset", restated(nested_offset=None), CheckpointError, "nested_offset beside them"),
    ("nf4 nested", "large", restated(nested_offset=10**400), CheckpointError, "is no description of a weight"),
    ("nf4", "wide", restated(blocksize=2**66), CheckpointError, "no bitsandbytes 4-bit weight"),
    (
        "nf4",
        "deep",
        replaced("weight.quant_state.bitsandbytes__nf4", lambda _: torch.full((100_000,), 91, dtype=torch.uint8)),
        CheckpointError,
        "is no description of a weight",
    ),
    (
        "awq",
        "zeros gone",
        lambda t: t.pop("qzeros"),
        CheckpointError,
        "tensor: .*qzeros', zero points of a weight that",
    ),
    (
        "packed 4 bf16",
        "zeros gone",
        lambda t: t.pop("weight_zero_point"),
        CheckpointError,
        "tensor: .*weight_zero_point', zero points",
    ),
    (
        "int8 groups",
        "wide zeros",
        replaced("weight_zero_point", lambda t: t.to(torch.int32) + 300),
        CheckpointError,
        "no integers from -128 to 127",
    ),
    (
        "int8 groups",
        "half zeros",
        replaced("weight_zero_point", lambda t: t.float() + 0.5),
        CheckpointError,
        "no integers from -128 to 127",
    ),
    ("nvfp4", "two", replaced("weight_global_scale", lambda t: t.repeat(4)), CheckpointError, "global_scale.* are no"),
    ("nvfp4", "none", replaced("weight_global_scale", lambda t: t[:0]), CheckpointError, "global_scale.* are no"),
    ("nvfp4", "inf", replaced("weight_global_scale", lambda t: t / 0), CheckpointError, "are not finite"),
    ("mxfp4", "nan", replaced("weight_scale", lambda t: t | 255), CheckpointError, "weight_scale' has NaN"),
    ("fp8 blocks", "cut", replaced("weight_scale_inv", lambda t: t.view(1)[:0]), CheckpointError, "are no fp8 weight"),
    ("gptq 4", "groups", replaced("g_idx", lambda t: t[:0]), CheckpointError, "must have the numbers 0 to 1"),
    ("fp8 blocks", "bf16", replaced("weight", lambda t: t.bfloat16()), CheckpointError, "bf16, .* is no fp8 weight"),
    ("nf4", "fp4", restated(quant_type="fp4"), CheckpointError, "no description of a weight .*quant_type is 'fp4'"),
    ("awq", "twice", lambda t: t.update(weight=torch.ones(32, 64)), CheckpointError, "is also stored quantised"),
]


def test_what_is_broken_is_said_on_one_line(tmp_path: Path) -> None:
    for layout, case, change, error, message in REFUSED:
        with in_case(layout, case):
            one = FOLDER_LAYOUTS[layout]
            tensors, _ = one.write(32, 64, 3)
            change(tensors)
            with pytest.raises(error, match=message) as refusal:
                dense_of(view_of(tmp_path, tensors, one.config))
            assert "\n" not in str(refusal.value)
            assert str(tmp_path) in str(refusal.value)


def test_rows_of_no_whole_blocks_are_refused_by_name(tmp_path: Path) -> None:
    for layout in FOLDER_LAYOUTS:
        with in_case(layout):
            one = FOLDER_LAYOUTS[layout]
            with pytest.raises(CheckpointError, match=r"a group must be whole blocks of 32|are no|groups of"):
                dense_of(view_of(tmp_path, whole_rows(one, 48), {**one.config, "group_size": -1}))


def whole_rows(one: FolderLayout, columns: int) -> dict[str, Tensor]:
    """Return a weight's tensors, cut or written so that its rows have that many columns."""
    tensors, _ = one.write(32, 64, 3)
    if "qweight" in tensors:
        words = tensors["qweight"]
        tensors["qweight"] = words[: len(words) * columns // 64]
    elif "weight_packed" in tensors:
        tensors["weight_packed"] = tensors["weight_packed"][:, : tensors["weight_packed"].shape[1] * columns // 64]
    elif tensors["weight"].shape[1] == 1:
        restated_shape(tensors, [len(tensors["weight"]) * 2 // columns, columns])
    else:
        tensors["weight"] = tensors["weight"][:, : tensors["weight"].shape[1] * columns // 64]
    return tensors


def restated_shape(tensors: dict[str, Tensor], shape: list[int]) -> None:
    (name,) = [name for name in tensors if "quant_state" in name]
    stated = {**json.loads(bytes(tensors[name].numpy())), "shape": shape}
    tensors[name] = torch.tensor(list(json.dumps(stated).encode()), dtype=torch.uint8)
    size = shape[0] * shape[1]
    tensors["weight"] = tensors["weight"][: size // 2]
    tensors["weight.absmax"] = tensors["weight.absmax"][: -(-size // stated["blocksize"])]


@pytest.mark.parametrize("block", [[2**29, 2**29], [1, 2**29], [64, 128]])
def test_blocks_beyond_a_weight_are_the_whole_of_it(block: list[int], tmp_path: Path) -> None:
    tensors, dense = FOLDER_LAYOUTS["fp8 tensor"].write(1 if block[0] == 1 else 32, 64, 3)
    stored = {"weight": tensors["weight"], "weight_scale_inv": tensors["weight_scale"].view(1, 1)}
    view = view_of(tmp_path, stored, {"quant_method": "fp8", "weight_block_size": block})
    assert torch.equal(dense_of(view), dense)


def test_a_cut_off_grid_of_blocks_is_refused(tmp_path: Path) -> None:
    tensors, _ = FOLDER_LAYOUTS["fp8 blocks"].write(64, 64, 3)
    tensors["weight_scale_inv"] = tensors["weight_scale_inv"][:1]
    with pytest.raises(CheckpointError, match="are no fp8 weight"):
        dense_of(view_of(tmp_path, tensors, FOLDER_LAYOUTS["fp8 blocks"].config))


def test_int8_weights_may_have_scales_without_axes(tmp_path: Path) -> None:
    one = FOLDER_LAYOUTS["int8 rows"]
    tensors, _ = one.write(8, 64, 3)
    tensors |= {"weight_scale": torch.tensor(0.5), "weight_zero_point": torch.tensor([[3]], dtype=torch.int8)}
    assert torch.equal(dense_of(view_of(tmp_path, tensors, one.config)), (tensors["weight"].float() - 3) / 2)


def test_a_config_of_quantised_weights_over_dense_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"weights are quantised \(awq\), and none is; remove quantization_config"
    ):
        view_of(tmp_path, {"weight": torch.ones(8, 64)}, FOLDER_LAYOUTS["awq"].config)


def test_a_weight_that_is_not_quantised_stays_as_it_is(tmp_path: Path) -> None:
    one = FOLDER_LAYOUTS["fp8 blocks"]
    tensors, _ = one.write(8, 64, 3)
    view = view_of(tmp_path, tensors, one.config)
    save_file(
        {**{f"{STEM}.{name}": tensor for name, tensor in tensors.items()}, "lm_head.weight": torch.ones(4, 64)},
        tmp_path / "model.safetensors",
    )
    view = QuantizedCheckpoint(SafetensorsCheckpoint(tmp_path), view._layouts[f"{STEM}.weight"].scheme)
    assert view.tensors["lm_head.weight"].encoding == "f32"
    assert view.has_row_runs("lm_head.weight")
    assert not view.has_row_runs(f"{STEM}.weight")
