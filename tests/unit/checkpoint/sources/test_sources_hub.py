"""Hugging Face repositories, through the real huggingface_hub against a Hub on localhost."""

import hashlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fake_hub import COMMIT, hub_of

from graphcore.checkpoint.sources import known_hash, resolve_source
from graphcore.checkpoint.sources.hub import shards_of
from graphcore.errors import CheckpointError, CheckpointNotFoundError, ConfigError

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
def hub(monkeypatch):
    refusals = {"org/gated": (403, "GatedRepo"), "org/broken": (400, "Other")}
    with hub_of(monkeypatch, {"org/model": MODEL, "org/gguf": GGUF, **refusals}) as fake:
        yield fake


def test_a_model_folder_has_what_is_needed_and_nothing_else(hub, tmp_path, capfd):
    seen = []
    folder = resolve_source("hf:org/model", tmp_path, None, lambda *event: seen.append(event))
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == WANTED
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"second" * 1000
    assert tmp_path / "hf" in folder.parents
    assert sorted(hub.downloaded) == sorted(WANTED)
    total = sum(len(MODEL[name]) for name in WANTED)
    assert [event for event in seen if event[0] == "download"][-1] == ("download", None, total, total)
    assert capfd.readouterr() == ("", "")


def test_a_named_file_comes_alone(hub, tmp_path):
    path = resolve_source("hf:org/gguf/m.Q4_K_M.gguf", tmp_path)
    assert path.name == "m.Q4_K_M.gguf"
    assert path.read_bytes() == GGUF["m.Q4_K_M.gguf"]
    assert hub.downloaded == ["m.Q4_K_M.gguf"]
    assert resolve_source("hf:org/gguf@main/odd[1].gguf", tmp_path).read_bytes() == b"GGUF3"


def test_a_sharded_gguf_comes_with_all_its_shards(hub, tmp_path):
    path = resolve_source("hf:org/gguf/big/m-00001-of-00002.gguf", tmp_path)
    assert path.read_bytes() == b"GGUF1"
    assert path.with_name("m-00002-of-00002.gguf").read_bytes() == b"GGUF2"
    assert shards_of("a-00002-of-00003.gguf") == [f"a-0000{index}-of-00003.gguf" for index in (1, 2, 3)]


def test_sha256_of_a_named_file_is_checked_and_of_a_folder_refused(hub, tmp_path):
    right = hashlib.sha256(GGUF["m.Q4_K_M.gguf"]).hexdigest()
    resolve_source("hf:org/gguf/m.Q4_K_M.gguf", tmp_path, right)
    with pytest.raises(CheckpointError, match=f"sha256 is {right}"):
        resolve_source("hf:org/gguf/m.Q4_K_M.gguf", tmp_path, 64 * "0")
    with pytest.raises(ConfigError, match="is a folder"):
        resolve_source("hf:org/model", tmp_path, right)


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
        ("hf:org/gguf/nope.gguf", r"org/gguf has no file 'nope\.gguf'"),
        ("hf:org/gguf", r"has no config\.json; if it holds GGUF files, name one: hf:org/gguf/model\.gguf"),
        ("hf:org/broken", "org/broken cannot be"),
        ("hf:org/na..me", "org/na..me cannot be fetched"),
    ],
)
def test_what_cannot_be_fetched_is_one_line_that_says_what_to_do(hub, tmp_path, text, says):
    with pytest.raises(CheckpointNotFoundError, match=says) as caught:
        resolve_source(text, tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


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
        import graphcore.checkpoint.sources
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
