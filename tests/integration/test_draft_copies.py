"""A draft model has copies of what streams, in a small format, and shares everything else with the model."""

from collections.abc import Callable

import pytest
import torch
from support.packed_matrices import native_kernels
from support.tiny_models import TinyModel

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import prepare_model
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.nn.decoder import Decoder
from graphcore.progress import ignore_progress
from graphcore.weights.matching import EMBEDDING, HEAD
from graphcore.weights.packed_weights import packing_of
from graphcore.weights.resident_weights import load_resident, named_weights

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
MATRICES = frozenset({"layers.0.mlp.up_proj.weight", "layers.1.self_attn.q_proj.weight", HEAD})


def prepared(model: TinyModel) -> PreparedDecoder:
    native_kernels()
    asked = ["speculation=self", "speculation.draft_format=q4_0", "dtype=fp32", "device=cpu"]
    settings = compose_settings([f"model.checkpoint={model.folder}", *asked])
    return prepare_model(settings, open_model(settings.model, 0, settings.cache_folder, ignore_progress))


def loaded(parts: PreparedDecoder, streamed: frozenset[str]) -> Decoder:
    """Return the draft's decoder beside a model some of whose weights stream."""
    assert parts.draft is not None
    moved = streamed | {EMBEDDING} if parts.loader.is_tied and HEAD in streamed else streamed
    with torch.inference_mode():
        load_resident(parts.loader, parts.decoder, torch.device("cpu"), ignore_progress, moved)
        return parts.draft.load(parts.loader, streamed, ignore_progress)


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])  # with biases and a head of its own; with a tied head
def test_what_streams_is_copied_and_all_else_is_the_models(name: str, tiny_model: Tiny) -> None:
    parts = prepared(tiny_model(name))
    draft = loaded(parts, MATRICES)
    own, copied = dict(named_weights(parts.decoder)), dict(named_weights(draft))
    for weight in own.keys() - MATRICES - {EMBEDDING}:
        assert copied[weight].data_ptr() == own[weight].data_ptr() != 0, weight
    for weight in MATRICES:
        packing = packing_of(draft, weight if weight != HEAD else f"head.{HEAD}")
        assert packing is not None
        unpacked = packing.unpack(copied[weight], torch.float32)
        exact = parts.loader.dense(weight, torch.float32)
        assert 0 < float((unpacked - exact).norm() / exact.norm()) < 0.12
    assert parts.draft is not None
    assert parts.draft.nbytes_of(MATRICES) == sum(-(-copied[weight].nbytes // 256) * 256 for weight in MATRICES)
    if parts.loader.is_tied:
        assert copied[EMBEDDING].data_ptr() == copied[HEAD].data_ptr()
        assert draft.embed_tokens.scale == parts.decoder.embed_tokens.scale
    else:
        assert draft.embed_tokens is parts.decoder.embed_tokens
    assert not parts.loader.errors


def test_a_draft_of_a_resident_model_copies_every_matrix_that_gets_smaller(tiny_model: Tiny) -> None:
    parts = prepared(tiny_model("gpt_oss"))
    draft = loaded(parts, frozenset())
    assert parts.draft is not None
    own, copied = dict(named_weights(parts.decoder)), dict(named_weights(draft))
    for weight, tensor in own.items():
        is_copy = copied[weight].data_ptr() != tensor.data_ptr()
        assert is_copy == (weight in parts.draft.smaller), weight
        assert is_copy == (copied[weight].nbytes < tensor.nbytes)
    assert any(".experts." in weight for weight in parts.draft.smaller)
    assert not any("norm" in weight or "router" in weight for weight in parts.draft.smaller)
