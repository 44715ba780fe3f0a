"""Prompts are read, and refused, before anything is loaded."""

import io
import os
import re
from pathlib import Path

import pytest

from graphcore.config.compose import compose_settings
from graphcore.config.settings import Settings
from graphcore.errors import ConfigError
from graphcore.tasks.requests.prompts import Prompt, read_prompts


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
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines")))
    assert read_prompts(settings(prompt="-"))[0].content == "two\nlines"
    with pytest.raises(ConfigError, match="standard input\\) is empty"):
        read_prompts(settings(prompt="-"))


def test_files_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"prompt_file=.*cannot be read \(No such file"):
        read_prompts(settings(prompt_file=str(tmp_path / "nope")))
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_prompts(settings(prompt_file=str(tmp_path / "latin1")))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompt_file": "/dev/zero"}, "prompt_file=/dev/zero holds more than 1.00 KiB"),
        ({"prompt_file": "~nosuchuser/x"}, "prompt_file=~nosuchuser/x: no home folder is known for ~nosuchuser"),
        ({"prompt_file": "x" * 300}, "is no path that a file can have (File name too long)"),
        ({"prompt_file": "a\0b"}, "is no path that a file can have"),
        ({"prompt_file": " "}, "prompt_file=  is empty"),
    ],
)
def test_what_can_be_no_prompt_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], said: str
) -> None:
    monkeypatch.setattr("graphcore.tasks.requests.prompts.LONGEST_PROMPT", 1024)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_prompts(settings(**values))


def test_standard_input_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphcore.tasks.requests.prompts.LONGEST_PROMPT", 1024)
    with Path("/dev/zero").open() as endless:
        monkeypatch.setattr("sys.stdin", endless)
        with pytest.raises(ConfigError, match=r"prompt=- \(standard input\) holds more than 1.00 KiB"):
            read_prompts(settings(prompt="-"))


def test_a_pipe_is_a_file_and_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"through a pipe")
    os.close(writing)
    assert read_prompts(settings(prompt_file=f"/dev/fd/{reading}"))[0].content == "through a pipe"
    os.close(reading)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"typed")))
    assert read_prompts(settings(prompt_file="-"))[0].content == "typed"
