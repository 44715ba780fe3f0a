"""Where decode steps run on a GPU's own kernels, where prompts continue within a chunk, and what is said of it."""

from typing import cast

import pytest
import torch
from support.packed_matrices import native_kernels

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.decoder_loader import DecoderLoader
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import notes_on_decode, prepare_model
from graphcore.kvcache.chunks import Chunks
from graphcore.nn.attention import Attention
from graphcore.nn.decoder import Decoder
from graphcore.nn.moe import ExpertLinear, MoE
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec
from graphcore.parallel.process_group import ProcessGroup
from graphcore.progress import ignore_progress

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


class OneOfTwoRanks:
    """A process group in which the other rank says the same, but for what its prompts are multiplied by.

    Attributes:
        is_other_invariant: True if the other rank multiplies by the C++ kernels.
    """

    def __init__(self, is_other_invariant: bool) -> None:
        self.is_other_invariant = is_other_invariant

    def all_say(self, own: list[bool]) -> list[list[bool]]:
        return [own, [*own[:-1], self.is_other_invariant]]


def test_prompts_continue_within_a_chunk_only_if_all_ranks_can() -> None:
    """The C++ kernels multiply codes on every processor, and torch float32."""
    native_kernels()
    sizes = ["model=llama3", "model.checkpoint=random:", "device=cpu", "context_length=512", "prefill_chunk=256"]
    codes = ["dtype=bf16", "quant=q8_0", "quant.activations=int8"]
    for overrides, other, least in ((codes, True, 16), (codes, False, 256), (["dtype=fp32"], True, 256)):
        settings = compose_settings([*sizes, *overrides])
        parts = prepare_model(settings, open_model(settings.model, 0, settings.cache_folder, ignore_progress))
        ranks = cast(ProcessGroup, OneOfTwoRanks(other))
        planned = DecoderLoader().plan(settings, parts, ignore_progress)
        agreed, _, _ = DecoderLoader(ranks).agree(settings, *planned)
        assert agreed.runtime.chunks == Chunks(256, least), overrides
        said = [note for note in agreed.notes if "whole chunks of prefill_chunk=256 tokens" in note]
        assert len(said) == (least == 256), overrides


@pytest.mark.thorough
def test_what_torch_computes_beside_products_is_not_batch_invariant() -> None:
    """A sigmoid's last numbers, and logarithms of positions."""
    native_kernels()
    for name, kind, is_invariant in (
        ("mixtral", MoE, True),
        ("glm4_moe", MoE, False),
        ("qwen3_next", MoE, False),
        ("ministral3", Attention, False),
    ):
        settings = compose_settings([f"model={name}", "model.checkpoint=random:", "device=cpu", "context_length=512"])
        prepared = prepare_model(settings, open_model(settings.model, 0, settings.cache_folder, ignore_progress))
        found = {one.is_batch_invariant for one in prepared.decoder.modules() if isinstance(one, kind)}
        assert found == {is_invariant}, name
        assert is_invariant or not prepared.runtime.is_batch_invariant, name


def test_dense_experts_are_not_batch_invariant() -> None:
    """A library of torch multiplies those that enough tokens chose."""
    experts = ExpertLinear(4, 32, 32, bias=False, dtype=torch.bfloat16)
    assert not experts.is_batch_invariant
