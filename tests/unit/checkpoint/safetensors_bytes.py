"""Safetensors files and indices written by hand, so that tests can write wrong ones."""

import json
import struct
from pathlib import Path


def whole(header: object, section: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + section


def tensor(dtype: object = "F32", shape: object = (4,), span: object = (0, 16)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


def write_index(folder: Path, weight_map: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path
