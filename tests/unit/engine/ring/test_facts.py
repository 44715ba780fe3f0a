"""What ranks compare: adapters by their files, weights and scales, wherever they lie."""

import shutil
from pathlib import Path

import pytest
import torch
from support.files.adapter_files import drawn, write_peft
from support.tiny_models import save_tiny

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import match_model
from graphcore.engine.ring.facts import adapters_hash
from graphcore.progress import ignore_progress

MATRIX = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, adapters of it, and a copy of one in another place."""
    made = tmp_path_factory.mktemp("facts")
    save_tiny("llama3", made / "model")
    for seed, name in enumerate(("first", "second")):
        write_peft(made / name, drawn({MATRIX: (64, 112)}, seed=seed))
    write_peft(made / "scaled", drawn({MATRIX: (64, 112)}), lora_alpha=9)
    shutil.copytree(made / "first", made / "elsewhere" / "copy")
    return made


def hash_of(folder: Path, *adapters: str) -> str:
    """Return the hash of the adapters of a model that is opened with them."""
    settings = compose_settings([])
    settings.model.checkpoint = str(folder / "model")
    settings.model.adapter = [str(folder / adapter) for adapter in adapters]
    model = open_model(settings.model, 0, folder, ignore_progress)
    _, loader = match_model(model, torch.float32)
    return adapters_hash(loader.checkpoint)


def test_adapters_with_equal_files_are_equal_wherever_they_lie(folder: Path) -> None:
    assert hash_of(folder, "first") == hash_of(folder, "elsewhere/copy")
    assert hash_of(folder) == "none"


def test_other_factors_weights_scales_or_orders_are_other_adapters(folder: Path) -> None:
    given = (["first"], ["second"], ["first:0.5"], ["scaled"], ["first", "second"], ["second", "first"])
    assert len({hash_of(folder, *adapters) for adapters in given}) == len(given)
