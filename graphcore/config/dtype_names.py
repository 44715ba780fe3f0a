"""The names of dtypes, and those that torch and other engines have for them, in any case of letters.

dtype=torch.bfloat16, dtype=BFloat16     dtype=bf16
kv_dtype=F16,int8                        kv_dtype=fp16,q8_0
"""

import re

DTYPES = ("auto", "fp32", "bf16", "fp16")
KV_DTYPES = (*DTYPES, "q8_0", "q5_0", "q4_0", "fp8")
OTHER_NAMES = {
    **dict.fromkeys(("float32", "float", "f32"), "fp32"),
    **dict.fromkeys(("float16", "half", "f16"), "fp16"),
    "bfloat16": "bf16",
}
KV_ALIASES = {"int8": "q8_0", "int4": "q4_0"}  # names that only kv_dtype takes


def real_name(written: str) -> str:
    """Return the name in conf/dtype of what a user has written; text that is no dtype's name is returned as it is."""
    name = _plain(written)
    return OTHER_NAMES.get(name, name if name in DTYPES else written)


def real_kv_name(written: str) -> str:
    """Return the name of a KV-cache type that a user has written; text that is no such name is returned as it is."""
    name = real_name(written)
    plain = _plain(name)
    return KV_ALIASES.get(plain, plain if plain in KV_DTYPES else name)


def with_real_dtype(override: str) -> str:
    """Return a setting of `dtype` with the names of conf/dtype, each of them in a sweep; others as they are."""
    key, separator, value = override.partition("=")
    if not separator or key.lstrip("+") not in ("dtype", "dtype.name"):
        return override
    names = re.sub(r"[\w.]+", lambda written: real_name(written[0]), value.strip("'\""))
    return f"{key}={names}"


def _plain(written: str) -> str:
    return written.strip().lower().removeprefix("torch.")
