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


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.crdownload",
        "Unconfirmed 12.crdownload",
        "m.gguf.incomplete",
        "m.gguf.part",
        "m.gguf.aria2",
        ".cache/huggingface/download/abc.incomplete",
    ],
)
def test_an_unfinished_download_is_named(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match=f"the download of '{(tmp_path / name).name}' is not complete"):
        open_checkpoint(tmp_path)


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(CheckpointNotFoundError, match=r"'model\.safetensors' is a link to a file that is not there"):
        open_checkpoint(tmp_path)


def test_an_archive_in_a_folder_is_named(tmp_path):
    (tmp_path / "m.7z").write_bytes(b"7z\xbc\xaf\x27\x1c")
    with pytest.raises(CheckpointNotFoundError, match=r"holds no weights.*; unpack 'm\.7z'"):
        open_checkpoint(tmp_path)


def test_a_whole_file_beside_shards_is_read_as_by_transformers_with_a_note(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    whole = transformers.LlamaForCausalLM(config)
    whole.save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).notes == ()
    shard = "model-00001-of-00001.safetensors"
    save_file({name: torch.zeros_like(one) for name, one in whole.state_dict().items()}, tmp_path / shard)
    write_index(tmp_path, dict.fromkeys(whole.state_dict(), shard))
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    ours = open_checkpoint(tmp_path)
    assert all(torch.equal(ours.read(name), theirs[name]) for name in ours.tensors)
    assert ours.notes == (f"model.safetensors is read, as transformers does, and not the shards beside it ({shard})",)
