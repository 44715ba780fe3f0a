"""One safetensors file: its header against its bytes, and against the safetensors library."""

import json
import os
import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from safetensors_bytes import tensor, whole

from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.checkpoint.safetensors_file import read_safetensors_header
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


def damaged(raw: bytes, chance: random.Random) -> bytes:
    """Return the header with one to three bytes changed, cut out or put in.

    No minus is among them: JSON's -0 is the only number that the library refuses and this reader takes, as 0.
    """
    damage = bytearray(raw)
    for _ in range(chance.randint(1, 3)):
        at, kind = chance.randrange(len(damage)), chance.random()
        if kind < 0.5:
            damage[at] = chance.choice(b'0123456789{}[]",:abFe. \n')
        elif kind < 0.75:
            del damage[at : at + chance.randint(1, 6)]
        else:
            damage[at:at] = chance.choice([b" ", b"1", b"0", b",", b'"', b".0", b"null", b"[]", b'"x":1,'])
    return bytes(damage)


def is_read(read: Callable[[Path], object], path: Path, refusals: type[Exception]) -> bool:
    try:
        read(path)
    except refusals:
        return False
    return True


def open_with_the_library(path: Path) -> None:
    with safe_open(path, "np") as file:
        file.keys()


def test_what_the_library_refuses_is_refused_and_what_it_reads_is_read(tmp_path):
    """The one difference besides: a key that is there twice is refused here."""
    path, chance = tmp_path / "x.safetensors", random.Random(1)
    header = {"a": tensor(shape=(2, 2)), "b": tensor("BF16", (4,), (16, 24)), "__metadata__": {"format": "pt"}}
    raw = json.dumps(header).encode()
    verdicts: Counter[bool] = Counter()
    for _ in range(3000):
        damage = damaged(raw, chance)
        path.write_bytes(whole(damage, bytes(24)))
        theirs = is_read(open_with_the_library, path, SafetensorError)
        ours = is_read(read_safetensors_header, path, CheckpointError)
        if ours != theirs:
            with pytest.raises(CheckpointError, match=r"has the key .* twice"):
                read_safetensors_header(path)
        verdicts[ours] += 1
    assert min(verdicts.values()) > 50, "both happen"


def test_tensors_come_in_the_order_of_their_bytes(tmp_path):
    header = {"z": tensor(span=(16, 32)), "a": tensor(span=(32, 48)), "m": tensor(span=(0, 16)), "__metadata__": {}}
    (tmp_path / "x.safetensors").write_bytes(whole(header, bytes(48)))
    assert list(SafetensorsCheckpoint(tmp_path / "x.safetensors").tensors) == ["m", "z", "a"]


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 100_000_001, 10**8, 1000])
def test_an_absurd_header_length_is_refused(tmp_path, length):
    assert str(length) in refusal(tmp_path, struct.pack("<Q", length) + b"{}" + bytes(50))


def test_a_header_over_100_mb_is_refused_even_if_the_file_has_it(tmp_path):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as stream:  # sparse: takes no disk
        stream.write(struct.pack("<Q", 100_000_001) + b"{")
        stream.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="promises a header of 100000001 bytes"):
        SafetensorsCheckpoint(path)


@pytest.mark.parametrize("content", [b"", b"\x00", b"\x02\x00\x00\x00\x00\x00\x00"])
def test_files_too_short_for_a_length_are_refused(tmp_path, content):
    refusal(tmp_path, content)


@pytest.mark.parametrize(
    "header",
    [b"{", b"{]", b"", b"\xff\xfe{}", b'{"a": tru', b"{} {}", b'{"a":' * 30000, b"[" * 30000, b'{"a":1' + b"0" * 5000],
)
def test_a_header_that_is_not_json_is_refused(tmp_path, header):
    message = refusal(tmp_path, whole(header))
    assert "not JSON" in message or "nested too deep" in message


@pytest.mark.parametrize("header", [b"[]", b"1", b'"x"', b"null", b"true"])
def test_a_header_that_is_no_object_is_refused(tmp_path, header):
    assert "not an object" in refusal(tmp_path, whole(header))


def test_a_tensor_described_twice_is_refused(tmp_path):
    one = json.dumps(tensor())
    message = refusal(tmp_path, whole(f'{{"w":{one},"w":{one}}}'.encode(), DATA))
    assert message.endswith("x.safetensors: safetensors header: has the key 'w' twice")


def test_a_key_of_a_tensor_given_twice_is_refused(tmp_path):
    header = b'{"w":{"dtype":"F32","shape":[4],"shape":[4],"data_offsets":[0,16]}}'
    assert "the key 'shape' twice" in refusal(tmp_path, whole(header, DATA))


