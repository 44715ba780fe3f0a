"""A user's file of defaults: its keys become settings that the command line overrides."""

from pathlib import Path

import pytest
from support.cases import in_case

from graphcore.cli.user_settings import with_user_settings
from graphcore.errors import ConfigError

FILE = """
model: smollm3
streaming: on
outputs: false
context_length: null
cache_dir: ~/models, of mine
dependent_launches: off
speculation:
sampling: {temperature: 0.3, stop_token_ids: [1, 2], logit_bias: {12: -5}}
stop: ["\\n\\n"]
"""
OWN = [
    "model=smollm3",
    "streaming=on",
    "outputs=false",
    "context_length=null",
    "cache_dir='~/models, of mine'",
    "dependent_launches=off",
    "sampling.temperature=0.3",
    "sampling.stop_token_ids=[1,2]",
    "+sampling.logit_bias={12:-5}",
    "stop=['\n\n']",
]


def key_of(setting: str) -> str:
    return setting.lstrip("+").partition("=")[0]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "graphcore").mkdir()
    return tmp_path / "graphcore" / "config.yaml"


def test_settings_of_the_file_come_before_those_of_the_command_line(file: Path) -> None:
    assert with_user_settings(["seed=1"]) == ["seed=1"]
    file.write_text(FILE, encoding="utf-8")
    assert with_user_settings(["--cfg", "job", "seed=1"]) == ["--cfg", "job", *OWN, "seed=1"]
    for given, left_out in (
        ("model=gemma3", {"model"}),
        ("sampling=greedy", {"sampling.temperature", "sampling.stop_token_ids", "sampling.logit_bias"}),
        ("task=chat", set()),
        ("task=serve", {"stop"}),
        ("trace=true", {"outputs"}),
        ("hydra.run.dir=x", {"outputs"}),
        ("experiment=smollm2_bench", {key_of(setting) for setting in OWN}),
        ("task=models", {key_of(setting) for setting in OWN} - {"outputs", "cache_dir"}),
        ("sampling.temperature=1", {"sampling.temperature"}),
        ("+outputs=true", {"outputs"}),
    ):
        with in_case(given):
            kept = [setting for setting in OWN if key_of(setting) not in left_out]
            assert with_user_settings([given]) == [*kept, given]


def test_the_installed_command_writes_no_folder_for_what_it_prints(file: Path) -> None:
    for given, writes in (
        ("seed=1", False),
        ("task=chat", False),
        ("task=bench", True),
        ("task=serve", True),
        ("outputs=true", True),
        ("trace=true", True),
        ("hydra.run.dir=x", True),
        ("experiment=smollm2_bench", True),
    ):
        with in_case(given):
            assert ("outputs=false" in with_user_settings([given], keeps_results=False)) != writes
            assert with_user_settings([given]) == [given]
    assert "outputs=false" not in with_user_settings(["-m", "seed=1,2"], keeps_results=False)
    file.write_text("outputs: true", encoding="utf-8")
    assert with_user_settings(["seed=1"], keeps_results=False) == ["outputs=true", "seed=1"]


def test_a_file_that_cannot_be_used_is_named(file: Path) -> None:
    for text, said in (
        ("modle: a", "unknown key 'modle' (did you mean 'model'?)"),
        ("task: chat", "task is chosen on the command line"),
        ("prompt: Hi", "prompt is chosen on the command line"),
        ("- a\n- b", "holds no keys with values"),
        ("a: [", "is not YAML"),
    ):
        file.write_text(text, encoding="utf-8")
        with in_case(text), pytest.raises(ConfigError) as caught:
            with_user_settings([])
        assert str(file) in str(caught.value)
        assert said in str(caught.value)
    for text in ("", "# nothing\n"):
        file.write_text(text, encoding="utf-8")
        assert with_user_settings(["seed=1"]) == ["seed=1"]
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        with_user_settings([])
