"""An architecture that there is not is refused without a guess: a name like it is another model, not a typo."""

import json
from pathlib import Path

import pytest

from graphcore.arch.config_from_gguf import config_from_gguf
from graphcore.arch.config_from_json import load_model_config
from graphcore.errors import UnsupportedError

NAMES = ["qwen2_moe", "jamba", "qwen2moe", "gemma3n", "llama4", "gpt_neox", "lama"]


@pytest.mark.parametrize("name", NAMES)
def test_a_config_of_another_architecture_names_what_there_is_and_suggests_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "hidden_size": 8}), encoding="utf-8")
    with pytest.raises(UnsupportedError) as caught:
        load_model_config(tmp_path)
    assert f"model_type '{name}' is not supported; known: " in str(caught.value)
    assert "model.fallback=transformers" in str(caught.value)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_file_of_another_architecture_names_what_there_is_and_suggests_none(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        config_from_gguf({"general.architecture": name}, {}, None, "model.gguf")
    assert f"architecture '{name}' is not supported; known: " in str(caught.value)
    assert "did you mean" not in str(caught.value)
