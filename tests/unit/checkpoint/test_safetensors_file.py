"""One safetensors file: what the library refuses, and where its tensors are read."""

import json
import os
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from safetensors_bytes import tensor, whole
from support.cases import in_case

from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.errors import CheckpointError, UnsupportedError

DATA = bytes(range(16))


def refusal(tmp_path, content, error=CheckpointError):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(error) as caught:
            SafetensorsCheckpoint(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert "\n" not in message
    assert "x.safetensors" in message
    assert len(message) < 600 + len(str(tmp_path))
    assert peak < 2**20 + 20 * len(content)
    return message


@pytest.mark.parametrize("encoding", DENSE_DTYPES)
def test_every_dtype_reads_as_the_library_wrote_it(tmp_path, encoding):
    dtype = DENSE_DTYPES[encoding]
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 2, 6 * dtype.itemsize, dtype=np.uint8))
    stored = {"m": raw.view(dtype).reshape(2, 3), "none": torch.empty(0, 5, dtype=dtype), "one": raw.view(dtype)[0]}
    save_file({name: value.clone() for name, value in stored.items()}, tmp_path / "x.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path / "x.safetensors")
    assert checkpoint.layout == "hf"
    assert checkpoint.tensors.keys() == stored.keys()
    content = (tmp_path / "x.safetensors").read_bytes()
    for name, value in stored.items():
        info, read = checkpoint.tensors[name], checkpoint.read(name)
        assert (info.encoding, info.shape, info.file) == (encoding, tuple(value.shape), tmp_path / "x.safetensors")
        assert (read.dtype, read.shape) == (dtype, value.shape)
        expected = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        assert read.flatten().view(torch.uint8).numpy().tobytes() == expected
        # The offset counts from the start of the file: what streaming will read.
        assert content[info.offset : info.offset + info.nbytes] == expected


def test_tensors_come_in_the_order_of_their_bytes(tmp_path):
    header = {"z": tensor(span=(16, 32)), "a": tensor(span=(32, 48)), "m": tensor(span=(0, 16)), "__metadata__": {}}
    (tmp_path / "x.safetensors").write_bytes(whole(header, bytes(48)))
    assert list(SafetensorsCheckpoint(tmp_path / "x.safetensors").tensors) == ["m", "z", "a"]


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 100_000_001, 10**8, 1000])
def test_an_absurd_header_length_is_refused(tmp_path, length):
    assert "header" in refusal(tmp_path, struct.pack("<Q", length) + b"{}" + bytes(50))


def test_a_header_over_100_mb_is_refused_even_if_the_file_has_it(tmp_path):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as stream:  # sparse: takes no disk
        stream.write(struct.pack("<Q", 100_000_001) + b"{")
        stream.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="header too large"):
        SafetensorsCheckpoint(path)


@pytest.mark.parametrize("content", [b"", b"\x00", b"\x02\x00\x00\x00\x00\x00\x00"])
def test_files_too_short_for_a_length_are_refused(tmp_path, content):
    refusal(tmp_path, content)


@pytest.mark.parametrize(
    "header",
    [b"{", b"", b"\xff\xfe{}", b"{} {}", b'{"a":' * 30000, b"[" * 30000, b'{"a":1' + b"0" * 5000, b"[]", b"null"],
)
def test_a_header_that_is_no_json_object_is_refused(tmp_path, header):
    assert "fetch it again" in refusal(tmp_path, whole(header))


def test_a_tensor_described_twice_is_refused(tmp_path):
    """The library takes the last; another program could see another model."""
    one = json.dumps(tensor())
    content = whole(f'{{"w":{one},"w":{one}}}'.encode(), DATA)
    assert refusal(tmp_path, content).endswith("x.safetensors: safetensors header: has the key 'w' twice")
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert list(file.keys()) == ["w"]


def test_a_dtype_that_is_not_read_is_refused_with_the_known_ones(tmp_path):
    message = refusal(tmp_path, whole({"w": tensor("C64", (2,))}, DATA), UnsupportedError)
    assert "tensor 'w' has dtype C64" in message
    assert "known: F64, F32" in message


def test_a_tensor_that_is_not_what_its_bytes_are_is_refused(tmp_path) -> None:
    cases = [
        *(tensor(dtype) for dtype in ("f32", "F128", "", None, 7, {})),
        *(tensor(shape=shape) for shape in ([-4], [2**63], [10**400], [4.0], [True, 4], ["4"], "4", None, [[4]])),
        *(tensor(shape=shape) for shape in ([2**62, 2**62], [2**32, 2**31], [float("nan")])),
        *(tensor(span=span) for span in ([0, 15], [0, 17], [4, 16], [16, 0], [0], [-16, 0], [0.0, 16.0], [0, 2**70])),
        *(None, [], 4, "F32"),
    ]
    for entry in cases:
        with in_case(entry):
            assert "fetch it again" in refusal(tmp_path, whole({"w": entry}, DATA))


