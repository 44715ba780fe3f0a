"""Arguments of `Engine.load` and the names of models become settings, before anything is loaded."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from graphcore.checkpoint.sources.fetch import check_source
from graphcore.config.conf_folder import conf_dir
from graphcore.engine.arguments import load_settings
from graphcore.errors import CheckpointNotFoundError


def test_a_name_of_a_model_group_loads_its_published_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    published = OmegaConf.load(conf_dir() / "model/smollm2.yaml").files.q4
    named = load_settings("smollm2", {"device": "cpu"}, "context_length=64").model
    assert (named.checkpoint, named.expected_sha256) == (published.checkpoint, published.sha256)
    Path("smollm2").mkdir()
    found = load_settings("smollm2", {}, []).model
    assert (found.checkpoint, found.expected_sha256) == ("smollm2", None), "a folder of that name comes first"


def test_a_path_that_is_nearly_the_name_of_a_model_group_is_told_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text, hint in (("smolm2", r"did you mean 'smollm2'\?"), ("smollm2", "the published model is model=smollm2;")):
        with pytest.raises(CheckpointNotFoundError, match=hint):
            check_source(text)
    with pytest.raises(CheckpointNotFoundError, match="no such file or folder; name a local"):
        check_source("smollm7")


def test_a_model_is_served_under_the_names_that_point_at_its_checkpoint() -> None:
    def names(source: str) -> frozenset[str]:
        return load_settings(source, {}, []).model.served_names

    assert names("smollm2") == {"smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"}
    assert names("/models/a/my.gguf") == {"my.gguf"}
    assert names("/models/mine/") == {"mine"}
    assert names("hf:org/name") == {"name", "org/name"}
    assert {"Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"} < names("llama3")
