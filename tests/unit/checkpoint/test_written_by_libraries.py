"""Weights that libraries have quantised, stored and read back are read with the same values, or refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from graphcore.arch.config.quantization_config import read_quantized_scheme
from graphcore.arch.config.typed_fields import Fields
from graphcore.checkpoint.quantized.quantized_checkpoint import QuantizedCheckpoint
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.errors import CheckpointError
from graphcore.quant import FORMATS

pytestmark = pytest.mark.thorough

GOLDEN = Path(__file__).parents[2] / "golden" / "quantised_folders"
STEM = "model.layers.0.mlp.down_proj"
REFUSED = {
    r"compressed_tensors(_012)? pack[236].*|auto_round .*_[235]bit.*": (
        "bits a weight|columns in 1 groups|are no pack-quantized weight"
    ),
    r"autoawq gemv.*": "version is 'gemv'",
    r"transformers_fp8 experts_fp4": "expert_dtype is 'fp4'",
    r".* (nf4_tail|float8_block|float8_block_small|block128_edges|pack4_asym_channel)": r"must be whole blocks of 32",
    r"gptqmodel gptq[23]_asym(_v2)?|auto_gptq gptq[23]_asym": "bits a weight, and of gptq(_v2)? weights 4 and 8",
    r"gptqmodel .*planar": "checkpoint_format is 'gptq_p'",
}


def cases() -> list[Any]:
    found = []
    for file in sorted(GOLDEN.glob("*.npz")):
        for case in json.loads(str(np.load(file)["cases"])):
            found.append(pytest.param(file, case, id=f"{file.stem} {case['name']}"))
    return found


def stored_tensor(raw: np.ndarray, dtype: str) -> Tensor:
    """Return a recorded tensor; dtypes that numpy does not know are recorded as integers of their size."""
    kind = getattr(torch, dtype)
    found = torch.from_numpy(raw.copy())
    return found if found.dtype is kind else found.view(kind)


def read_case(file: Path, case: dict[str, Any], folder: Path) -> tuple[Tensor, Tensor]:
    """Return a case's weight as it is read here, and as the library has it, rounded to the library's dtype; float32."""
    data, name = np.load(file), case["name"]
    tensors = {
        f"{STEM}.{suffix}": stored_tensor(data[f"{name}/{suffix}"], facts["dtype"])
        for suffix, facts in case["tensors"].items()
    }
    save_file(tensors, folder / "model.safetensors")
    config = case["config"]
    if config.get("quantization_status") == "initialized":  # recorded before the library compressed the weight
        config = {**config, "quantization_status": "compressed"}
    scheme = read_quantized_scheme(Fields({"quantization_config": config}, "config.json"))
    assert scheme is not None, config.get("quant_method")
    view = QuantizedCheckpoint(SafetensorsCheckpoint(folder), scheme)
    info = view.find(f"{STEM}.weight")
    dtype = getattr(torch, case["dense_dtype"])
    found = FORMATS[info.encoding].dequantize(view.read(info.name), info.shape)
    if f"{STEM}.input_order" in view.tensors:
        found = found[:, view.read(f"{STEM}.input_order").argsort()]
    return found.to(dtype).float(), torch.from_numpy(data[f"{name}/dense"])


@pytest.mark.parametrize(("file", "case"), cases())
def test_values_are_the_librarys(file: Path, case: dict[str, Any], tmp_path: Path) -> None:
    name = f"{file.stem} {case['name']}"
    reasons = [reason for pattern, reason in REFUSED.items() if re.fullmatch(pattern, name)]
    if reasons:
        with pytest.raises(CheckpointError, match=reasons[0]):
            read_case(file, case, tmp_path)
        return
    found, expected = read_case(file, case, tmp_path)
    if "SCB" in case["tensors"]:  # the library multiplies with a rounded 1 / 127
        assert (found.double() - expected.double()).abs().max() <= expected.double().abs().max() * 2**-22
    else:
        assert torch.equal(found, expected)
