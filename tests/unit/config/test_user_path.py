"""Paths that people write: home folders, and what no file or folder can be called."""

import re
from pathlib import Path

import pytest

from graphcore.config.compose import compose_settings
from graphcore.config.user_path import user_folder, user_path
from graphcore.errors import ConfigError


def test_home_folders_are_expanded_and_what_is_not_there_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/nothing/here.txt", "prompt_file=") == tmp_path / "nothing" / "here.txt"
    assert user_folder("~/cache", "cache_dir=") == tmp_path / "cache"
    assert compose_settings(["cache_dir='~/cache'"]).cache_folder == tmp_path / "cache"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "/save  is empty; name a path"),
        ("-", "/save - cannot be standard input or output here; a file of that name is ./-"),
        ("~nosuchuser/x", "/save ~nosuchuser/x: no home folder is known for ~nosuchuser; write the whole path"),
        ("x" * 300, "is no path that a file can have (File name too long); choose another"),
        ("a\0b", "is no path that a file can have (embedded null byte); choose another"),
    ],
)
def test_what_can_be_no_file_is_said(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        user_path(text, "/save ")


@pytest.mark.parametrize("below", ["", "/below", "/far/below"])
def test_a_file_is_no_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    written = f"{tmp_path}/file{below}"
    said = f"cache_dir={written} cannot be a folder, for {tmp_path}/file is a file; choose another"
    with pytest.raises(ConfigError, match=re.escape(said)):
        user_folder(written, "cache_dir=")


@pytest.mark.parametrize("text", ["''", "'~nosuchuser/x'", "/etc/passwd"])
def test_a_cache_folder_that_can_be_none_is_refused_with_the_settings(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^cache_dir="):
        compose_settings([f"cache_dir={text}"])
