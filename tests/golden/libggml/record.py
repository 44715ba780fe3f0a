"""Records what libggml makes of dense weights: the errors of its quantisers, and which type llama.cpp gives a tensor.

    python record.py

Needs llama-cpp-python and gguf. Writes `quantised.npz` and `file_types.json` beside this file; see README.md.
"""

import ctypes
import json
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

HERE = Path(__file__).parent
ROWS, WIDTH = 24, 512
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q6_k": 18, "q4_k": 14, "q5_k": 16, "tq2_0": 37}
DIMS = {"narrow": (64, 96), "wide": (256, 512), "odd": (48, 96)}  # hidden and MLP width


def ggml() -> ctypes.CDLL:
    """Return libggml, with the types of the two functions that are called."""
    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def sources() -> dict[str, np.ndarray]:
    """Return the rows that are quantised: [24, 512] float16 values, so that the file is small."""
    rng = np.random.default_rng(20)
    heavy = np.clip(rng.standard_t(3, (ROWS, WIDTH)), -60, 60)
    rows = {"normal": rng.normal(size=(ROWS, WIDTH)), "laplace": rng.laplace(size=(ROWS, WIDTH)), "heavy": heavy}
    return {name: (0.02 * values).astype(np.float16) for name, values in rows.items()}


def record_errors() -> None:
    """Write the rows and the mean squared error of each type on each kind of row."""
    library, stored = ggml(), {}
    for kind, rows in sources().items():
        dense = np.ascontiguousarray(rows, np.float32)
        stored[f"{kind}.source"] = rows
        for name in TYPES:
            ggml_type = gguf.GGMLQuantizationType[name]
            block, width = gguf.GGML_QUANT_SIZES[ggml_type]
            raw = np.zeros((ROWS, WIDTH // block * width), np.uint8)
            done = library.ggml_quantize_chunk(int(ggml_type), dense.ctypes.data, raw.ctypes.data, 0, ROWS, WIDTH, None)
            assert done == raw.nbytes
            error = gguf.quants.dequantize(raw, ggml_type).astype(np.float64) - dense
            stored[f"{kind}.{name.lower()}.mse"] = np.float64((error**2).mean())
    np.savez_compressed(HERE / "quantised.npz", **stored)


def write_model(path: Path, dim: int, hidden: int, is_tied: bool) -> None:
    """Write a llama of one layer with random weights."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(dim)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    writer.add_tokenizer_model("none")
    shapes = {"token_embd": (32, dim), "output_norm": (dim,), "blk.0.attn_norm": (dim,), "blk.0.ffn_norm": (dim,)}
    shapes |= {f"blk.0.attn_{name}": (dim, dim) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (hidden, dim), "blk.0.ffn_up": (hidden, dim), "blk.0.ffn_down": (dim, hidden)}
    shapes |= {} if is_tied else {"output": (32, dim)}
    rng = np.random.default_rng(1)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def types_of(source: Path, target: Path, file_type: int) -> dict[str, tuple[list[int], str]]:
    """Return the shape and the type of each tensor of the file that llama.cpp quantises."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, 1
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) == 0
    tensors = gguf.GGUFReader(target).tensors
    return {one.name: ([int(n) for n in reversed(one.shape)], one.tensor_type.name.lower()) for one in tensors}


def record_types() -> None:
    """Write which type each tensor of three shapes of model gets in each plain file type, tied and untied."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source.gguf", Path(folder) / "target.gguf"
        for name, (dim, hidden) in DIMS.items():
            for is_tied in (True, False):
                write_model(source, dim, hidden, is_tied)
                key = f"{name} {'tied' if is_tied else 'untied'}"
                found[key] = {}
                for asked, number in FILE_TYPES.items():
                    try:
                        found[key][asked] = types_of(source, target, number)
                    except AssertionError:
                        found[key][asked] = None  # llama.cpp gives up
    (HERE / "file_types.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record_errors()
    record_types()
