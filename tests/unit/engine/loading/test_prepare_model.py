"""Where decode steps run on a GPU's own kernels, and what is said where they do not."""

import torch

from graphcore.engine.loading.prepare_model import notes_on_decode
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec

NORM = NormSpec("rms", 1e-5)


def decoder_of(head_dim: int) -> Decoder:
    block = BlockSpec(32, NORM, AttentionSpec(2, 2, head_dim, 1.0), MLPSpec(32, "silu"))
    with torch.device("meta"):
        return Decoder(ModelSpec(32, 40, (block, block), NORM, context=64), torch.bfloat16)


def test_nothing_is_said_where_all_layers_run_on_the_kernels() -> None:
    assert notes_on_decode(decoder_of(16), batch_size=8) == ()


def test_the_first_obstacle_is_said() -> None:
    (note,) = notes_on_decode(decoder_of(15), batch_size=1)
    assert note.startswith("decode runs compiled blocks: layer 0: heads of 15 ")


def test_wide_batches_are_said_to_run_compiled() -> None:
    (note,) = notes_on_decode(decoder_of(16), batch_size=9)
    assert "batches of more than 8" in note