@pytest.mark.parametrize("dtype", ["F4", "f32", "F128", "F8_E8M0", "", None, 7, ["F32"], {}])
def test_an_unknown_dtype_is_refused_with_the_known_ones(tmp_path, dtype):
    message = refusal(tmp_path, whole({"w": tensor(dtype)}, DATA), UnsupportedError)
    assert "tensor 'w' has dtype" in message
    assert "known: F64, F32" in message


@pytest.mark.parametrize(
    "shape",
    [
        [-4],
        [-1, -4],
        [2**63],
        [2**64],
        [10**400],
        [4.0],
        [True, 4],
        ["4"],
        [None],
        "4",
        4,
        None,
        {"0": 4},
        [[4]],
        [1] * 17,
    ],
)
def test_a_shape_that_is_no_list_of_sizes_is_refused(tmp_path, shape):
    assert "tensor 'w' has shape" in refusal(tmp_path, whole({"w": tensor(shape=shape)}, DATA))


def test_nan_in_a_shape_is_refused(tmp_path):
    assert "NaN is not allowed" in refusal(tmp_path, whole({"w": tensor(shape=[float("nan")])}, DATA))


@pytest.mark.parametrize("span", [[0, 15], [0, 17], [4, 16], [0, 0]])
def test_offsets_that_do_not_fit_shape_and_dtype_are_refused(tmp_path, span):
    assert "tensor 'w' (f32, shape [4]) takes 16 bytes" in refusal(tmp_path, whole({"w": tensor(span=span)}, DATA))


@pytest.mark.parametrize("shape", [[2**62, 2**62], [2**62] * 16, [2**32, 2**31]])
def test_a_shape_that_overflows_is_refused(tmp_path, shape):
    refusal(tmp_path, whole({"w": tensor(shape=shape)}, DATA))


@pytest.mark.parametrize(
    "span", [[16, 0], [0], [0, 16, 16], [-16, 0], [0.0, 16.0], None, "0,16", [False, 16], [0, 2**70]]
)
def test_offsets_that_are_no_span_are_refused(tmp_path, span):
    assert "tensor 'w' has data_offsets" in refusal(tmp_path, whole({"w": tensor(span=span)}, DATA))


@pytest.mark.parametrize("entry", [None, [], 4, "F32"])
def test_an_entry_that_is_no_object_is_refused(tmp_path, entry):
    assert "tensor 'w'" in refusal(tmp_path, whole({"w": entry}))


@pytest.mark.parametrize("metadata", [None, {"format": None}, {"format": "pt", "step": None}])
def test_metadata_of_null_is_no_metadata(tmp_path, metadata):
    path = tmp_path / "x.safetensors"
    path.write_bytes(whole({"__metadata__": metadata, "w": tensor()}, DATA))
    assert SafetensorsCheckpoint(path).read("w").numpy().tobytes() == DATA
    if metadata is None:  # the library reads null in place of the whole
        with safe_open(path, "pt") as stored:
            assert stored.get_tensor("w").numpy().tobytes() == DATA


@pytest.mark.parametrize("metadata", [[], {"format": 1}, {"format": {"a": "b"}}])
def test_metadata_that_is_not_text_is_refused(tmp_path, metadata):
    assert "__metadata__" in refusal(tmp_path, whole({"__metadata__": metadata}))


def test_a_span_that_ends_before_it_begins_is_said_to_be_none(tmp_path):
    assert "not [begin, end]" in refusal(tmp_path, whole({"w": tensor(shape=(0,), span=(1, 0))}, b"\0"))


def test_a_header_as_long_as_the_rest_of_the_file_and_its_own_length_is_refused_as_too_long(tmp_path):
    assert "promises a header of 9 bytes" in refusal(tmp_path, struct.pack("<Q", 9) + b"{}")


def test_overlapping_tensors_are_refused(tmp_path):
    message = refusal(tmp_path, whole({"a": tensor(), "b": tensor(span=(8, 24))}, bytes(24)))
    assert "tensor 'b' overlaps tensor 'a'" in message


def test_gaps_are_refused(tmp_path):
    assert "gap before tensor 'w'" in refusal(tmp_path, whole({"w": tensor(span=(8, 24))}, bytes(24)))
    message = refusal(tmp_path, whole({"a": tensor(), "b": tensor(span=(24, 40))}, bytes(40)))
    assert "tensor 'b' leaves a gap after tensor 'a'" in message


def test_a_tensor_past_the_end_is_refused(tmp_path):
    assert "tensor 'w' ends at byte" in refusal(tmp_path, whole({"w": tensor()}, bytes(15)))


def test_bytes_after_the_last_tensor_are_refused(tmp_path):
    assert "1 bytes after its last tensor" in refusal(tmp_path, whole({"w": tensor()}, bytes(17)))
    assert "4 bytes after its last tensor" in refusal(tmp_path, whole({}, bytes(4)))


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
