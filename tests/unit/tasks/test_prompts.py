"""Prompts are read, and refused, before anything is loaded."""

import io
import json
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


def test_a_jsonl_file_gives_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "line separator \u2028 inside"}, {"prompt_ids": [1, 2]}]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    read = read_prompts(settings(), str(path))
    assert [prompt.content for prompt in read] == ["line separator \u2028 inside", (1, 2)]
    assert read[1].where == f"{path}:3"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ('{"prompt": 3}', "expected"),
        ('{"prompt": "a", "more": 1}', "expected"),
        ('{"prompt_ids": [true]}', "expected"),
        ('{"prompt": ""}', "is empty"),
        ('{"prompt_ids": []}', "is empty"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + line, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as caught:
        read_prompts(settings(), str(path))
    assert f"{path}:2" in str(caught.value)


def test_files_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    (tmp_path / "blank").write_text("\n \n")
    with pytest.raises(ConfigError, match=r"prompt_file=.*cannot be read \(No such file"):
        read_prompts(settings(prompt_file=str(tmp_path / "nope")))
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_prompts(settings(prompt_file=str(tmp_path / "latin1")))
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(settings(), str(tmp_path / "blank"))
    with pytest.raises(ConfigError, match=r"task\.prompts_jsonl and prompt are both given"):
        read_prompts(settings(prompt="a"), "file.jsonl")
