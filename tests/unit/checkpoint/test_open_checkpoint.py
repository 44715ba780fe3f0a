"""Which reader a path gets, and what is said about paths that get none."""

import os
import shlex
import struct

import pytest
import torch
from gguf_bytes import GGUF, STRING, U16, Tensor, entry, text
from safetensors.torch import save_file
from safetensors_bytes import write_index

from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.checkpoint.json_object import read_json_object
from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.errors import CheckpointError, CheckpointNotFoundError, UnsupportedError


def write_safetensors(path):
    save_file({"w": torch.arange(3.0)}, path)
    return path


@pytest.mark.parametrize("kind", [str, os.fspath, lambda path: path])
def test_files_open_by_str_and_path(tmp_path, kind):
    assert isinstance(open_checkpoint(kind(write_safetensors(tmp_path / "a.safetensors"))), SafetensorsCheckpoint)
    assert isinstance(open_checkpoint(kind(GGUF().write(tmp_path / "a.gguf"))), GGUFCheckpoint)


def test_the_first_bytes_decide_not_the_name(tmp_path):
    assert isinstance(open_checkpoint(GGUF().write(tmp_path / "a.safetensors")), GGUFCheckpoint)
    assert isinstance(open_checkpoint(GGUF().write(tmp_path / "b.bin")), GGUFCheckpoint)
    assert isinstance(open_checkpoint(write_safetensors(tmp_path / "blob")), SafetensorsCheckpoint)


def test_source_is_what_was_asked_for(tmp_path):
    write_safetensors(tmp_path / "model.safetensors")
    assert open_checkpoint(str(tmp_path)).source == str(tmp_path)
    assert open_checkpoint(GGUF().write(tmp_path / "a.gguf")).source == str(tmp_path / "a.gguf")


def test_safetensors_are_preferred_in_a_folder(tmp_path):
    GGUF().write(tmp_path / "a.gguf")
    write_safetensors(tmp_path / "model.safetensors")
    assert isinstance(open_checkpoint(tmp_path), SafetensorsCheckpoint)


def test_an_index_makes_a_folder_a_safetensors_checkpoint(tmp_path):
    GGUF().write(tmp_path / "a.gguf")
    write_safetensors(tmp_path / "x.safetensors")
    write_index(tmp_path, {"w": "x.safetensors"})
    assert isinstance(open_checkpoint(tmp_path), SafetensorsCheckpoint)


def test_one_gguf_in_a_folder_is_taken_and_projectors_are_ignored(tmp_path):
    GGUF().write(tmp_path / "a.gguf")
    GGUF(tensors=[Tensor("v")]).write(tmp_path / "mmproj-a-f16.gguf")
    write_safetensors(tmp_path / "vision.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "gguf"
    assert list(checkpoint.tensors) == ["w"]


def test_a_split_gguf_in_a_folder_counts_as_one(tmp_path):
    for number in range(2):
        entries = [entry("split.no", U16, bytes([number, 0])), entry("split.count", U16, b"\2\0")]
        GGUF(entries=entries, tensors=[Tensor(f"t{number}")]).write(tmp_path / f"m-0000{number + 1}-of-00002.gguf")
    assert list(open_checkpoint(tmp_path).tensors) == ["t0", "t1"]


def test_several_gguf_models_are_listed(tmp_path):
    for name in ("q4", "q8"):
        GGUF().write(tmp_path / f"{name}.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF models \(q4\.gguf, q8\.gguf\); name one"):
        open_checkpoint(tmp_path)


def test_one_other_safetensors_file_is_taken(tmp_path):
    write_safetensors(tmp_path / "weights.safetensors")
    assert isinstance(open_checkpoint(tmp_path), SafetensorsCheckpoint)


@pytest.mark.parametrize("path", ["gone", "gone.gguf", "gone/model.safetensors"])
def test_a_missing_path_is_not_found(tmp_path, path):
    with pytest.raises(CheckpointNotFoundError, match="no such file or folder"):
        open_checkpoint(tmp_path / path)


def test_a_folder_with_a_projector_only_or_nothing_holds_no_weights(tmp_path):
    GGUF().write(tmp_path / "mmproj.gguf")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match="holds no weights"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["a.gguf", "a.safetensors", "a"])
def test_an_empty_file_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="is empty"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("content", [b"hello world, this is text", b"GGU", bytes(100), b"\xff" * 20, b"function{}"])
def test_unknown_magic_is_refused_with_what_was_found(tmp_path, content):
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.gguf: is neither safetensors nor GGUF, it starts with b'"):
        open_checkpoint(tmp_path / "a.gguf")


@pytest.mark.parametrize("name", ["a.gguf", "model.safetensors"])
def test_a_git_lfs_pointer_is_named_as_such(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match="Git LFS pointer"):
            open_checkpoint(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "a.pt", "a.pth", "a.ckpt", "renamed"])
