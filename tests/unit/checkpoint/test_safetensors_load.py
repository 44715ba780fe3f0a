"""`load_tensors` and which file of a folder is taken: the items of the loader's specification, one test each."""

import pickle
import runpy
import shlex

import pytest
import torch
from safetensors.torch import save_file
from safetensors_bytes import write_index

from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint, load_tensors
from graphcore.errors import CheckpointError, CheckpointNotFoundError, ConfigError, UnsupportedError

STORED = {"embed.weight": torch.arange(12.0).reshape(3, 4), "norm.weight": torch.tensor([1.5, -2.0, 0.25])}
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def single(tmp_path):
    save_file(STORED, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    save_file({"embed.weight": STORED["embed.weight"]}, tmp_path / ONE)
    save_file({"norm.weight": STORED["norm.weight"]}, tmp_path / TWO)
    write_index(tmp_path, {"embed.weight": ONE, "norm.weight": TWO})
    return tmp_path


def assert_stored(loaded, dtype=torch.float32):
    assert loaded.keys() == STORED.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, STORED[name].to(dtype))


def test_a_single_file_loads_names_shapes_and_values(single):
    assert_stored(load_tensors(single))


def test_a_single_file_is_converted_and_keeps_its_values(single):
    assert_stored(load_tensors(single, dtype=torch.bfloat16), torch.bfloat16)  # every value is exact in bf16


def test_a_str_path_loads(single):
    assert_stored(load_tensors(str(single)))


def test_the_path_of_the_file_itself_loads(single):
    assert_stored(load_tensors(single / "model.safetensors"))
    assert_stored(load_tensors(str(single / "model.safetensors")))


def test_a_torch_device_is_taken(single):
    loaded = load_tensors(single, device=torch.device("cpu"))
    assert_stored(loaded)
    assert all(tensor.device == torch.device("cpu") for tensor in loaded.values())


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_the_device_reaches_every_tensor(single, device):
    loaded = load_tensors(single, device=device, dtype=torch.float16)
    assert {tensor.device.type for tensor in loaded.values()} == {"meta"}
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float16}


def test_shards_load_together(sharded):
    assert_stored(load_tensors(sharded))


def test_shards_are_converted_and_keep_their_values(sharded):
    assert_stored(load_tensors(str(sharded), dtype=torch.float16, device=torch.device("cpu")), torch.float16)


def test_a_single_file_takes_precedence_over_the_index_as_in_transformers(sharded):
    save_file({"other": torch.zeros(1)}, sharded / "model.safetensors")
    assert list(load_tensors(sharded)) == ["other"]


def test_a_tensor_missing_from_the_shards_is_a_value_error(sharded):
    write_index(sharded, {"embed.weight": ONE, "norm.weight": TWO, "lm_head.weight": TWO})
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load_tensors(sharded)


def test_a_tensor_missing_from_the_index_is_a_value_error(sharded):
    save_file({"norm.weight": torch.zeros(3), "extra": torch.zeros(1)}, sharded / TWO)
    with pytest.raises(ValueError, match="extra"):
        load_tensors(sharded)


def test_a_missing_shard_is_a_file_not_found_error_that_names_it(sharded):
    (sharded / TWO).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{TWO}: shard is missing .* fetch the checkpoint again"):
        load_tensors(sharded)


def test_mixed_dtypes_stay_as_they_are_without_dtype(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float16)}, tmp_path / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in load_tensors(tmp_path).items()} == {
        "a": torch.float32,
        "b": torch.float16,
    }


def test_mixed_dtypes_are_all_converted_with_dtype(tmp_path):
    stored = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float16), "c": torch.ones(2, dtype=torch.float64)}
    save_file(stored, tmp_path / "model.safetensors")
    for tensor in load_tensors(tmp_path, dtype=torch.bfloat16).values():
        assert torch.equal(tensor, torch.ones(2, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_counts_as_floating(tmp_path, dtype):
    values = torch.tensor([0.5, -2.0, 0.0])
    save_file({"w": values.to(dtype)}, tmp_path / "model.safetensors")
    assert load_tensors(tmp_path)["w"].dtype == dtype
    assert torch.equal(load_tensors(tmp_path, dtype=torch.float32)["w"], values)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.bool, torch.uint16])
def test_integers_are_never_converted(tmp_path, dtype):
    save_file({"blocks": torch.tensor([0, 1, 1]).to(dtype)}, tmp_path / "model.safetensors")
    loaded = load_tensors(tmp_path, dtype=torch.bfloat16)["blocks"]
    assert loaded.dtype == dtype
    assert loaded.tolist() == [0, 1, 1]


def test_a_dtype_that_is_not_floating_is_refused(single):
    with pytest.raises(ConfigError, match=r"torch\.int8"):
        load_tensors(single, dtype=torch.int8)


def test_one_safetensors_file_of_any_name_is_taken(tmp_path):
    save_file(STORED, tmp_path / "weights.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never looked at")
    assert_stored(load_tensors(tmp_path))


def test_several_files_without_an_index_are_listed(tmp_path):
    for name in ("a", "b"):
        save_file(STORED, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"2 safetensors files \(a\.safetensors, b\.safetensors\)"):
        load_tensors(tmp_path)


def test_one_shard_without_its_index_is_not_taken_for_the_model(tmp_path):
    save_file(STORED, tmp_path / ONE)
    with pytest.raises(CheckpointNotFoundError, match=r"index\.json: is missing, and .* one of 2 shards"):
        load_tensors(tmp_path)


def test_one_shard_of_one_is_the_model(tmp_path):
    save_file(STORED, tmp_path / "model-00001-of-00001.safetensors")
    assert_stored(load_tensors(tmp_path))


class Bomb:
    """Unpickling this raises."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_refused_with_the_way_to_convert_them(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UnsupportedError, match=r"never opened; convert .* once: python -c ") as caught:
            load_tensors(path)
        assert "safetensors" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_pickle_under_a_safetensors_name_is_still_refused(tmp_path):
    torch.save({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="pickle"):
        load_tensors(tmp_path)


def test_the_advice_for_a_pickled_file_works(tmp_path):
    torch.save(STORED | {"tied": STORED["norm.weight"]}, tmp_path / "model.pt")
    with pytest.raises(UnsupportedError) as caught:
        load_tensors(tmp_path / "model.pt")
    _, _, script = shlex.split(str(caught.value).split("convert it once: ")[1])
    (tmp_path / "advice.py").write_text(script)
    runpy.run_path(str(tmp_path / "advice.py"))
    loaded = load_tensors(tmp_path / "model.safetensors")
    assert torch.equal(loaded["tied"], STORED["norm.weight"])


def test_an_empty_folder_and_a_missing_path_are_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        load_tensors(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_tensors(tmp_path / "gone")


def test_a_gguf_file_is_sent_elsewhere(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(CheckpointError, match="is a GGUF file"):
        SafetensorsCheckpoint(tmp_path / "m.gguf")