@pytest.mark.parametrize("metadata", [[], {"format": 1}, {"format": {"a": "b"}}, {"format": None}])
def test_metadata_that_is_not_text_is_refused(tmp_path, metadata):
    refusal(tmp_path, whole({"__metadata__": metadata}))


def test_metadata_of_null_is_no_metadata(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(whole({"__metadata__": None, "w": tensor()}, DATA))
    assert SafetensorsCheckpoint(path).read("w").numpy().tobytes() == DATA


@pytest.mark.parametrize(
    ("header", "nbytes"),
    [
        ({"a": tensor(), "b": tensor(span=(8, 24))}, 24),  # overlaps
        ({"w": tensor(span=(8, 24))}, 24),  # begins after a gap
        ({"a": tensor(), "b": tensor(span=(24, 40))}, 40),  # leaves a gap
        ({"w": tensor()}, 15),  # cut off
        ({"w": tensor()}, 17),  # bytes after the last tensor
        ({}, 4),
    ],
)
def test_tensors_that_do_not_tile_the_file_are_refused(tmp_path, header, nbytes):
    assert "fetch it again" in refusal(tmp_path, whole(header, bytes(nbytes)))


def test_names_with_line_breaks_and_half_surrogates_stay_on_one_line(tmp_path):
    for name in ("a\nb" * 10000, "\ud800", "\u202e"):
        refusal(tmp_path, whole({name: tensor(span=[0, 1])}, DATA)).encode("ascii")


def test_a_file_cut_anywhere_is_refused(tmp_path):
    content = whole({"a": tensor(), "b": tensor("U8", (8,), (16, 24))}, bytes(24))
    for place in range(20):
        refusal(tmp_path, content[: len(content) * place // 20])


def test_a_header_of_640_bytes_is_not_taken_for_a_pickle(tmp_path):
    content = whole(json.dumps({"w": tensor()}).encode().ljust(0x0280), DATA)
    assert content.startswith(b"\x80\x02")
    (tmp_path / "x.safetensors").write_bytes(content)
    assert SafetensorsCheckpoint(tmp_path / "x.safetensors").read("w").numpy().tobytes() == DATA


def test_a_tensor_at_an_odd_offset_reads_as_the_library_reads_it(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(whole({"a": tensor("U8", (1,), (0, 1)), "b": tensor(span=(1, 17))}, b"\7" + DATA))
    with safe_open(path, "pt") as stored:
        assert torch.equal(SafetensorsCheckpoint(path).read("b"), stored.get_tensor("b"))
    assert SafetensorsCheckpoint(path).read("b").numpy().tobytes() == DATA


def test_a_read_tensor_outlives_its_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(5000.0)}, path)
    read = SafetensorsCheckpoint(path).read("w")
    with path.open("r+b") as stream:
        stream.truncate(100)  # under a mapping, the next line would be a bus error
    assert torch.equal(read, torch.arange(5000.0))


def test_a_file_that_shrinks_or_changes_after_opening_is_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(8.0)}, path)
    os.utime(path, ns=(0, 0))  # so that whatever is written now is seen to be later
    checkpoint = SafetensorsCheckpoint(path)
    assert torch.equal(checkpoint.read("w"), torch.arange(8.0))
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    with pytest.raises(CheckpointError, match=r"x\.safetensors: tensor 'w' needs bytes .* it shrank"):
        checkpoint.read("w")
    path.write_bytes(content[:8] + b" " + content[8:])
    with pytest.raises(CheckpointError, match="changed since it was opened, found at tensor 'w': it grew from"):
        checkpoint.read("w")
    path.write_bytes(content.replace(b"[8]", b"[4]"))
    with pytest.raises(CheckpointError, match="found at tensor 'w': it was written to; open it again"):
        checkpoint.read("w")
    (tmp_path / "other").write_bytes(content)
    (tmp_path / "other").rename(path)
    with pytest.raises(CheckpointError, match="found at tensor 'w': another file has taken its place"):
        checkpoint.read("w")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        checkpoint.read("w")


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path):
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"did you mean 'lm_head\.weight'"):
        SafetensorsCheckpoint(tmp_path / "x.safetensors").read("lm_head.wieght")
