"""Integer weights of Hugging Face folders as q4_0 and q8_0 blocks: exact values, and what is refused."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.cases import in_case
from support.files.integer_files import LAYOUTS, integers
from torch import Tensor

from graphcore.checkpoint.quantized.quantized_checkpoint import QuantizedCheckpoint
from graphcore.checkpoint.quantized.scheme import QuantizedScheme, Width
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.errors import CheckpointError, GraphcoreError, UnsupportedError
from graphcore.quant import FORMATS

GOLDEN = Path(__file__).parents[2] / "golden" / "compressed_tensors.npz"
STEM = "model.layers.0.mlp.down_proj"
WIDTHS = [(layout, bits) for layout in LAYOUTS for bits in (4, 8) if (layout, bits) != ("int-quantized", 4)]
Change = Callable[[dict[str, Tensor]], object]


def view_of(folder: Path, tensors: dict[str, Tensor], layout: str, *widths: Width) -> QuantizedCheckpoint:
    save_file({f"{STEM}.{suffix}": one.contiguous() for suffix, one in tensors.items()}, folder / "model.safetensors")
    return QuantizedCheckpoint(SafetensorsCheckpoint(folder), QuantizedScheme((layout,), widths))  # type: ignore[arg-type]


def ordered_view(folder: Path, tensors: dict[str, Tensor], layout: str) -> QuantizedCheckpoint:
    """Return the view of a checkpoint whose config states act-order."""
    stored = view_of(folder, tensors, layout).stored
    return QuantizedCheckpoint(stored, QuantizedScheme((layout,), has_orders=True))  # type: ignore[arg-type]


def dense_of(view: QuantizedCheckpoint) -> Tensor:
    info = view.find(f"{STEM}.weight")
    return FORMATS[info.encoding].dequantize(view.read(info.name), info.shape)


def test_values_are_those_of_codes_and_scales(tmp_path: Path) -> None:
    for (layout, bits), group, dtype in product(
        WIDTHS, [32, 64, 96, 0], [torch.float16, torch.bfloat16, torch.float32]
    ):
        with in_case(dtype, group, layout, bits):
            one = integers(24, 192, bits, group, dtype if dtype != torch.float32 else torch.float16, seed=bits + group)
            tensors = LAYOUTS[layout][0](one._replace(scales=one.scales.to(dtype)), bits)
            view = view_of(tmp_path, tensors, layout)
            assert set(view.tensors) == {f"{STEM}.weight"}
            assert view.tensors[f"{STEM}.weight"].shape == (24, 192)
            assert torch.equal(dense_of(view), one.dense)


@pytest.mark.parametrize("name", sorted({key.partition(".")[0] for key in np.load(GOLDEN)}))
def test_what_compressed_tensors_wrote_has_its_values(name: str, tmp_path: Path) -> None:
    """The library (0.20.0) multiplies in bfloat16, the scales' dtype, so it rounds what is exact here."""
    stored = np.load(GOLDEN)
    found = {key.partition(".")[2]: torch.from_numpy(stored[key]) for key in stored if key.startswith(f"{name}.")}
    dense = found.pop("dense")
    found["weight_scale"] = found["weight_scale"].view(torch.bfloat16)
    view = view_of(tmp_path, found, "pack-quantized" if name.startswith("packed") else "int-quantized")
    assert torch.equal(dense_of(view).to(torch.bfloat16).float(), dense)


def test_a_scale_for_the_whole_tensor_and_one_for_each_row_are_read(tmp_path: Path) -> None:
    one = integers(8, 64, 8, 0, torch.float16, seed=1)
    same = one._replace(scales=one.scales[:1].expand(8, 1))
    dense = (one.codes - 128).float() * same.scales.float()
    for scales in (one.scales[:1, 0], one.scales[:1]):
        tensors = {**LAYOUTS["int-quantized"][0](same, 8), "weight_scale": scales.clone()}
        assert torch.equal(dense_of(view_of(tmp_path, tensors, "int-quantized")), dense)
    tensors = {**LAYOUTS["int-quantized"][0](one, 8), "weight_scale": one.scales[:, 0].clone()}
    assert torch.equal(dense_of(view_of(tmp_path, tensors, "int-quantized")), one.dense)


