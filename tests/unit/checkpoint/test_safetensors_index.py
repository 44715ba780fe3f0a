"""Sharded safetensors: index and shards must tell the same story about every tensor that a model needs."""

import json

import pytest
import torch
from safetensors.torch import save_file
from safetensors_bytes import write_index

from graphcore.checkpoint.mxfp4_checkpoint import Mxfp4Checkpoint
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint, load_tensors
from graphcore.checkpoint.stacked_checkpoint import with_stacked_experts
from graphcore.checkpoint.ternary_checkpoint import TernaryCheckpoint
from graphcore.errors import CheckpointError, CheckpointNotFoundError

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def shards(tmp_path):
    save_file({"a": torch.arange(4.0), "b": torch.arange(3)}, tmp_path / ONE)
    save_file({"c": torch.ones(2, 2, dtype=torch.bfloat16)}, tmp_path / TWO)
    write_index(tmp_path, {"a": ONE, "b": ONE, "c": TWO})
    return tmp_path


def refusal(folder, error=CheckpointError):
    with pytest.raises(error) as caught:
        SafetensorsCheckpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_shards_are_one_checkpoint(shards):
    checkpoint = SafetensorsCheckpoint(shards)
    assert {name: info.file.name for name, info in checkpoint.tensors.items()} == {"a": ONE, "b": ONE, "c": TWO}
    assert torch.equal(checkpoint.read("a"), torch.arange(4.0))
    assert torch.equal(checkpoint.read("c"), torch.ones(2, 2, dtype=torch.bfloat16))
    assert checkpoint.folder == shards


def test_shards_may_lie_in_a_folder_below_and_behind_links(shards, tmp_path_factory):
    blobs = tmp_path_factory.mktemp("blobs")  # as in Hugging Face's cache
    (shards / TWO).rename(blobs / "0123abcd")
    (shards / "sub").mkdir()
    (shards / "sub" / TWO).symlink_to(blobs / "0123abcd")
    write_index(shards, {"a": ONE, "b": ONE, "c": f"sub/{TWO}"})
    assert torch.equal(SafetensorsCheckpoint(shards).read("c"), torch.ones(2, 2, dtype=torch.bfloat16))


def test_a_byte_order_mark_before_an_index_is_left_out(shards):
    index = shards / "model.safetensors.index.json"
    index.write_bytes(b"\xef\xbb\xbf" + index.read_bytes())
    assert torch.equal(SafetensorsCheckpoint(shards).read("a"), torch.arange(4.0))


def test_an_index_that_is_a_git_lfs_pointer_is_named_as_such(shards):
    (shards / "model.safetensors.index.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    assert "index.json: is not JSON" in refusal(shards)
    assert "it is a Git LFS pointer: run `git lfs pull`" in refusal(shards)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": null}'])
def test_an_index_without_weight_map_is_refused(shards, content):
    (shards / "model.safetensors.index.json").write_text(content)
    assert "no weight_map" in refusal(shards)


@pytest.mark.parametrize("content", ["", "[]", "not json", '{"weight_map": {"a": "x", "a": "y"}}', '{"a": NaN}'])
def test_an_index_that_is_no_object_of_unique_keys_is_refused(shards, content):
    (shards / "model.safetensors.index.json").write_text(content)
    assert "index.json" in refusal(shards)


def test_an_index_of_absurd_size_is_refused(shards):
    with (shards / "model.safetensors.index.json").open("r+b") as stream:
        stream.truncate(100_000_001)
    assert "more than any index" in refusal(shards)


def fault(folder, name):
    """Return the message for a model that needs a tensor; another tensor is read as if nothing were wrong."""
    checkpoint = SafetensorsCheckpoint(folder)
    assert set(checkpoint.faults) == {name}
    for read in (checkpoint.read, lambda name: checkpoint.check_needed([name])):
        with pytest.raises(CheckpointError) as caught:
            read(name)
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError):
        load_tensors(folder)  # which reads all
    other = "c" if name != "c" else "a"
    assert checkpoint.read(other).numel() in (1, 4)
    return str(caught.value)


def test_a_tensor_the_shards_lack_is_refused_if_it_is_needed(shards):
    write_index(shards, {"a": ONE, "b": ONE, "c": TWO, "d": TWO})
    assert f"maps tensor 'd' to {TWO}, which does not hold it" in fault(shards, "d")


