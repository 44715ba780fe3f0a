"""Hugging Face repositories, through the real huggingface_hub against a Hub on localhost."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.fake_sources import COMMIT, hub_of, share_weights

from graphcore.checkpoint.sources import known_hash
from graphcore.checkpoint.sources.fetch import resolve_source
from graphcore.errors import CheckpointError, CheckpointNotFoundError

MODEL = {  # no two alike: the library would fetch only one of them
    "README.md": b"no",
    "config.json": b'{"file": 0}',
    "generation_config.json": b'{"file": 1}',
    "model-00001-of-00002.safetensors": b"first" * 1000,
    "model-00002-of-00002.safetensors": b"second" * 1000,
    "model.safetensors.index.json": b'{"file": 2}',
    "tokenizer.json": b'{"file": 3}',
    "chat_template.jinja": b"{{ x }}",
    "merges.txt": b"a b",
    "pytorch_model.bin": b"no",
    "consolidated.safetensors": b"no",
    "original/model.safetensors": b"no",
}
WANTED = set(MODEL) - {"README.md", "pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors"}
GGUF = {
    "m.Q4_K_M.gguf": b"GGUF" * 100,
    "m.Q8_0.gguf": b"no",
    "big/m-00001-of-00002.gguf": b"GGUF1",
    "big/m-00002-of-00002.gguf": b"GGUF2",
    "odd[1].gguf": b"GGUF3",
}


@pytest.fixture
def hub_cache(tmp_path):
    return tmp_path / "a home" / "hub"


@pytest.fixture
def hub(monkeypatch, hub_cache):
    refusals = {"org/gated": (403, "GatedRepo"), "org/broken": (400, "Other")}
    with hub_of(monkeypatch, {"org/model": MODEL, "org/gguf": GGUF, **refusals}, hub_cache) as fake:
        yield fake


def test_a_model_folder_has_what_is_needed_and_nothing_else(hub, hub_cache, tmp_path, capfd):
    seen = []
    folder = resolve_source("hf:org/model", tmp_path, None, lambda *event: seen.append(event))
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == WANTED
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"second" * 1000
    assert hub_cache in folder.parents
    assert [path.name for path in tmp_path.iterdir()] == ["a home", "hashes"]
    assert sorted(hub.downloaded) == sorted(WANTED)
    total = sum(len(MODEL[name]) for name in WANTED)
    assert [event for event in seen if event[0] == "download"][-1] == ("download", None, total, total)
    assert capfd.readouterr() == ("", "")


def test_an_interrupted_download_is_completed_by_the_next_runs_two_at_once(hub, tmp_path):
    def interrupt(stage, group, done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_source("hf:org/model", tmp_path, None, interrupt)
    hub.downloaded.clear()
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(resolve_source, 2 * ["hf:org/model"], 2 * [tmp_path]))
    assert {path.relative_to(folders[0]).as_posix() for path in folders[0].rglob("*")} == WANTED
    assert all((folders[1] / name).read_bytes() == MODEL[name] for name in WANTED)
    assert len(hub.downloaded) == len(set(hub.downloaded))


def test_a_named_file_comes_alone(hub, tmp_path):
    path = resolve_source("hf:org/gguf/m.Q4_K_M.gguf", tmp_path)
    assert path.name == "m.Q4_K_M.gguf"
    assert path.read_bytes() == GGUF["m.Q4_K_M.gguf"]
    assert hub.downloaded == ["m.Q4_K_M.gguf"]
    assert resolve_source("hf:org/gguf@main/odd[1].gguf", tmp_path).read_bytes() == b"GGUF3"


def test_a_name_without_an_organisation_is_fetched_and_cached_as_the_library_does(monkeypatch, hub_cache, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    with hub_of(monkeypatch, {"gpt2x": MODEL}, hub_cache):
        folder = resolve_source("hf:gpt2x", tmp_path)
        assert str(folder) == huggingface_hub.snapshot_download("gpt2x", allow_patterns=["config.json"])
    assert folder.parent.parent.name == "models--gpt2x"
    assert resolve_source("hf:gpt2x", tmp_path) == folder  # without the Hub


def test_a_sharded_gguf_comes_with_all_its_shards(hub, tmp_path):
    path = resolve_source("hf:org/gguf/big/m-00001-of-00002.gguf", tmp_path)
    assert path.read_bytes() == b"GGUF1"
    assert path.with_name("m-00002-of-00002.gguf").read_bytes() == b"GGUF2"


def test_sha256_of_a_named_file_is_checked(hub, tmp_path):
    right = hashlib.sha256(GGUF["m.Q4_K_M.gguf"]).hexdigest()
    resolve_source("hf:org/gguf/m.Q4_K_M.gguf", tmp_path, right)
    with pytest.raises(CheckpointError, match=f"sha256 is {right}"):
        resolve_source("hf:org/gguf/m.Q4_K_M.gguf", tmp_path, 64 * "0")


@pytest.mark.parametrize("text", ["hf:org/model", "hf:org/gguf/m.Q4_K_M.gguf", f"hf:org/model@{COMMIT}"])
def test_what_is_cached_needs_no_network(hub, tmp_path, text):
    path = resolve_source(text, tmp_path)
    downloaded = list(hub.downloaded)
    hub.close()
    assert resolve_source(text, tmp_path) == path
    assert hub.downloaded == downloaded


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hf:org/nope", "org/nope is not there, or is private; check the name, or set HF_TOKEN"),
        ("hf:org/gated", "org/gated is gated; accept its terms on https://huggingface.co/org/gated, then set HF_TOKEN"),
        ("hf:org/model@v9", "org/model has no revision 'v9'"),
        ("hf:org/gguf/nope.gguf", r"org/gguf has no file 'nope\.gguf'; its GGUF models are big/m-00001-of-00002.gguf"),
        (
            "hf:org/gguf:Q5_K_M",
            r"org/gguf has no GGUF model of 'Q5_K_M'; it has big/.*, m\.Q4_K_M\.gguf, m\.Q8_0\.gguf",
        ),
        ("hf:org/model:Q8_0", "org/model has no GGUF file; leave :Q8_0 out"),
        ("hf:org/model/nope", "org/model has no folder 'nope'; it has original"),
        ("hf:org/broken", "org/broken cannot be"),
        ("hf:org/na..me", "org/na..me cannot be fetched"),
    ],
)
def test_what_cannot_be_fetched_is_one_line_that_says_what_to_do(hub, tmp_path, text, says):
    with pytest.raises(CheckpointNotFoundError, match=says) as caught:
        resolve_source(text, tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_small_files_that_a_cache_lacks_are_fetched_beside_the_weights_that_it_has(hub, tmp_path):
    from huggingface_hub import hf_hub_download

    stored = {name for name in WANTED if name.endswith((".safetensors", "index.json"))} | {"config.json"}
    for name in stored:
        hf_hub_download("org/model", name)
    hub.downloaded.clear()
    folder = resolve_source("hf:org/model", tmp_path)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == WANTED
    assert set(hub.downloaded) == WANTED - stored


def test_what_another_program_has_downloaded_is_used_and_nothing_is_written_or_fetched(hub, hub_cache, tmp_path):
    from huggingface_hub import hf_hub_download

    for name in ("config.json", "model.safetensors.index.json", *(one for one in MODEL if one.startswith("model-"))):
        hf_hub_download("org/model", name)  # as transformers does, file by file
    before = tree_of(hub_cache)
    hub.close()
    folder = resolve_source("hf:org/model", tmp_path / "own")
    assert folder.parent.parent == hub_cache / "models--org--model"
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == MODEL["model-00001-of-00002.safetensors"]
    assert tree_of(hub_cache) == before


def tree_of(folder):
    return sorted((str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*"))


def test_a_model_that_lacks_a_shard_in_the_cache_is_not_whole(hub, hub_cache, tmp_path):
    folder = resolve_source("hf:org/model", tmp_path)
    (folder / "model-00002-of-00002.safetensors").unlink()
    hub.close()
    with pytest.raises(CheckpointNotFoundError, match="cannot be reached, and the cache does not hold it whole"):
        resolve_source("hf:org/model", tmp_path)


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_read_only_cache_serves_what_it_holds(hub, hub_cache, tmp_path, monkeypatch, is_moved):
    folder = resolve_source("hf:org/model", tmp_path)
    (folder / "merges.txt").unlink()
    if is_moved:
        hub.commits["main"] = "f" * 40  # the Hub has a newer commit

    def download(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(hub_cache))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_source("hf:org/model", tmp_path) == folder
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"Read-only file system; check HF_HUB_CACHE and its permissions"):
        resolve_source("hf:org/model", tmp_path)


def test_weights_in_the_library_s_store_for_all_repositories_are_checked_by_their_sha256(hub, hub_cache, tmp_path):
    stored = share_weights(hub_cache, "models--org--shared", b"weights")
    assert (resolve_source("hf:org/shared", tmp_path) / "model.safetensors").read_bytes() == b"weights"
    stored.resolve().write_bytes(b"?eights")
    with pytest.raises(CheckpointError, match="is not what the Hub has"):
        resolve_source("hf:org/shared", tmp_path)


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"])
def test_the_library_s_variables_say_where_its_cache_is(tmp_path, variable):
    home = tmp_path / "my models"
    cache = home / "hub" if variable == "HF_HOME" else home
    share_weights(cache, "models--org--shared", b"weights")
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_CACHE"}
    code = (
        "import pathlib, sys; from graphcore.checkpoint.sources.fetch import resolve_source\n"
        "print(resolve_source(sys.argv[1], pathlib.Path(sys.argv[2])))"
    )
    said = subprocess.check_output(
        [sys.executable, "-c", code, "hf:org/shared", str(tmp_path / "own")],
        env={**environment, variable: str(home), "HF_HUB_OFFLINE": "1"},
        text=True,
    )
    assert said.strip() == str(cache / "models--org--shared" / "snapshots" / COMMIT)


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("hf:org/gguf:q8_0", "m.Q8_0.gguf"),
        ("hf:org/gguf@main:big", "big/m-00001-of-00002.gguf"),
    ],
)
def test_a_quant_or_a_folder_names_a_gguf_model(hub, tmp_path, text, file):
    path = resolve_source(text, tmp_path)
    assert path.as_posix().endswith(f"{COMMIT}/{file}")
    assert path.read_bytes() == GGUF[file]
    assert set(hub.downloaded) == ({name for name in GGUF if name.startswith("big/")} if "big" in file else {file})
    hub.close()
    assert resolve_source(text, tmp_path) == path


def test_a_folder_of_a_repository_is_a_model_of_its_own(hub, tmp_path):
    hub.repositories["org/many"] = {f"small/{name}": content for name, content in MODEL.items()} | {"README.md": b"no"}
    folder = resolve_source("hf:org/many/small", tmp_path)
    assert folder.name == "small"
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == WANTED


def test_a_hub_out_of_reach_is_one_line_that_says_what_to_do(hub, tmp_path):
    hub.close()
    with pytest.raises(CheckpointNotFoundError, match=r"org/model cannot be reached.*check the network"):
        resolve_source("hf:org/model", tmp_path)


def test_the_token_of_the_environment_is_sent(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    resolve_source("hf:org/model", tmp_path)
    assert hub.tokens == {"Bearer hf_secret"}


def test_importing_the_sources_does_not_import_the_library():
    script = textwrap.dedent(
        """
        import json, sys
        import graphcore.checkpoint.sources.fetch
        print(json.dumps([name for name in ("huggingface_hub", "torch", "transformers") if name in sys.modules]))
        """
    )
    assert json.loads(subprocess.check_output([sys.executable, "-c", script])) == []


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("hf:org/model", "model-00002-of-00002.safetensors"),
        ("hf:org/gguf/m.Q4_K_M.gguf", "m.Q4_K_M.gguf"),
        ("hf:org/gguf/big/m-00001-of-00002.gguf", "big/m-00002-of-00002.gguf"),
    ],
)
def test_a_download_that_is_not_what_the_hub_has_is_refused(hub, tmp_path, source, file):
    hub.damaged.add(file)
    with pytest.raises(CheckpointError, match=r"is not what the Hub has \(its sha256 differs\); delete it") as refused:
        resolve_source(source, tmp_path)
    blob = Path(str(refused.value).partition(": ")[0])
    blob.unlink()
    hub.damaged.clear()
    assert resolve_source(source, tmp_path).exists()


def test_a_download_is_hashed_once(hub, tmp_path, monkeypatch):
    hashed = []
    read = known_hash.file_sha256
    monkeypatch.setattr(known_hash, "file_sha256", lambda path: hashed.append(path) or read(path))
    seen = []
    for _ in range(3):
        folder = resolve_source("hf:org/model", tmp_path, None, lambda *event: seen.append(event))
    shards = sorted(folder.glob("*.safetensors"))
    assert sorted(hashed) == sorted(shard.resolve() for shard in shards)
    assert [event for event in seen if event[0] == "check"] == [("check", None, 0, 2), ("check", None, 1, 2)]
    blob = shards[0].resolve()
    blob.write_bytes(b"!" + blob.read_bytes()[1:])
    with pytest.raises(CheckpointError, match="is not what the Hub has"):
        resolve_source("hf:org/model", tmp_path)