def test_stated_widths_say_the_bits_without_reading(tmp_path: Path) -> None:
    """A plan from a repository's headers has no tensor's bytes."""
    for bits in (4, 8):
        one = integers(8, 64, bits, 32, torch.float16, seed=1)
        tensors = {**LAYOUTS["pack-quantized"][0](one, bits), "weight_shape": torch.zeros(2, dtype=torch.int64)}
        view = view_of(tmp_path, tensors, "pack-quantized", Width(4, 32), Width(8, 32))
        assert view.find(f"{STEM}.weight").encoding == ("q4_0" if bits == 4 else "q8_0")
        with pytest.raises(CheckpointError, match=r"weight_shape' is \[0, 0\]"):
            view.read(f"{STEM}.weight")


def test_columns_are_sorted_by_group_and_their_order_says_where_they_were(tmp_path: Path) -> None:
    for (layout, bits), group in product([one for one in WIDTHS if one[0] != "int-quantized"], [32, 64, 96, 0]):
        with in_case(group, layout, bits):
            one = integers(72, 192, bits, group, torch.float16, seed=bits + group, is_ordered=True)
            view = ordered_view(tmp_path, LAYOUTS[layout][0](one, bits), layout)
            if group == 0:  # in one group there is nothing to sort
                assert set(view.tensors) == {f"{STEM}.weight"}
                assert torch.equal(dense_of(view), one.dense)
                continue
            assert set(view.tensors) == {f"{STEM}.weight", f"{STEM}.input_order"}
            order = view.read(f"{STEM}.input_order")
            info = view.find(f"{STEM}.input_order")
            assert (order.dtype, tuple(order.shape), order.nbytes) == (torch.int32, info.shape, info.nbytes)
            assert info.encoding == "i32"
            assert torch.equal(dense_of(view), one.dense[:, order.long()])
            sizes = one.groups[order.long()].unique_consecutive(return_counts=True)
            assert [part.tolist() for part in sizes] == [list(range(192 // group)), [group] * (192 // group)]
            assert not view.has_row_runs(f"{STEM}.input_order")


def test_the_order_of_usual_groups_is_that_of_the_columns(tmp_path: Path) -> None:
    one = integers(8, 64, 4, 32, torch.float16, seed=1)
    view = ordered_view(tmp_path, LAYOUTS["gptq"][0](one, 4), "gptq")
    assert view.read(f"{STEM}.input_order").tolist() == list(range(64))
    assert torch.equal(dense_of(view), one.dense)


def test_an_order_is_faulty_only_with_its_weight(tmp_path: Path) -> None:
    tensors = LAYOUTS["gptq"][0](integers(8, 64, 4, 32, torch.float16, seed=1), 4)
    del tensors["scales"]
    assert set(ordered_view(tmp_path, tensors, "gptq").tensors) == set()


def test_groups_of_another_size_than_stated_are_refused(tmp_path: Path) -> None:
    """96 columns a group where 128 are stated: the last group would be shorter than the others."""
    one = integers(8, 192, 4, 96, torch.float16, seed=1)
    view = view_of(tmp_path, LAYOUTS["gptq"][0](one, 4), "gptq", Width(4, 128))
    with pytest.raises(CheckpointError, match="192 columns in 2 groups, and the config states groups of 128 columns"):
        view.find(f"{STEM}.weight")


def test_a_group_size_above_the_columns_is_one_group(tmp_path: Path) -> None:
    one = integers(8, 64, 4, 0, torch.float16, seed=1)
    view = view_of(tmp_path, LAYOUTS["gptq"][0](one, 4), "gptq", Width(4, 128))
    assert torch.equal(dense_of(view), one.dense)


def test_numbers_that_round_activations_and_caches_are_left_out(tmp_path: Path) -> None:
    one = integers(8, 64, 8, 32, torch.float16, seed=1)
    more = {
        "input_scale": torch.ones(1),
        "input_zero_point": torch.zeros(1, dtype=torch.int8),
        "k_scale": torch.ones(1),
    }
    view = view_of(tmp_path, {**LAYOUTS["int-quantized"][0](one, 8), **more}, "int-quantized")
    assert set(view.tensors) == {f"{STEM}.weight"}


def test_biases_of_zeros_beside_gptq_weights_are_known(tmp_path: Path) -> None:
    one = integers(8, 64, 4, 32, torch.float16, seed=1)
    for bias, is_zero in ((torch.zeros(8), True), (torch.ones(8), False)):
        view = view_of(tmp_path, {**LAYOUTS["gptq"][0](one, 4), "bias": bias}, "gptq")
        assert view.is_zero_bias(f"{STEM}.bias") is is_zero
        assert view.is_zero_bias(f"{STEM}.weight") is False


def test_a_damaged_weight_matters_only_if_it_is_needed(tmp_path: Path) -> None:
    one = integers(8, 64, 4, 32, torch.float16, seed=1)
    tensors = {**LAYOUTS["gptq"][0](one, 4), "other": torch.ones(3)}
    del tensors["scales"]
    view = view_of(tmp_path, tensors, "gptq")
    assert set(view.tensors) == {f"{STEM}.other"}
    assert view.read(f"{STEM}.other").sum() == 3
    with pytest.raises(CheckpointError, match=r"Missing required tensor: .*scales"):
        view.check_needed([f"{STEM}.weight"])


def swap_columns(tensors: dict[str, Tensor]) -> None:
    (name,) = [name for name in tensors if name.endswith("g_idx")]
    tensors[name] = tensors[name].flip(0)


def move_zero(name: str) -> Change:
    return lambda tensors: tensors[name].view(-1)[:1].add_(1)


REFUSED: list[tuple[str, str, Change, type[GraphcoreError], str]] = [
    (
        "gptq",
        "zeros",
        move_zero("qzeros"),
        UnsupportedError,
        r"qzeros' has zero points apart from the middle, and weights are",
    ),
    ("gptq_v2", "version", lambda t: t["qzeros"].fill_(0x77777777), UnsupportedError, "zero points apart"),
    (
        "gptq",
        "order",
        swap_columns,
        CheckpointError,
        "g_idx' are grouped in another order, and the config does not say",
    ),
    ("gptq", "no zeros", lambda t: t.pop("qzeros"), CheckpointError, "Missing required tensor: .*qzeros"),
    ("gptq", "no scales", lambda t: t.pop("scales"), CheckpointError, "Missing required tensor: .*scales"),
    ("gptq", "rows", lambda t: t.update(scales=t["scales"][:, :5]), CheckpointError, "are no gptq weight; fetch"),
    ("gptq", "words", lambda t: t.update(qweight=t["qweight"].to(torch.int64)), CheckpointError, "i64, .* no gptq"),
    (
        "gptq",
        "nan",
        lambda t: t["scales"].view(-1)[:1].fill_(float("nan")),
        CheckpointError,
        "scales' is not finite",
    ),
    (
        "gptq",
        "three bits",
        lambda t: t.update(qweight=t["qweight"][:6], qzeros=torch.zeros(2, 3, dtype=torch.int32), scales=t["scales"]),
        CheckpointError,
        r"has 3 bits a weight, and of gptq weights 4 and 8 are read",
    ),
    ("gptq", "0-d", lambda t: t.update(qzeros=torch.tensor(5, dtype=torch.int32)), CheckpointError, "no gptq weight"),
    (
        "pack-quantized",
        "0-d",
        lambda t: t.update(weight_zero_point=torch.tensor(5, dtype=torch.int32)),
        CheckpointError,
        "no pack-quantized weight",
    ),
    ("gptq", "no rows", lambda t: t.update(qweight=t["qweight"][:0]), CheckpointError, "are no gptq weight"),
    (
        "pack-quantized",
        "small groups",
        lambda t: t.update(weight_scale=t["weight_scale"].repeat(1, 2)),
        CheckpointError,
        r"has 64 columns in 4 groups, and a group must be whole blocks of 32 columns",
    ),
    ("pack-quantized", "no shape", lambda t: t.pop("weight_shape"), CheckpointError, "required tensor: .*weight_shape"),
    (
        "pack-quantized",
        "another shape",
        lambda t: t["weight_shape"][:1].fill_(40),
        CheckpointError,
        r"weight_shape' is \[40, 64\], and the codes are \[32, 64\]",
    ),
    (
        "pack-quantized",
        "no columns",
        lambda t: t["weight_shape"].zero_(),
        CheckpointError,
        "are no pack-quantized weight",
    ),
    (
        "pack-quantized",
        "zeros",
        lambda t: t.update(weight_zero_point=torch.zeros(4, 2, dtype=torch.int32)),
        UnsupportedError,
        "weight_zero_point' has zero points apart",
    ),
    (
        "pack-quantized",
        "order",
        lambda t: t.update(weight_g_idx=torch.arange(64, dtype=torch.int32) % 3),
        CheckpointError,
        "weight_g_idx' must have the numbers 0 to 1, each for 32 of 64 columns; fetch the checkpoint again",
    ),
    (
        "pack-quantized",
        "scale",
        lambda t: t.update(weight_scale=torch.full((32, 2), 1e6, dtype=torch.bfloat16)),
        UnsupportedError,
        r"weight_scale' has scales as large as 9.99e\+05 \(torch.bfloat16\), beyond float16, which q4_0 holds",
    ),
]


def test_what_the_blocks_cannot_hold_is_refused(tmp_path: Path) -> None:
    for layout, case, change, error, message in REFUSED:
        with in_case(layout, case):
            one = integers(32, 64, 4, 32, torch.float16, seed=3)
            tensors = {name: value.clone() for name, value in LAYOUTS[layout][0](one, 4).items()}
            change(tensors)
            with pytest.raises(error, match=message) as refusal:
                dense_of(view_of(tmp_path, tensors, layout))
            assert "\n" not in str(refusal.value)


def test_usual_zeros_and_groups_that_are_stored_all_the_same_are_read(tmp_path: Path) -> None:
    one = integers(32, 64, 4, 32, torch.float16, seed=3)
    tensors = LAYOUTS["pack-quantized"][0](one, 4)
    tensors["weight_zero_point"] = torch.full((4, 2), -0x77777778, dtype=torch.int32)  # 0x88888888
    tensors["weight_g_idx"] = (torch.arange(64) // 32).to(torch.int32)
    assert torch.equal(dense_of(view_of(tmp_path, tensors, "pack-quantized")), one.dense)
    tensors = LAYOUTS["int-quantized"][0](integers(32, 64, 8, 32, torch.float16, seed=3), 8)
    tensors["weight_zero_point"] = torch.zeros(32, 2, dtype=torch.int8)
    assert set(view_of(tmp_path, tensors, "int-quantized").tensors) == {f"{STEM}.weight"}


def test_a_scale_below_float16s_smallest_number_is_rounded_to_it(tmp_path: Path) -> None:
    """One nearly dead group, as programs that store bfloat16 scales may write it."""
    one = integers(32, 64, 4, 32, torch.bfloat16, seed=3)
    one.scales[3, 1] = 1e-30
    one.scales[4, 0] = 3e-6
    dense = (one.codes - 8).double() * one.scales.double().repeat_interleave(32, 1)
    found = dense_of(view_of(tmp_path, LAYOUTS["pack-quantized"][0](one, 4), "pack-quantized"))
    assert (found.double() - dense).abs().max() <= 8 * 2.0**-25
    assert torch.equal(found[:3], dense[:3].float())
