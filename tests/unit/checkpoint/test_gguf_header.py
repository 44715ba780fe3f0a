"""Damaged and unusual GGUF headers: each is refused with the file, the place and the reason, on one line."""

import io
import struct
import tracemalloc

import pytest
from gguf_bytes import ARRAY, GGUF, I32, STRING, U32, Tensor, entry, text

from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.checkpoint.gguf_header import read_gguf_header
from graphcore.checkpoint.gguf_reader import GGUFReader
from graphcore.errors import CheckpointError, UnsupportedError

HUGE = 2**60
ARCH = entry("general.architecture", STRING, text("llama"))


def refusal(path, error=CheckpointError):
    """The message with which `path` is refused, after a look at what the refusal took."""
    tracemalloc.start()
    try:
        with pytest.raises(error) as caught:
            GGUFCheckpoint(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    assert peak < 2**20
    return message


def array(kind, count, raw=b""):
    return entry("a", ARRAY, struct.pack("<IQ", kind, count) + raw)


@pytest.mark.parametrize("count", [HUGE, 2**64 - 1, 5])
def test_a_tensor_count_beyond_the_file_is_refused(tmp_path, count):
    assert f"{count} tensors" in refusal(GGUF(num_tensors=count, tensors=[]).write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("count", [HUGE, 2**64 - 1, 50])
def test_a_metadata_count_beyond_the_file_is_refused(tmp_path, count):
    assert f"{count} metadata entries" in refusal(GGUF(num_entries=count).write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    "broken",
    [
        struct.pack("<Q", HUGE) + b"k",  # a key's length
        entry("a", STRING, struct.pack("<Q", HUGE)),
        array(U32, HUGE),
        array(0, 2**40),
        array(STRING, HUGE),
        array(STRING, 1, struct.pack("<Q", HUGE)),
        array(STRING, 2, text("x") + struct.pack("<Q", 10**6)),
    ],
)
def test_a_length_beyond_the_file_is_refused_before_memory_is_taken(tmp_path, broken):
    refusal(GGUF(entries=[ARCH, broken]).write(tmp_path / "m.gguf"))


def test_a_tensor_name_beyond_the_file_is_refused(tmp_path):
    whole = GGUF().to_bytes()
    (tmp_path / "m.gguf").write_bytes(whole.replace(text("w"), struct.pack("<Q", HUGE) + b"w"))
    refusal(tmp_path / "m.gguf")


def test_arrays_of_arrays_are_refused(tmp_path):
    message = refusal(GGUF(entries=[ARCH, array(ARRAY, 1, struct.pack("<IQ", U32, 0))]).write(tmp_path / "m.gguf"))
    assert "'a'" in message
    assert "array of arrays" in message


@pytest.mark.parametrize("broken", [entry("a", 13, b""), array(13, 1), entry("a", 2**32 - 1, b"")])
def test_unknown_value_types_are_refused(tmp_path, broken):
    assert "unknown value type" in refusal(GGUF(entries=[ARCH, broken]).write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("broken", [entry("a", 7, b"\x02"), array(7, 2, b"\x01\xff")])
def test_bools_other_than_0_and_1_are_refused(tmp_path, broken):
    assert "bool" in refusal(GGUF(entries=[ARCH, broken]).write(tmp_path / "m.gguf"))


def test_text_that_is_not_utf8_is_kept_byte_for_byte(tmp_path):
    """llama.cpp reads strings as bytes: a name in another encoding does not keep a model from running."""
    entries = [ARCH, entry("general.name", STRING, text(b"caf\xe9")), array(STRING, 2, text(b"ok") + text(b"\xff\xfe"))]
    metadata = GGUFCheckpoint(GGUF(entries=[*entries, entry(b"\xff", 7, b"\1")]).write(tmp_path / "m.gguf")).metadata
    stored = metadata["general.name"], *metadata["a"]
    assert [one.encode("utf-8", "surrogateescape") for one in stored] == [b"caf\xe9", b"ok", b"\xff\xfe"]
    assert metadata["\udcff"] is True


def test_empty_arrays_strings_and_text_with_nul_are_read(tmp_path):
    entries = [ARCH, array(STRING, 0), entry("b", STRING, text("")), entry("c", STRING, text("x\0y"))]
    metadata = GGUFCheckpoint(GGUF(entries=entries).write(tmp_path / "m.gguf")).metadata
    assert (metadata["a"], metadata["b"], metadata["c"]) == ((), "", "x\0y")


def test_duplicate_keys_are_refused(tmp_path):
    assert "'general.architecture' twice" in refusal(GGUF(entries=[ARCH, ARCH]).write(tmp_path / "m.gguf"))


def test_duplicate_tensor_names_are_refused(tmp_path):
    assert "'w' twice" in refusal(GGUF(tensors=[Tensor(), Tensor()]).write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("num_dims", [5, 2**32 - 1])
def test_more_than_4_dims_are_refused(tmp_path, num_dims):
    whole = GGUF().to_bytes()
    (tmp_path / "m.gguf").write_bytes(whole.replace(text("w") + b"\1\0\0\0", text("w") + struct.pack("<I", num_dims)))
    assert f"'w' has {num_dims} dims" in refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize("ne", [(0,), (4, 0), (2**63,), (2**32, 2**32), (2**64 - 1, 2, 2, 2), (2**62, 2)])
def test_dims_of_zero_or_overflowing_are_refused(tmp_path, ne):
    assert "'w' has the impossible shape" in refusal(GGUF(tensors=[Tensor(ne=ne)]).write(tmp_path / "m.gguf"))


def test_rows_that_are_no_whole_number_of_blocks_are_refused(tmp_path):
    message = refusal(GGUF(tensors=[Tensor(ne=(48, 2), type_id=2)]).write(tmp_path / "m.gguf"))
    assert "'w' has shape (2, 48), which q4_0 cannot store in blocks of 32" in message


def test_a_misaligned_tensor_is_refused(tmp_path):
    assert "'w' starts at 8" in refusal(GGUF(tensors=[Tensor(offset=8)]).write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("offset", [32, 2**40, 2**64 - 32])
def test_a_tensor_past_the_end_is_refused(tmp_path, offset):
    assert "'w' (f32, shape (4,)) ends at byte" in refusal(GGUF(tensors=[Tensor(offset=offset)]).write(tmp_path / "m"))


def test_a_tensor_larger_than_the_file_is_refused(tmp_path):
    assert "cut off" in refusal(GGUF(tensors=[Tensor(ne=(2**40,))]).write(tmp_path / "m.gguf"))


def test_overlapping_tensors_are_refused(tmp_path):
    tensors = [Tensor("a", (16,), raw=bytes(64)), Tensor("b", offset=32)]
    message = refusal(GGUF(tensors=tensors).write(tmp_path / "m.gguf"))
    assert "'a'" in message
    assert "'b'" in message
    assert "overlap" in message


def test_a_gap_between_tensors_is_no_fault(tmp_path):
    tensors = [Tensor("a", offset=32), Tensor("b", offset=0, raw=bytes(16))]
    checkpoint = GGUFCheckpoint(GGUF(tensors=tensors).write(tmp_path / "m.gguf"))
    assert checkpoint.read("b").view(-1).numpy().tobytes() == bytes(range(16))  # what was written first
    assert checkpoint.read("a").view(-1).numpy().tobytes() == bytes(16)


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**32 - 1])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path, alignment):
    entries = [ARCH, entry("general.alignment", U32, struct.pack("<I", alignment))]
    assert f"general.alignment is {alignment}" in refusal(GGUF(entries=entries).write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("kind", "raw", "shown"), [(STRING, text("32"), "'32'"), (7, b"\1", "True"), (I32, struct.pack("<i", -32), "-32")]
)
def test_an_alignment_that_is_no_positive_number_is_refused(tmp_path, kind, raw, shown):
    entries = [ARCH, entry("general.alignment", kind, raw)]
    assert f"general.alignment is {shown}" in refusal(GGUF(entries=entries).write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("version", "reason"), [(1, "is GGUF version 1, of August 2023"), (4, "version 4"), (0, "version 0")]
)
def test_other_versions_are_refused(tmp_path, version, reason):
    assert reason in refusal(GGUF(version=version).write(tmp_path / "m.gguf"), UnsupportedError)


@pytest.mark.parametrize("version", [2, 3])
def test_big_endian_files_are_refused_as_such(tmp_path, version):
    swapped = int.from_bytes(struct.pack(">I", version), "little")
    assert "big-endian" in refusal(GGUF(version=swapped).write(tmp_path / "m.gguf"), UnsupportedError)


@pytest.mark.parametrize(("type_id", "name"), [(15, "q8_k"), (37, "i8_s"), (38, "tl1"), (9, "q8_1"), (4, "q4_2")])
def test_known_types_that_are_not_read_are_named(tmp_path, type_id, name):
    message = refusal(GGUF(tensors=[Tensor("blk.3.w", type_id=type_id)]).write(tmp_path / "m.gguf"), UnsupportedError)
    assert f"'blk.3.w' has type {type_id} ({name}" in message
    assert "known: f32, f16, q4_0" in message


@pytest.mark.parametrize("type_id", [43, 255, 2**32 - 1])
def test_unknown_types_are_refused_by_id(tmp_path, type_id):
    message = refusal(GGUF(tensors=[Tensor(type_id=type_id)]).write(tmp_path / "m.gguf"), UnsupportedError)
    assert f"has type {type_id}, which no format reads" in message


@pytest.mark.parametrize("architecture", ["bitnet", "bitnet-b1.58", "bitnet-25"])
def test_id_39_is_tl2_in_bitnet_files_and_refused(tmp_path, architecture):
    entries = [entry("general.architecture", STRING, text(architecture))]
    tensors = [Tensor(ne=(32,), type_id=39, raw=bytes(17))]
    assert "tl2" in refusal(GGUF(entries=entries, tensors=tensors).write(tmp_path / "m.gguf"), UnsupportedError)


def test_id_39_is_mxfp4_elsewhere_and_id_36_is_i2_s_everywhere(tmp_path):
    tensors = [Tensor("a", (32,), 39, bytes(17)), Tensor("b", (128,), 36, bytes(64))]
    checkpoint = GGUFCheckpoint(GGUF(tensors=tensors).write(tmp_path / "m.gguf"))
    assert [info.encoding for info in checkpoint.tensors.values()] == ["mxfp4", "i2_s"]


@pytest.mark.parametrize("architecture", [entry("general.architecture", U32, bytes(4)), None])
def test_a_file_without_a_readable_architecture_opens_as_a_container(tmp_path, architecture):
    tensors = [Tensor("a", (32,), 39, bytes(17))]
    path = GGUF(entries=[architecture] if architecture else [], tensors=tensors).write(tmp_path / "m.gguf")
    assert GGUFCheckpoint(path).tensors["a"].encoding == "mxfp4"


def test_other_types_are_read_in_bitnet_files(tmp_path):
    entries = [entry("general.architecture", STRING, text("bitnet-b1.58"))]
    tensors = [Tensor("a"), Tensor("b", (128,), 36, bytes(64))]
    checkpoint = GGUFCheckpoint(GGUF(entries=entries, tensors=tensors).write(tmp_path / "m.gguf"))
    assert [info.encoding for info in checkpoint.tensors.values()] == ["f32", "i2_s"]


def test_nothing_is_read_past_the_size_a_file_had_or_its_end_now():
    for stored, size in ((100, 2), (2, 100)):
        with pytest.raises(CheckpointError, match="the magic needs 4 bytes"):
            GGUFReader(io.BytesIO(bytes(stored)), size, "m.gguf").take(4, "the magic")


@pytest.mark.parametrize("stored", [8, 13, 21, 22])
def test_an_array_of_strings_in_a_file_that_shrinks_is_an_error(stored):
    raw = struct.pack("<IIQ", ARRAY, STRING, 2) + text("x" * 5) + text("y" * 5)
    for end in (16 + stored, len(raw)):
        reader = GGUFReader(io.BytesIO(raw[:end]), len(raw), "m.gguf")
        if end == len(raw):
            assert reader.value("a") == ("xxxxx", "yyyyy")
        else:
            with pytest.raises(CheckpointError, match="key 'a' needs"):
                reader.value("a")


def test_messages_stay_on_one_line_whatever_the_names(tmp_path):
    refusal(GGUF(tensors=[Tensor("a\nb" * 20000, offset=8)]).write(tmp_path / "m.gguf"))
    assert len(refusal(GGUF(entries=[ARCH, entry("k\n" * 9999, 99, b"")]).write(tmp_path / "m.gguf"))) < 500


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = GGUF(tensors=[Tensor("a"), Tensor("b", raw=bytes(32), ne=(8,))]).to_bytes()
    path = tmp_path / "m.gguf"
    for place in range(20):
        path.write_bytes(whole[: len(whole) * place // 20])
        refusal(path)
    path.write_bytes(whole)
    assert list(GGUFCheckpoint(path).tensors) == ["a", "b"]


def test_a_file_that_shrinks_after_opening_is_an_error_not_a_crash(tmp_path):
    path = GGUF().write(tmp_path / "m.gguf")
    checkpoint = GGUFCheckpoint(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'w' needs bytes .* it shrank"):
        checkpoint.read("w")


def test_a_file_that_disappears_after_opening_is_an_error(tmp_path):
    checkpoint = GGUFCheckpoint(GGUF().write(tmp_path / "m.gguf"))
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(FileNotFoundError):
        checkpoint.read("w")


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path):
    checkpoint = GGUFCheckpoint(GGUF(tensors=[Tensor("output.weight")]).write(tmp_path / "m.gguf"))
    with pytest.raises(CheckpointError, match=r"no tensor 'output\.wieght' \(did you mean 'output\.weight'\?\)"):
        checkpoint.read("output.wieght")


def test_a_file_without_tensors_opens(tmp_path):
    header = read_gguf_header(GGUF(tensors=[]).write(tmp_path / "vocab.gguf"))
    assert header.tensors == ()
