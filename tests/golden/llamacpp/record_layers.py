"""Records llama.cpp's residual stream after each block, and its logits: layers.npz.

    python record_layers.py SmolLM2-135M-Instruct.Q4_1.gguf

Needs graphcore with its extras "test" and "peers". llama.cpp runs float32 weights, with a float32 cache: packed ones
are unpacked by gguf-py. Of SmolLM2 the layers' last tokens are kept, also of the file as it is; these as float16,
because llama.cpp rounds activations to 8 bits there.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from record import unpacked  # noqa: E402
from support.files import layered_files  # noqa: E402  # of the tests

from graphcore.tasks.reference.llama_cpp_model import run_llama_cpp  # noqa: E402


def arrays(name: str, path: Path, token_ids: list[int]) -> dict[str, np.ndarray]:
    """Return what is recorded of a file: layers [L, T, D] and logits [T, V]."""
    outputs = run_llama_cpp(path, token_ids, threads=2)
    return {
        f"{name}.layers": np.stack([layer.numpy() for layer in outputs.layers]),
        f"{name}.logits": outputs.logits.numpy(),
    }


def main(smollm2: Path) -> None:
    found: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in layered_files.NAMES:
            path = unpacked(layered_files.layered_file(name, Path(folder)), Path(folder) / "f32.gguf")
            found |= arrays(name, path, layered_files.TOKEN_IDS)
        wide = unpacked(smollm2, Path(folder) / "f32.gguf")
        for name, path, dtype in (("stored", smollm2, np.float16), ("float32", wide, np.float32)):
            layers = arrays("smollm2", path, layered_files.SMOLLM2_IDS)["smollm2.layers"]
            found[f"smollm2.{name}"] = layers[:, -1].astype(dtype)
    np.savez_compressed(HERE / "layers.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
