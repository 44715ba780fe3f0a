"""A GGUF file's `rope_freqs.weight` is a vector of floats, or the file is refused before anything reads it as one."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from graphcore.arch.checkpoint_config import ROPE_FREQS, read_config
from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.errors import CheckpointError


@pytest.mark.parametrize(
    ("freqs", "found"),
    [
        (np.ones((2, 4), dtype=np.float32), r"f32 of shape \[2, 4\]"),
        (np.ones((1, 8), dtype=np.float16), r"f16 of shape \[1, 8\]"),
        (np.ones(8, dtype=np.int8), r"i8 of shape \[8\]"),
        (np.ones(8, dtype=np.int32), r"i32 of shape \[8\]"),
    ],
)
def test_anything_but_a_vector_of_floats_is_refused(freqs: np.ndarray, found: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor(ROPE_FREQS, freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=rf"model\.gguf: tensor 'rope_freqs\.weight' is {found}, where a vector"):
        read_config(GGUFCheckpoint(tmp_path / "model.gguf"))
