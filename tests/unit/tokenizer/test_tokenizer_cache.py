"""Rebuilt tokenizers are kept, found again, and never trusted blindly."""

import contextlib
import hashlib
from pathlib import Path

import pytest
from support.golden_vocab import golden_tokenizer, golden_vocab

import graphcore.tokenizer.gguf_tokenizer as gguf_tokenizer
from graphcore.errors import TokenizerError
from graphcore.tokenizer.tokenizer import Tokenizer
from graphcore.tokenizer.tokenizer_json import parse_tokenizer_json, read_tokenizer_json

TEXT = "Hello world, 123 \u00e9\u00e9 <|im_end|>"


def load(name: str, cache_dir: Path, **keys: object) -> Tokenizer:
    changes = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return Tokenizer.from_gguf({**golden_vocab(name).metadata, **changes}, name, cache_dir)


def kept(cache_dir: Path) -> list[Path]:
    """Return the kept tokenizers, after looking that each has its hash beside it and nothing else is there."""
    found = sorted((cache_dir / "tokenizers").glob("*.json"))
    hashes = [path.with_suffix(".sha256") for path in found]
    assert sorted((cache_dir / "tokenizers").iterdir()) == sorted([*found, *hashes])
    return found


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "gemma3", "llama-spm"])
def test_the_second_start_reads_what_the_first_built(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, golden = load(name, tmp_path), golden_tokenizer(name)
    assert len(kept(tmp_path)) == 1

    def fail(vocab: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(gguf_tokenizer, "_build", fail)
    second = load(name, tmp_path)
    assert second.encode(TEXT) == first.encode(TEXT) == golden.encode(TEXT)
    assert second.decode(second.encode(TEXT)) == first.decode(first.encode(TEXT))
    assert (second.eos_token_ids, second.bos_token_id) == (first.eos_token_ids, first.bos_token_id)
    assert second.special_ids == first.special_ids


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"version": "1.0"}'])
def test_a_damaged_file_is_built_again(damage: bytes, tmp_path: Path) -> None:
    load("gpt-2", tmp_path)
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage)
    assert load("gpt-2", tmp_path).encode(TEXT) == golden_tokenizer("gpt-2").encode(TEXT)
    assert kept(tmp_path) == [path]
    assert path.read_bytes() == whole


def test_a_file_that_lost_one_bit_is_built_again(tmp_path: Path) -> None:
    load("gpt-2", tmp_path)
    (path,) = kept(tmp_path)
    whole, right = path.read_bytes(), golden_tokenizer("gpt-2").encode(TEXT)
    path.write_bytes(with_one_bit_lost(whole, path))
    assert load("gpt-2", tmp_path).encode(TEXT) == right
    assert path.read_bytes() == whole


def with_one_bit_lost(whole: bytes, path: Path) -> bytes:
    """Return the file with the first bit of its merges flipped that leaves a tokenizer, but one of other tokens."""
    right = parse_tokenizer_json(whole, str(path)).encode(TEXT).ids
    for at in range(whole.index(b'"merges"') + 10, len(whole)):
        damaged = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        with contextlib.suppress(TokenizerError):
            if parse_tokenizer_json(damaged, str(path)).encode(TEXT).ids != right:
                return damaged
    raise AssertionError("no bit does")


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe no digest", b"0" * 64, None])
def test_a_damaged_digest_has_the_tokenizer_built_again(damage: bytes | None, tmp_path: Path) -> None:
    load("gpt-2", tmp_path)
    (path,) = kept(tmp_path)
    digest = path.with_suffix(".sha256")
    right = digest.read_bytes()
    assert right == hashlib.sha256(path.read_bytes()).hexdigest().encode()
    digest.unlink() if damage is None else digest.write_bytes(damage)
    assert load("gpt-2", tmp_path).encode(TEXT) == golden_tokenizer("gpt-2").encode(TEXT)
    assert digest.read_bytes() == right


def test_a_file_cut_short_is_built_again(tmp_path: Path) -> None:
    load("gpt-2", tmp_path)
    (path,) = kept(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    assert load("gpt-2", tmp_path).encode(TEXT) == golden_tokenizer("gpt-2").encode(TEXT)


def test_another_vocabulary_has_another_file(tmp_path: Path) -> None:
    load("gpt-2", tmp_path)
    load("gpt-2", tmp_path, add_bos_token=True)
    load("gpt-2", tmp_path, pre="smollm")
    load("gpt-2", tmp_path, eos_token_id=3)
    types = golden_vocab("gpt-2").metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, tuple)
    load("gpt-2", tmp_path, token_type=(4, *types[1:]))
    assert len(kept(tmp_path)) == 5


def test_a_file_of_another_vocabulary_is_built_again(tmp_path: Path) -> None:
    load("gpt-2", tmp_path)
    (path,) = kept(tmp_path)
    golden_tokenizer("smollm")._backend.save(str(path))
    assert load("gpt-2", tmp_path).encode(TEXT) == golden_tokenizer("gpt-2").encode(TEXT)


def test_a_folder_that_cannot_be_written_costs_only_the_keeping(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizers").write_text("a file where a folder should be")
    assert load("gpt-2", tmp_path).encode(TEXT) == golden_tokenizer("gpt-2").encode(TEXT)
    assert "cannot be kept (File exists)" in caplog.text


def test_a_folder_in_the_place_of_a_kept_tokenizer_is_no_hindrance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load("gpt-2", tmp_path)
    (path,) = kept(tmp_path)
    path.unlink()
    (path / "in the way").mkdir(parents=True)
    assert load("gpt-2", tmp_path).encode(TEXT) == golden_tokenizer("gpt-2").encode(TEXT)
    assert kept(tmp_path) == [path]
    assert path.is_file()
    assert not caplog.text


def test_a_broken_tokenizer_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": 3}')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a readable tokenizer\.json") as caught:
        read_tokenizer_json(path)
    assert "\n" not in str(caught.value)
