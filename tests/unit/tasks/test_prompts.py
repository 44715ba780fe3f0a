"""Prompts are read, and refused, before anything is loaded."""

import io
from pathlib import Path

import pytest

from graphcore.config.compose import compose_settings
from graphcore.config.settings import Settings
from graphcore.errors import ConfigError
from graphcore.tasks.prompts import Prompt, read_prompts


def settings(**values: object) -> Settings:
    composed = compose_settings([])
    vars(composed).update(values)
    return composed


def test_a_prompt_may_be_text_ids_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("from a file\n", encoding="utf-8")
    assert read_prompts(settings()) == []
    assert read_prompts(settings(prompt="héllo")) == [Prompt("héllo", "prompt")]
    assert read_prompts(settings(prompt_ids=[3, 1])) == [Prompt((3, 1), "prompt_ids")]
    assert read_prompts(settings(prompt_file=str(tmp_path / "prompt.txt"))) == [Prompt("from a file\n", "prompt_file")]


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines"))
    assert read_prompts(settings(prompt="-"))[0].content == "two\nlines"
    with pytest.raises(ConfigError, match="standard input\\) is empty"):
        read_prompts(settings(prompt="-"))


def test_files_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"prompt_file=.*cannot be read \(No such file"):
        read_prompts(settings(prompt_file=str(tmp_path / "nope")))
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_prompts(settings(prompt_file=str(tmp_path / "latin1")))
