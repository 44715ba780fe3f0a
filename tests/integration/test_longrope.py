"""LongRoPE: the engine's context decides which divisors rotate, and is compared with transformers on either side."""

from pathlib import Path

import pytest
import torch
from support.streaming import runs_as
from support.tiny_models import LONGROPE, phi3, randomise
from torch import Tensor, nn

from graphcore import Engine
from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.thorough

ORIGINAL, LONGEST = 256, 512
TOLERANCE = 2e-5
SHORT_IDS, LONG_IDS = (
    torch.randint(0, 96, (2, tokens), generator=torch.Generator().manual_seed(tokens)) for tokens in (70, 280)
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A model whose original context is 256 tokens, as transformers saves it."""
    folder = tmp_path_factory.mktemp("longrope")
    rope = {**LONGROPE, "partial_rotary_factor": 0.75}
    model = phi3(original_max_position_embeddings=ORIGINAL, max_position_embeddings=LONGEST, rope_parameters=rope)
    randomise(model, 3)
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    return folder, model.eval()


def load(folder: Path, context: int, graph: str = "eager") -> Engine:
    overrides = [f"context_length={context}", "prefill_chunk=16"]
    return Engine.load(folder, dtype="fp32", device="cpu", graph=graph, overrides=overrides)


@torch.no_grad()
def error(engine: Engine, reference: nn.Module, ids: Tensor) -> float:
    """Return the largest difference of the logits from transformers'."""
    return (engine.logits(ids) - reference(input_ids=ids, use_cache=False).logits).abs().max().item()


@pytest.mark.parametrize("graph", ["eager", "auto"])
@pytest.mark.parametrize(("context", "ids"), [(ORIGINAL, SHORT_IDS), (LONGEST, LONG_IDS)], ids=["short", "long"])
def test_a_context_on_one_side_gives_transformers_logits(
    saved: tuple[Path, nn.Module], context: int, ids: Tensor, graph: str
) -> None:
    folder, reference = saved
    with load(folder, context, graph) as engine:
        assert runs_as(engine, graph)
        assert error(engine, reference, ids) < TOLERANCE


def test_a_short_sequence_in_a_long_context_rotates_with_the_long_factors_and_a_note(
    saved: tuple[Path, nn.Module],
) -> None:
    folder, reference = saved
    with load(folder, LONGEST) as engine:
        assert error(engine, reference, SHORT_IDS) > 100 * TOLERANCE
        assert (engine.logits(LONG_IDS)[:, :70] - engine.logits(LONG_IDS[:, :70])).abs().max() < TOLERANCE
        assert any("above 256: all sequences rotate with longrope's long_factor" in note for note in engine.notes)
    with load(folder, ORIGINAL) as engine:
        assert not any("longrope" in note for note in engine.notes)


def test_a_saved_cache_of_the_other_factors_is_refused(saved: tuple[Path, nn.Module], tmp_path: Path) -> None:
    folder, _ = saved
    path, prompt = tmp_path / "prompt.cache", LONG_IDS[0, :100].tolist()
    with load(folder, ORIGINAL) as engine:
        engine.save_cache(prompt, path)
    with load(folder, LONGEST) as engine, pytest.raises(ConfigError, match="was saved with longrope=short_factor"):
        engine.load_cache(path)


def test_a_gguf_file_that_lacks_one_list_is_refused(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    from graphcore.arch.checkpoint_config import ROPE_LONG, read_config

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "phi3")
    writer.add_tensor(ROPE_LONG, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"lacks tensor 'rope_factors_short\.weight'"):
        read_config(open_checkpoint(tmp_path / "model.gguf"))
