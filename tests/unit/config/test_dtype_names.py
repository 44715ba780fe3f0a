"""Names of dtypes that llama.cpp, vLLM, transformers and torch take mean what they mean there."""

import pytest
import torch

from graphcore.config.dtype_names import OTHER_NAMES, real_kv_name, real_name, with_real_dtype
from graphcore.config.validate import kv_names
from graphcore.device import DTYPES, dtype_name


@pytest.mark.parametrize("name", [*OTHER_NAMES, *DTYPES])
def test_names_mean_torchs_dtype(name: str) -> None:
    torchs = {"f32": "float32", "f16": "float16", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    dtype = vars(torch)[torchs.get(name, name)]
    for written in (name, name.upper(), f"torch.{name}", dtype):
        assert DTYPES[dtype_name(written)] is dtype
    assert DTYPES[real_kv_name(name)] is dtype


@pytest.mark.parametrize("name", ["int8", "float64", "q8_0", "fp8", "Foo"])
def test_other_text_stays(name: str) -> None:
    assert real_name(name) == name


def test_keys_and_values_have_names_of_their_own() -> None:
    written = {"F16": "fp16", "Q8_0,Int4": ("q8_0", "q4_0"), "torch.float16, f32": ("fp16", "fp32"), "BF16": "bf16"}
    for setting, names in written.items():
        assert kv_names(setting) == ((names, names) if isinstance(names, str) else names)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("dtype=bfloat16", "dtype=bf16"),
        ("dtype='torch.float16'", "dtype=fp16"),
        ("+dtype=Half,FLOAT", "+dtype=fp16,fp32"),
        ("dtype=choice(float32,bfloat16)", "dtype=choice(fp32,bf16)"),
        ("dtype.name=float16", "dtype.name=fp16"),
        ("prompt=float16", "prompt=float16"),
        ("kv_dtype=f16", "kv_dtype=f16"),
        ("dtype", "dtype"),
    ],
)
def test_a_setting_of_the_dtype_gets_the_name_of_its_file(override: str, named: str) -> None:
    assert with_real_dtype(override) == named
