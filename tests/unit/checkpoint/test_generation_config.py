"""generation_config.json: what can be understood is read, and nothing in it keeps a model from running."""

import json
import os
from pathlib import Path

import pytest

from graphcore.checkpoint.generation_config import FILE_NAME, read_generation_config

PLAIN = {"eos_token_id": [2, 3], "temperature": 0.6, "text": "a, ] // b,}"}


@pytest.mark.parametrize(
    ("raw", "noted"),
    [
        (json.dumps(PLAIN).encode(), False),
        (json.dumps(PLAIN).encode("utf-8-sig"), False),
        (json.dumps(PLAIN).encode("utf-16"), False),  # as PowerShell's > writes it
        (json.dumps(PLAIN).encode()[:-1] + b" ,\n}\n", False),
        (json.dumps(PLAIN).replace("[2, 3]", "[2, 3,]").encode(), False),
        (json.dumps(PLAIN).encode()[:-1] + b" // the end\n}", False),
        (json.dumps(PLAIN).encode()[:-1] + b', "top_p": NaN, "min_p": -Infinity}', True),
        (b'{"eos_token_id": 9, ' + json.dumps(PLAIN).encode()[1:], False),  # the last counts, as in transformers
        (json.dumps({**PLAIN, "x": 10**300, "y": {"z": [None] * 3}}).encode(), False),
    ],
    ids=lambda value: str(value)[:60],
)
def test_settings_that_can_be_understood_are_read(tmp_path: Path, raw: bytes, noted: bool) -> None:
    (tmp_path / FILE_NAME).write_bytes(raw)
    found = read_generation_config(tmp_path)
    assert found.settings.items() >= PLAIN.items()
    assert found.settings.keys() & {"top_p", "min_p"} == set()
    expected = f"{tmp_path / FILE_NAME}: ignored settings that are no numbers: NaN, -Infinity"
    assert found.notes == ((expected,) if noted else ())


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"null", "holds None, not an object"),
        (b"[1, 2]", "holds [1, 2], not an object"),
        (b'"text"', "holds 'text', not an object"),
        (b"{", "is not JSON"),
        (b'{"eos_token_id": 2', "is not JSON"),
        (b"eos_token_id: 2", "is not JSON"),
        (b"\xff\xfe\xff", "is not JSON"),
        (b"\x80\x81", "is not JSON"),
        (b"[" * 100_000, "is nested too deep"),
        (b'{"x": ' + b"9" * 5000 + b"}", "is not JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_file_that_cannot_be_understood_is_ignored_with_one_line(tmp_path: Path, raw: bytes, reason: str) -> None:
    (tmp_path / FILE_NAME).write_bytes(raw)
    found = read_generation_config(tmp_path)
    (note,) = found.notes
    assert found.settings == {}
    assert note.startswith(f"{tmp_path / FILE_NAME}: {reason}")
    assert note.endswith("; it is ignored")
    assert "\n" not in note
    assert len(note) < len(str(tmp_path)) + 250


def test_a_folder_without_the_file_has_no_settings_and_no_note(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path).settings == {}
    assert read_generation_config(tmp_path).notes == ()


def test_a_file_that_cannot_be_opened_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / FILE_NAME
    file.symlink_to(file)
    assert read_generation_config(tmp_path).notes == (
        f"{file}: cannot be read (Too many levels of symbolic links); it is ignored",
    )


def test_what_is_no_regular_file_is_ignored_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    assert read_generation_config(tmp_path).notes == (f"{tmp_path / FILE_NAME}: is not a regular file; it is ignored",)
