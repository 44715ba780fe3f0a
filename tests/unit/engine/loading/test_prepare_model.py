"""Where decode steps run on a GPU's own kernels, where prompts continue within a chunk, and what is said of it."""

from typing import cast

import pytest
import torch
from support.packed_matrices import native_kernels

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.decoder_loader import DecoderLoader
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import prepare_model
from graphcore.engine.loading.runtime_config import choose_blocks
from graphcore.errors import ConfigError
from graphcore.kvcache.chunks import Chunks
from graphcore.nn.attention import Attention
from graphcore.nn.decoder import Decoder
from graphcore.nn.moe import ExpertLinear, MoE
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec
from graphcore.parallel.process_group import ProcessGroup
from graphcore.progress import ignore_progress

NORM = NormSpec("rms", 1e-5)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def decoder_of(*head_dims: int) -> Decoder:
    blocks = [BlockSpec(32, NORM, AttentionSpec(2, 2, width, 1.0), MLPSpec(32, "silu")) for width in head_dims]
    with torch.device("meta"):
        return Decoder(ModelSpec(32, 40, tuple(blocks), NORM, context=64), torch.bfloat16)


def test_nothing_is_said_where_all_layers_run_on_the_kernels() -> None:
    for asked in ("auto", "kernels"):
        assert choose_blocks(asked, "captured", CUDA, decoder_of(16, 16), 8) == ("kernels", ())


@pytest.mark.parametrize(
    ("decoder", "batch_size", "blocks", "obstacle"),
    [
        (decoder_of(15, 15), 1, "compiled", "layer 0: heads of 15 "),
        (decoder_of(16, 15), 1, "mixed", "layer 1: heads of 15 "),
        (decoder_of(16, 16), 9, "compiled", "layer 0: batches of more than 8 "),
    ],
)
def test_the_first_obstacle_is_said_and_refuses_kernels_that_were_asked_for(
    decoder: Decoder, batch_size: int, blocks: str, obstacle: str
) -> None:
    found, (note,) = choose_blocks("auto", "captured", CUDA, decoder, batch_size)
    assert found == blocks
    assert note.startswith(f"decode runs compiled blocks: {obstacle}")
    with pytest.raises(ConfigError, match=rf"^graph.blocks=kernels is not possible: {obstacle}.*use graph.blocks=auto"):
        choose_blocks("kernels", "captured", CUDA, decoder, batch_size)


def test_compiled_blocks_are_captured_at_any_batch_without_a_word() -> None:
    for batch_size in (1, 8, 9):
        assert choose_blocks("compiled", "captured", CUDA, decoder_of(16), batch_size) == ("compiled", ())


def test_a_native_program_has_kernels_and_other_steps_have_what_they_run() -> None:
    assert choose_blocks("auto", "captured", CPU, decoder_of(15), 1) == ("kernels", ())
    for graph in ("compiled", "eager"):
        assert choose_blocks("auto", graph, CUDA, decoder_of(16), 1) == (graph, ())


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