def test_pickles_are_refused(tmp_path, name):
    torch.save({"w": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(UnsupportedError, match=r"pickle.*python -c"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("tensors", "is_refused"),
    [  # as mlx 0.32 writes them, by nn.quantize in its modes, and by mlx-lm's models
        (
            {
                "q.weight": torch.zeros(32, 8, dtype=torch.uint32),
                "q.scales": torch.zeros(32, 2),
                "q.biases": torch.zeros(32, 2),
            },
            True,
        ),
        ({"q.weight": torch.zeros(32, 8, dtype=torch.uint32), "q.scales": torch.zeros(32, 2, dtype=torch.uint8)}, True),
        ({"model.layers.0.mlp.switch_mlp.up_proj.weight": torch.zeros(4, 6, 8)}, True),
        ({"model.layers.0.conv.conv.weight": torch.zeros(8, 3, 1)}, True),
        ({"model.layers.0.self_attn.q_proj.weight": torch.zeros(8, 8, dtype=torch.bfloat16)}, False),
    ],
)
def test_a_folder_of_mlx_is_read_where_its_tensors_are_transformers(tmp_path, tensors, is_refused):
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    if is_refused:
        with pytest.raises(UnsupportedError, match=r"is a folder of MLX, .*converted from, or a GGUF file"):
            open_checkpoint(tmp_path)
    else:
        assert open_checkpoint(tmp_path).tensors.keys() == tensors.keys()


def test_a_convolution_of_width_1_is_no_sign_of_mlx(tmp_path):
    save_file({"audio.pointwise_conv1.weight": torch.zeros(8, 4, 1)}, tmp_path / "model.safetensors")
    assert len(open_checkpoint(tmp_path).tensors) == 1


@pytest.mark.parametrize("magic", [0x67676A74, 0x67676D66, 0x67676D6C])  # ggjt, ggmf, ggml
@pytest.mark.parametrize("name", ["ggml-model-q4_0.bin", "ggml model.gguf", "model"])
def test_a_file_of_before_gguf_is_named_with_its_conversion(tmp_path, magic, name):
    path = tmp_path / name
    path.write_bytes(magic.to_bytes(4, "little") + b"\3\0\0\0" + bytes(64))
    new = path.with_suffix(".gguf")
    with pytest.raises(UnsupportedError, match="is a GGML file of before August 2023") as refused:
        open_checkpoint(path)
    command = shlex.join(["python", "convert_llama_ggml_to_gguf.py", "--input", str(path), "--output", str(new)])
    assert command in str(refused.value)
    if name.endswith(".bin"):
        with pytest.raises(UnsupportedError, match=r"ggml-model-q4_0\.bin: is a GGML file"):
            open_checkpoint(tmp_path)


def imatrix() -> bytes:
    """An importance matrix as llama.cpp's imatrix wrote it before it wrote GGUF."""
    name = b"blk.0.attn_k.weight"
    return struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii4f", 7, 4, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (0x67676C61.to_bytes(4, "little") + bytes(64), "is a LoRA adapter of before August 2023"),
        (imatrix(), "is an importance matrix"),
        (b"\n<!DOCTYPE html><html>", "is a web page, not the weights"),
        (b"\x89HDF\r\n\x1a\n" + bytes(64), "is an HDF5 file"),
        (b'{"weight_map": {}}', "is a JSON file, not the weights; name its folder"),
    ],
)
@pytest.mark.parametrize("name", ["x.bin", "x.dat", "x.gguf"])
def test_other_files_are_named(tmp_path, content, says, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        (
            {"general.type": "adapter", "adapter.type": "lora"},
            r"is a LoRA adapter, not a model; name its base .* model\.adapter=\S+x\.gguf$",
        ),
        ({"general.type": "imatrix"}, "is an importance matrix"),
        ({"general.type": "mmproj", "general.architecture": "clip"}, "is a projector of images or sound"),
        ({"general.architecture": "clip"}, "is a projector of images or sound"),
        ({"general.architecture": "controlvector"}, "is a control vector"),
    ],
)
def test_gguf_files_that_are_no_model_are_named(tmp_path, entries, says):
    entries = {"general.architecture": "llama", **entries}
    written = [entry(key, STRING, text(value)) for key, value in entries.items()]
    with pytest.raises(UnsupportedError, match=says):
        open_checkpoint(GGUF(entries=written).write(tmp_path / "x.gguf"))


def test_an_adapter_s_folder_and_file_are_named_with_the_base_model_and_how_to_merge(tmp_path):
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(2, 4)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.2-1B"}')
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        with pytest.raises(
            UnsupportedError, match=rf"is an adapter .* of 'meta-llama/Llama-3\.2-1B', .*model\.adapter={tmp_path}$"
        ):
            open_checkpoint(path)
    (tmp_path / "adapter_config.json").unlink()
    for path in (tmp_path / "adapter_model.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match="adapter"):
            open_checkpoint(path)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save({}, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_config.json").write_text("damaged")
    with pytest.raises(UnsupportedError, match=r"is an adapter \(LoRA or the like\), not a model"):
        open_checkpoint(tmp_path)


def test_an_adapter_beside_a_model_is_a_note(tmp_path):
    write_safetensors(tmp_path / "merged.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"x.lora_A.weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["w"]
    assert checkpoint.notes == ("the adapter beside the model is not applied (adapter_config.json)",)


def test_a_bin_file_counts_as_a_pickle_whatever_it_starts_with(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"protocol 0 has no magic")
    with pytest.raises(UnsupportedError, match="is a pickle"):
        open_checkpoint(tmp_path / "pytorch_model.bin")


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="holds no weights"):
        open_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_json_object(tmp_path / "config.json")


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\ud800"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


def test_a_file_that_may_not_be_read_is_a_checkpoint_error(tmp_path):
    path = GGUF().write(tmp_path / "a.gguf")
    if os.geteuid() == 0:  # root may read everything: a loop of links fails the same way
        path.unlink()
        path.symlink_to(path)
    else:
        path.chmod(0)
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(path)
