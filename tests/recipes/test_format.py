"""A format is one module: a file that holds it loads, and computes what the file of its unpacked weights computes."""

import json
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from checkout import Checkout

pytestmark = pytest.mark.slow

LLAMA = Path(__file__).parents[1] / "golden" / "tiny" / "llama3.gguf"
NUMBER = 200  # of the toy in GGUF files; ggml's own end long before
BLOCK = 32
MODULE = '''"""s8_1: 32 bytes with an offset of 128, and a scale behind them.

Legend: N blocks.

    0 codes[32]  32 d[2]
    y = d * (q - 128)
"""

import torch

from graphcore.quant.bit_fields import field, fp16
from graphcore.quant.format import Format


class S81Format(Format):
    """Eight bits, symmetric, the scale last."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 34] uint8 -> [N, 32] float32."""
        return field(blocks, 0, 32).to(torch.float32).sub_(128).mul_(fp16(blocks, 32))


S8_1 = S81Format(name="s8_1", block_elements=32, block_nbytes=34, ggml_id=200, bits=8, zero=128)
'''
AFTER_DECODING = "\n\nS8_1 = "
PACKING = '''
    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode: [N, 32] float32 -> [N, 34] uint8."""
        scale = (dense.abs().amax(1, keepdim=True) / 127).half()
        codes = (dense / scale.float().clamp(min=1e-8)).round().clamp(-127, 127) + 128
        return torch.cat((codes.to(torch.uint8), scale.view(torch.uint8)), 1)
'''
PACKED = "A format to pack in"
YAML = """# Matrices packed to 8 bits and a scale for 32 weights: 8.5 bits per weight.
format: s8_1 # format in which dense matrices are packed, at load or by task=pack
activations: auto # rounding of activations before packed matrices
"""
LOGITS = """
import json
from graphcore import Engine
with Engine.load({path!r}, dtype="fp32", graph="eager", device="cpu") as engine:
    print(json.dumps(engine.logits([[3, 1, 4, 1, 5, 9, 2, 6]]).tolist()))
"""
WHERE = ("prompt_ids=[3,1,4]", "max_new_tokens=4", "device=cpu", "graph=eager", "progress=false")


def quantized(dense: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Return the toy's bytes of a matrix, [rows, bytes], and the weights that they stand for, by numpy alone."""
    blocks = dense.reshape(*dense.shape[:-1], -1, BLOCK)
    scale = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    codes = np.round(blocks / np.maximum(scale, 1e-8).astype(np.float32)).clip(-127, 127)
    raw = np.concatenate(((codes + 128).astype(np.uint8), scale.view(np.uint8)), axis=-1)
    weights = codes.astype(np.float32) * scale.astype(np.float32)
    return raw.reshape(*dense.shape[:-1], -1), weights.reshape(dense.shape)


def write_files(folder: Path) -> tuple[Path, Path]:
    """Return the golden model with its matrices in the toy's bytes, and as the float32 that these bytes stand for."""
    toy, dense = folder / "toy.gguf", folder / "dense.gguf"
    for path in (toy, dense):
        path.write_bytes(LLAMA.read_bytes())
        file = gguf.GGUFReader(path, "r+")
        for tensor in file.tensors:
            if len(tensor.shape) < 2:
                continue
            raw, weights = quantized(np.array(tensor.data))
            if path == dense:
                tensor.data[:] = weights
                continue
            start, nbytes = tensor.data_offset, int(tensor.n_bytes)
            file.data[start : start + nbytes] = 0
            file.data[start : start + raw.size] = raw.reshape(-1)
            tensor.field.parts[-2][:] = NUMBER
        file.data.flush()
    return toy, dense


def test_a_format_that_is_only_read_is_one_module(checkout: Checkout, tmp_path: Path) -> None:
    toy, dense = write_files(tmp_path)
    before = checkout.run("generate", f"model.checkpoint={toy}", *WHERE)
    assert before.status == 1, "there is such a format before it is added"
    assert f"has type {NUMBER}" in before.error
    checkout.add("graphcore/quant/formats/s8_1.py", MODULE)
    checkout.assert_follows("A format")
    found, expected = (json.loads(checkout.python(LOGITS.format(path=str(path)))) for path in (toy, dense))
    assert found == expected
    done = checkout.run("generate", f"model.checkpoint={toy}", *WHERE)
    assert done.status == 0, done.error
    assert "weights 97.75 KiB" in done.error, "matrices stay packed"
    checkout.assert_linter_passes()


def test_a_format_to_pack_in_has_one_function_more(checkout: Checkout, tmp_path: Path) -> None:
    dense = write_files(tmp_path)[1]
    run = ("generate", f"model.checkpoint={dense}", *WHERE)
    refused = checkout.run(*run, "quant=s8_1")
    assert refused.status == 2, "there is such a format before it is added"
    checkout.add("graphcore/quant/formats/s8_1.py", MODULE.replace(AFTER_DECODING, PACKING + AFTER_DECODING))
    checkout.add("conf/quant/s8_1.yaml", YAML)
    checkout.edit(PACKED, {"graphcore/encodings.py": (('    "mxfp4",\n    "tq1_0"', '    "s8_1",\n'),)})
    checkout.assert_follows(PACKED, after="A format")
    packed, stored = checkout.run(*run, "quant=s8_1"), checkout.run(*run)
    assert packed.result is not None, packed.error
    assert stored.result is not None, stored.error
    formats = [one["format"] for one in packed.result["quant"]["weights"]]
    assert "s8_1" in formats
    ids = [one["generations"][0]["token_ids"] for one in (packed.result, stored.result)]
    assert ids[0] == ids[1], "the weights are those that the format can hold"
    checkout.assert_linter_passes()
