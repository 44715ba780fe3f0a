"""Hugging Face's ternary weights as i2_s: transformers' packer and layers, microsoft/BitNet's bytes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.checkpoint.ternary_checkpoint import TernaryCheckpoint, TernaryScaling, pack_i2_s
from graphcore.errors import CheckpointError
from graphcore.quant import dequantize

GOLDEN = Path(__file__).parents[2] / "golden"
HF, I2S = np.load(GOLDEN / "hf_bitnet.npz"), np.load(GOLDEN / "i2s.npz")
NAME = "model.layers.0.self_attn.q_proj.weight"


def opened(folder: Path, scaling: TernaryScaling, **tensors: Tensor) -> TernaryCheckpoint:
    """Return a checkpoint of q_proj's tensors, `weight` and `weight_scale`."""
    stored = {NAME.replace("weight", name): tensor for name, tensor in tensors.items()}
    save_file({"model.norm.weight": torch.ones(8), **stored}, folder / "model.safetensors")
    return TernaryCheckpoint(SafetensorsCheckpoint(folder), scaling)


def golden(folder: Path, scaling: TernaryScaling) -> TernaryCheckpoint:
    packed, scale = torch.from_numpy(HF["packed"]), torch.from_numpy(HF["weight_scale"])
    return opened(folder, scaling, weight=packed, weight_scale=scale)


def dense(checkpoint: TernaryCheckpoint) -> np.ndarray:
    info = checkpoint.find(NAME)
    return dequantize(checkpoint.read(NAME), info.encoding, info.shape).numpy()


@pytest.mark.parametrize("name", ["", "_k384"])
def test_bytes_are_those_of_bitnets_own_packer(name: str) -> None:
    codes = torch.from_numpy((I2S[f"ternary{name}"] + 1).astype(np.uint8))
    raw = pack_i2_s(codes, torch.from_numpy(I2S[f"scale{name}"])).numpy()
    expected = I2S[f"i2s_x86_raw{name}"]
    assert raw.shape == expected.shape
    assert np.array_equal(raw[:-28], expected[:-28])  # the last 28 bytes mean nothing


def test_a_packed_weight_and_its_scale_are_one_i2_s_tensor(tmp_path: Path) -> None:
    checkpoint = golden(tmp_path, "multiplied")
    info = checkpoint.find(NAME)
    assert (info.shape, info.encoding, info.nbytes) == ((48, 256), "i2_s", 48 * 256 // 4 + 32)
    assert checkpoint.read(NAME).numel() == info.nbytes
    assert checkpoint.tensors.keys() == {NAME, "model.norm.weight"}
    assert torch.equal(checkpoint.read("model.norm.weight"), torch.ones(8))


def test_the_scale_multiplies_or_divides_by_the_class(tmp_path: Path) -> None:
    scale = HF["weight_scale"].astype(np.float32)
    assert np.array_equal(dense(golden(tmp_path, "multiplied")), HF["ternary"] * scale)
    assert np.array_equal(dense(golden(tmp_path, "divided")), HF["ternary"] * (np.float32(1) / scale))


@pytest.mark.parametrize(("scaling", "name"), [("divided", "y_bitlinear"), ("multiplied", "y_autobitlinear_offline")])
def test_products_are_those_of_the_class(scaling: TernaryScaling, name: str, tmp_path: Path) -> None:
    found = HF["x_actquant"].astype(np.float64) @ dense(golden(tmp_path, scaling)).T
    assert np.abs(found - HF[name]).max() < 1e-6 * np.abs(HF[name]).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weights_become_ternary_as_transformers_makes_them(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers.integrations.bitnet import WeightQuant

    master = torch.from_numpy(HF["master_weight"]).to(dtype)
    checkpoint = opened(tmp_path, "online", weight=master)
    with torch.compiler.set_stance("force_eager"):
        expected = WeightQuant.apply(master.float())
    if dtype is torch.float32:
        assert np.array_equal(expected.numpy(), HF["weight_quant"])
    assert np.array_equal(dense(checkpoint), expected.numpy())


def test_a_plain_weight_of_zeros_stays_zero(tmp_path: Path) -> None:
    assert not dense(opened(tmp_path, "online", weight=torch.zeros(8, 16))).any()


def test_unpacked_ternary_weights_are_packed(tmp_path: Path) -> None:
    """transformers unpacks the weights of autobitlinear when it loads them, and saves them so."""
    ternary = torch.from_numpy(HF["ternary"]).to(torch.bfloat16)
    checkpoint = opened(tmp_path, "multiplied", weight=ternary, weight_scale=torch.tensor([1.6875]))
    assert np.array_equal(dense(checkpoint), HF["ternary"] * np.float32(1.6875))


def test_a_tensor_that_is_no_whole_number_of_groups_is_dense(tmp_path: Path) -> None:
    from transformers.integrations.bitnet import pack_weights

    ternary = torch.randint(-1, 2, (12, 20), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    checkpoint = opened(tmp_path, "multiplied", weight=pack_weights(ternary.clone()), weight_scale=torch.tensor([0.5]))
    info, read = checkpoint.find(NAME), checkpoint.read(NAME)
    assert (info.encoding, info.shape, info.nbytes) == ("f32", (12, 20), read.nbytes)
    assert torch.equal(read, ternary * 0.5)


def test_the_head_and_the_embedding_are_left_as_they_are(tmp_path: Path) -> None:
    stored = {"model.embed_tokens.weight": torch.randn(8, 16), "lm_head.weight": torch.randn(8, 16)}
    save_file({**stored, NAME: torch.randn(8, 16)}, tmp_path / "model.safetensors")
    checkpoint = TernaryCheckpoint(SafetensorsCheckpoint(tmp_path), "online")
    assert {name: info.encoding for name, info in checkpoint.tensors.items()} == {
        **dict.fromkeys(stored, "f32"),
        NAME: "i2_s",
    }
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in stored.items())


PACKED = torch.zeros(2, 64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("scaling", "tensors", "said"),
    [
        ("divided", {"weight": PACKED}, "Missing required tensor: '.*q_proj.weight_scale'"),
        ("online", {"weight": PACKED}, "q_proj.weight' is packed, but quantization_mode is online"),
        ("divided", {"weight": PACKED, "weight_scale": torch.ones(2)}, "must hold one number other than zero.*[2]"),
        ("divided", {"weight": PACKED, "weight_scale": torch.zeros(1)}, "must hold one number other than zero"),
        ("multiplied", {"weight": PACKED, "weight_scale": torch.tensor([float("nan")])}, "must hold one number"),
        ("multiplied", {"weight": torch.full((8, 16), 0.5), "weight_scale": torch.ones(1)}, "other values than -1, 0"),
        ("multiplied", {"weight": torch.full((8, 16), 2.0), "weight_scale": torch.ones(1)}, "other values than -1, 0"),
        ("multiplied", {"weight": torch.full((8, 16), -2.0), "weight_scale": torch.ones(1)}, "other values than -1, 0"),
    ],
)
def test_what_is_no_ternary_weight_is_refused_by_name(
    scaling: TernaryScaling, tensors: dict[str, Tensor], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        opened(tmp_path, scaling, **tensors).read(NAME)