def test_a_tensor_the_index_lacks_is_refused_if_it_is_needed(shards):
    write_index(shards, {"a": ONE, "c": TWO})
    assert f"{ONE} holds tensor 'b', which the index does not name" in fault(shards, "b")


def test_a_tensor_in_another_shard_is_refused_if_it_is_needed(shards):
    write_index(shards, {"a": ONE, "b": TWO, "c": TWO})
    assert f"maps tensor 'b' to {TWO}, but {ONE} holds it" in fault(shards, "b")


def test_a_tensor_in_two_shards_is_refused_if_it_is_needed(shards):
    save_file({"a": torch.zeros(1), "c": torch.zeros(1)}, shards / TWO)
    assert "tensor 'a' is in" in fault(shards, "a")


def test_a_view_of_several_tensors_has_the_faults_of_each(tmp_path):
    experts = {f"model.layers.0.mlp.experts.{index}.up_proj.weight": torch.zeros(2, 4) for index in range(2)}
    save_file(experts, tmp_path / ONE)
    write_index(tmp_path, dict.fromkeys(sorted(experts)[:1], ONE))
    stacked = with_stacked_experts(SafetensorsCheckpoint(tmp_path))
    with pytest.raises(CheckpointError, match="which the index does not name"):
        stacked.check_needed(["model.layers.0.mlp.experts.up_proj.weight"])
    pair = {"x_blocks": torch.zeros(1, 1, 16, dtype=torch.uint8), "x_scales": torch.zeros(1, 1, dtype=torch.uint8)}
    save_file(pair, tmp_path / ONE)
    write_index(tmp_path, {"x_blocks": ONE})
    with pytest.raises(CheckpointError, match="tensor 'x_scales', which the index does not name"):
        Mxfp4Checkpoint(tmp_path).read("x_blocks")
    ternary = {"model.layers.0.a_proj.weight": torch.zeros(32, 128, dtype=torch.uint8)}
    scale = {"model.layers.0.a_proj.weight_scale": torch.ones(1)}
    save_file(ternary | scale, tmp_path / ONE)
    write_index(tmp_path, dict.fromkeys(ternary, ONE))
    with pytest.raises(CheckpointError, match="weight_scale', which the index does not name"):
        TernaryCheckpoint(SafetensorsCheckpoint(tmp_path), "divided").check_needed(ternary)


def test_a_missing_shard_is_named_with_what_to_do(shards):
    (shards / TWO).unlink()
    message = refusal(shards, CheckpointNotFoundError)
    assert f"{TWO}: shard is missing (1 of 2 are)" in message
    assert "fetch" in message


def test_a_link_to_nothing_is_a_missing_shard(shards):
    (shards / TWO).unlink()
    (shards / TWO).symlink_to(shards / "gone")
    refusal(shards, CheckpointNotFoundError)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/passwd", "sub/../../x", "..", "..\\x", "C:\\x", "C:x", "//host/x", "a/.."]
)
def test_a_shard_outside_the_folder_is_refused_even_if_it_is_there(shards, shard):
    save_file({"c": torch.zeros(1)}, shards.parent / "x.safetensors")
    write_index(shards, {"a": ONE, "b": ONE, "c": shard})
    assert "outside the checkpoint's folder" in refusal(shards)


@pytest.mark.parametrize("shard", ["", None, 3, ["x"], "a\0b", "a\nb", "\ud800"])
def test_a_shard_name_that_is_none_is_refused(shards, shard):
    write_index(shards, {"a": ONE, "b": ONE, "c": shard})
    assert "is no file name" in refusal(shards)


@pytest.mark.parametrize("shard", [".", "sub", "x" * 5000])
def test_a_shard_that_is_no_file_is_refused(shards, shard):
    (shards / "sub").mkdir()
    write_index(shards, {"a": ONE, "b": ONE, "c": shard})
    refusal(shards)


def test_a_damaged_shard_is_named(shards):
    content = (shards / TWO).read_bytes()
    (shards / TWO).write_bytes(content[:-1])
    assert f"{TWO}: Error while deserializing header: incomplete metadata" in refusal(shards)


def test_an_index_cut_anywhere_is_refused(shards):
    index = shards / "model.safetensors.index.json"
    content = index.read_bytes()
    for place in range(20):
        index.write_bytes(content[: len(content) * place // 20])
        refusal(shards)
    assert json.loads(content)["weight_map"]
