"""Where a tensor's bytes lie, and that bytes read from there by anyone become what `read` returns."""

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from safetensors_bytes import write_index
from torch import Tensor

from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.checkpoint.ternary_checkpoint import TernaryCheckpoint, TernaryScaling
from graphcore.errors import CheckpointError

GOLDEN = Path(__file__).parents[2] / "golden"
PAIR, TERNARY = np.load(GOLDEN / "mxfp4_hf.npz"), np.load(GOLDEN / "hf_bitnet.npz")
EXPERTS = "model.layers.0.mlp.experts.down_proj"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def bytes_of(checkpoint: Checkpoint, name: str) -> list[bytes]:
    """Return the bytes of each span, by no code of ours."""
    return [span.file.read_bytes()[span.offset : span.end] for span in checkpoint.spans(name)]


def parts_at(shift: int, pieces: Sequence[bytes]) -> list[Tensor]:
    """Return the pieces as views of one buffer, the first `shift` bytes after an aligned address."""
    buffer = torch.empty(64 + shift + sum(map(len, pieces)), dtype=torch.uint8)
    at = -buffer.data_ptr() % 64 + shift
    parts = []
    for piece in pieces:
        parts.append(buffer[at : at + len(piece)])
        parts[-1].copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
        at += len(piece)
    return parts


def assert_assembled(checkpoint: Checkpoint, name: str, expected: Tensor) -> None:
    pieces = bytes_of(checkpoint, name)
    for shift in (0, 1, 8):
        parts = parts_at(shift, pieces)
        found = checkpoint.assemble(name, parts)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), shift
        assert [part.numpy().tobytes() for part in parts] == pieces, "the parts were written to"


@pytest.mark.parametrize("encoding", DENSE_DTYPES)
def test_a_safetensors_tensor_is_one_span_that_holds_its_values(tmp_path: Path, encoding: str) -> None:
    values = torch.tensor([[0, 1, 1], [1, 0, 0]]).to(DENSE_DTYPES[encoding])
    save_file({"a": torch.ones(1, dtype=torch.uint8), "w": values}, tmp_path / "m.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    (piece,) = bytes_of(checkpoint, "w")
    assert piece == values.view(torch.uint8).numpy().tobytes()
    pieces = [checkpoint.assemble("w", parts_at(shift, [piece])) for shift in (0, 1, 8)]
    assert all(found.dtype == values.dtype and found.tolist() == values.tolist() for found in pieces)
    assert checkpoint.read("w").tolist() == values.tolist()


def test_a_scalar_and_an_empty_tensor_are_read(tmp_path: Path) -> None:
    save_file({"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}, tmp_path / "m.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("scalar"), torch.tensor(2.5))
    assert torch.equal(checkpoint.read("empty"), torch.empty(0, 3))


def test_every_shards_tensors_lie_in_that_shard(tmp_path: Path) -> None:
    stored = {"a": torch.arange(6.0), "b": torch.arange(8).bfloat16()}
    for name, tensor in stored.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    write_index(tmp_path, {name: f"{name}.safetensors" for name in stored})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.files.keys() == {tmp_path / "a.safetensors", tmp_path / "b.safetensors"}
    for name, tensor in stored.items():
        assert [span.file for span in checkpoint.spans(name)] == [tmp_path / f"{name}.safetensors"]
        assert_assembled(checkpoint, name, load_file(tmp_path / f"{name}.safetensors")[name])
        assert torch.equal(checkpoint.read(name), tensor)


def test_gguf_tensors_are_one_span_dense_or_packed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    dense = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    packed = gguf.quants.quantize(dense, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("dense", dense)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(path)
    assert checkpoint.files.keys() == {path}
    assert_assembled(checkpoint, "dense", torch.from_numpy(dense))
    assert_assembled(checkpoint, "packed", torch.from_numpy(packed).flatten())


def test_a_pair_is_its_blocks_and_its_scales(tmp_path: Path) -> None:
    stored = {part: torch.from_numpy(PAIR[part]) for part in ("blocks", "scales")}
    tensors = {f"{EXPERTS}_{part}": tensor for part, tensor in stored.items()}
    save_file({**tensors, "norm": torch.ones(3)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    blocks, scales = bytes_of(checkpoint, f"{EXPERTS}_blocks")
    assert (blocks, scales) == (stored["blocks"].numpy().tobytes(), stored["scales"].numpy().tobytes())
    assert_assembled(checkpoint, f"{EXPERTS}_blocks", torch.from_numpy(PAIR["ggml_raw"]).flatten())
    assert_assembled(checkpoint, "norm", torch.ones(3))


@pytest.mark.parametrize(("scaling", "num_spans"), [("divided", 2), ("multiplied", 2), ("online", 1)])
def test_a_ternary_weight_is_its_codes_and_its_scale(tmp_path: Path, scaling: TernaryScaling, num_spans: int) -> None:
    packed = {Q_PROJ: torch.from_numpy(TERNARY["packed"]), f"{Q_PROJ}_scale": torch.from_numpy(TERNARY["weight_scale"])}
    plain = {Q_PROJ: torch.from_numpy(TERNARY["master_weight"])}
    stored = {"norm": torch.ones(3), **(plain if scaling == "online" else packed)}
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = TernaryCheckpoint(SafetensorsCheckpoint(tmp_path), scaling)
    pieces = bytes_of(checkpoint, Q_PROJ)
    assert pieces == [tensor.numpy().tobytes() for name, tensor in stored.items() if name != "norm"]
    assert len(pieces) == num_spans
    assert_assembled(checkpoint, Q_PROJ, checkpoint.read(Q_PROJ))  # test_bitnet_packing compares `read` with others
    assert_assembled(checkpoint, "norm", torch.ones(3))


def test_an_unknown_name_has_no_spans_but_an_error(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    plain = SafetensorsCheckpoint(tmp_path)
    for checkpoint in (plain, TernaryCheckpoint(plain, "online")):
        with pytest.raises(CheckpointError, match="has no tensor 'v'"):
            checkpoint.spans("v")
        with pytest.raises(CheckpointError, match="has no tensor 'v'"):
            checkpoint.read("v")


def test_a_view_at_its_dtypes_alignment_is_not_copied(tmp_path: Path) -> None:
    save_file({"w": torch.arange(4.0)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    parts = parts_at(8, bytes_of(checkpoint, "w"))
    assert checkpoint.assemble("w", parts).data_ptr() == parts[0].data_ptr()
