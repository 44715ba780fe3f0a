"""A JSONL file of requests is checked whole, and what is wrong is named by file and line."""

import io
import json
from pathlib import Path

import pytest
from support.cases import in_case

from graphcore.errors import ConfigError
from graphcore.tasks.requests.request_lines import read_request_lines


def test_each_line_is_a_request_with_settings_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "hi", "name": "Ann"}]
    items = [
        {"prompt": "line separator \u2028 inside"},
        {"prompt_ids": [1, 2], "id": 7, "seed": 3, "temperature": 1, "max_new_tokens": 5},
        {"messages": chat, "id": "7", "stop": "x"},
        {"prompt": "a", "stop": ["x", "y"]},
    ]
    path.write_text("\ufeff" + "\n\n".join(json.dumps(item, ensure_ascii=False) for item in items), encoding="utf-8")
    first, second, third, fourth = read_request_lines(str(path))
    assert (first.content, second.content) == ("line separator \u2028 inside", (1, 2))
    assert list(third.content) == chat
    assert (second.where, second.number) == (f"{path}:3", 3)
    assert len({first.key, second.key, third.key}) == 3  # 7 and "7" are not the same id
    assert second.sampling == {"temperature": 1, "seed": 3}
    assert (first.max_new_tokens, second.max_new_tokens) == (None, 5)
    assert (first.stops, third.stops, fourth.stops) == (None, ["x"], ["x", "y"])
    assert third.fields == items[2]


def test_null_is_a_key_left_out_and_whole_floats_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    nothing = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens", "stop", "id"))
    items = [
        {"prompt": "a", "messages": None, **nothing},
        {"prompt": "a", "top_k": 5.0, "seed": -3.0, "max_new_tokens": -1.0},
    ]
    path.write_text("\n".join(map(json.dumps, items)))
    first, second = read_request_lines(str(path))
    assert first.key == 1
    assert (first.sampling, first.max_new_tokens, first.stops) == ({}, None, None)
    assert (second.sampling, second.max_new_tokens) == ({"top_k": 5, "seed": -3}, -1)


def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path) -> None:
    cases = [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('"prompt"', "expected an object"),
        ("{}", "found none of them"),
        ('{"prompt": "a", "prompt_ids": [1]}', "found prompt and prompt_ids"),
        ('{"prompt": null}', "found none of them"),
        ('{"prompt": 3}', "prompt must be a text"),
        ('{"prompt": "a", "temprature": 1}', r"unknown key 'temprature' \(did you mean 'temperature'\?\)"),
        ('{"prompt": "a", "system": "b"}', "unknown key 'system'"),
        ('{"prompt_ids": [true]}', "prompt_ids must be a list of whole numbers"),
        ('{"messages": [{"role": "user"}]}', "messages: message 0 has no 'content'"),
        (
            '{"messages": [{"role": "user", "content": 3}]}',
            "message 0: content must be a text or a list of",
        ),
        ('{"prompt": ""}', "is empty"),
        ('{"prompt_ids": []}', "is empty"),
        ('{"messages": []}', "is empty"),
        ('{"prompt": "a", "temperature": "1"}', "temperature='1' must be a number"),
        ('{"prompt": "a", "temperature": true}', "temperature=True must be a number"),
        ('{"prompt": "a", "temperature": NaN}', "NaN is no number"),
        ('{"prompt": "a", "top_k": 1.5}', "top_k=1.5 must be a whole number"),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens=0 must be at least 1"),
        ('{"prompt": "a", "max_new_tokens": -2}', "max_new_tokens=-2 must be at least 1"),
        ('{"prompt": "a", "id": [1]}', r"id must be a text or a whole number, found \[1\]"),
        ('{"prompt": "a", "stop": [""]}', "stop must be a text that is not empty"),
        ('{"prompt": "a", "id": "\\ud800"}', r"\\ud800 is half of a character"),
        ('{"prompt": "a", "prompt": "b"}', r'not JSON \(the key "prompt" is there twice\)'),
        ('{"messages": [{"role": "user", "role": "user", "content": "x"}]}', r'the key "role" is there twice'),
        ('{"prompt": "again", "id": "one"}', 'id "one" is that of line 1 already'),
    ]
    for line, said in cases:
        with in_case(line, said):
            path = tmp_path / "prompts.jsonl"
            path.write_text('{"prompt": "good", "id": "one"}\n' + line, encoding="utf-8")
            with pytest.raises(ConfigError, match=said) as caught:
                read_request_lines(str(path))
            assert str(caught.value).startswith(f"{path}:2")
            assert "\n" not in str(caught.value)


def test_a_file_without_a_request_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blank").write_text("\n \n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_request_lines(str(tmp_path / "blank"))


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{')))
    with pytest.raises(ConfigError, match=r"^standard input, line 2: not JSON"):
        read_request_lines("-")


def test_a_file_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphcore.tasks.requests.request_lines.LONGEST_FILE", 1024)
    with pytest.raises(ConfigError, match=r"prompts_jsonl=/dev/zero holds more than 1\.00 KiB"):
        read_request_lines("/dev/zero")
