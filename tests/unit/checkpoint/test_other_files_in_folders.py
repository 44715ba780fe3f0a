"""What lies in people's model folders besides the model: hidden files, archives, unfinished downloads, old weights."""

import io
import lzma
import shutil
import tarfile
import zipfile

import pytest
import torch
from gguf_bytes import GGUF
from safetensors.torch import save_file
from safetensors_bytes import write_index

from graphcore.checkpoint.file_kind import FileKind, kind_of
from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.errors import CheckpointError, CheckpointNotFoundError

APPLE_DOUBLE = b"\0\5\x16\7\0\2\0\0Mac OS X        "  # what macOS writes beside each file on exFAT, and into archives


def write_safetensors(path):
    save_file({"w": torch.arange(3.0)}, path)


@pytest.mark.parametrize("name", ["m.gguf", "w.safetensors", "model.safetensors"])
def test_hidden_files_beside_the_model_are_ignored(tmp_path, name):
    (GGUF().write if name.endswith(".gguf") else write_safetensors)(tmp_path / name)
    for other in (name, "another.gguf", "model.safetensors.index.json", "pytorch_model.bin"):
        (tmp_path / f"._{other}").write_bytes(APPLE_DOUBLE)
    assert list(open_checkpoint(tmp_path).tensors) == ["w"]


def zip_of_a_folder(folder, path):
    shutil.make_archive(str(path), "zip", folder)
    return path.with_suffix(path.suffix + ".zip")


def tar_of_a_folder(mode):
    def write(folder, path):
        with tarfile.open(path, mode) as archive:
            archive.add(folder, "m")
        return path

    return write


def bytes_as(content):
    def write(folder, path):
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (zip_of_a_folder, "is a zip archive; unpack it"),
        (tar_of_a_folder("w"), "is a tar archive; unpack it"),
        (tar_of_a_folder("w:gz"), "is a compressed file; unpack it"),
        (tar_of_a_folder("w:bz2"), "is a compressed file; unpack it"),
        (bytes_as(lzma.compress(b"GGUF" * 9)), "is a compressed file; unpack it"),
        (bytes_as(b"\x28\xb5\x2f\xfd" + bytes(9)), "is a compressed file; unpack it"),
        (bytes_as(b"7z\xbc\xaf\x27\x1c" + bytes(9)), "is a 7z archive; unpack it"),
        (bytes_as(b"Rar!\x1a\x07\x01\0" + bytes(9)), "is a rar archive; unpack it"),
    ],
)
@pytest.mark.parametrize("name", ["packed", "packed.gguf", "packed.safetensors"])
def test_an_archive_is_named_whatever_its_own_name(tmp_path, write, says, name):
    folder = tmp_path / "m"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(write(folder, tmp_path / name))


def test_a_zip_archive_of_torch_is_a_pickle_even_under_a_long_name(tmp_path):
    path = tmp_path / ("w" * 240)
    torch.save({"w": torch.zeros(1)}, path)
    assert kind_of(path) is FileKind.PICKLE
    torch.save({"w": torch.zeros(1)}, buffer := io.BytesIO())
    path.write_bytes(buffer.getvalue())
    assert kind_of(path) is FileKind.PICKLE
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    assert kind_of(path) is FileKind.ZIP
