"""Whether a reference fits in host memory: checked before anything is loaded."""

from collections.abc import Callable
from functools import partial

import torch

from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.config.byte_sizes import both_in_words
from graphcore.engine.fallback.transformers_loader import TransformersLoader
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import match_model
from graphcore.errors import PlanError
from graphcore.nn.decoder import Decoder
from graphcore.planning.machine import free_device_nbytes
from graphcore.tasks.reference.transformers_model import Reference, load_own_class, load_reference
from graphcore.tasks.task import Context
from graphcore.weights.loader import Loader

TRANSFORMERS_NBYTES = 256 << 20  # transformers' code, and the outputs of a pass
INSTEAD = "task=perplexity compares with no reference, and streams"


def open_reference(context: Context) -> Callable[[], Reference]:
    """Return a function that loads transformers' model of the checkpoint; no weight is read before it is called.

    Raises:
        PlanError: transformers' model would not fit in host memory.
    """
    settings = context.settings
    if settings.model.fallback is not None:
        backend, on_progress = TransformersLoader(), context.console.progress
        model = backend.open(settings, on_progress)
        parts = backend.prepare(settings, model, on_progress)
        assert isinstance(model.checkpoint, SafetensorsCheckpoint), "transformers' classes read folders"
        tensors = (tensor for name, tensor in parts.weights.weights.items() if name not in parts.weights.shared)
        sizes = [4 * tensor.numel() for tensor in tensors]
        _check_free(sum(sizes) + max(sizes) + TRANSFORMERS_NBYTES, INSTEAD)
        return partial(load_own_class, model.checkpoint, model.config)
    own = open_model(settings.model, settings.seed, settings.cache_folder, context.console.progress)
    decoder, loader = match_model(own, torch.float32)
    needed, free = reference_nbytes(decoder, loader), free_device_nbytes(torch.device("cpu"))
    fewest, instead = reference_nbytes(decoder, loader, num_layers=1), INSTEAD
    if fewest <= free < needed:
        each = (needed - fewest) // max(1, len(decoder.layers) - 1)
        most = 1 + (free - fewest) // max(1, each)
        instead = f"compare the first layers only with model.num_hidden_layers={most}"
    _check_free(needed, instead)
    return partial(load_reference, own, loader)


def _check_free(needed: int, instead: str) -> None:
    """Check that so many bytes of host memory are free.

    Raises:
        PlanError: fewer bytes are free; the message says what to do instead.
    """
    free = free_device_nbytes(torch.device("cpu"))
    if needed > free:
        takes, has = both_in_words(needed, free)
        raise PlanError(
            f"task=verify runs transformers in float32 on the CPU, which takes {takes}, {has} are free; {instead}"
        )


def reference_nbytes(decoder: Decoder, loader: Loader, num_layers: int | None = None) -> int:
    """Return the bytes of transformers' model at its peak: its weights, the largest of them twice, and transformers.

    A weight is filled, or cast to another dtype, from a copy.

    Args:
        decoder: float32 decoder on the meta device; a tied head counts once.
        num_layers: number of layers, from the first; None is all.
    """
    layers = decoder.layers[:num_layers]
    tied = decoder.get_buffer("embed_tokens.weight").nbytes if loader.is_tied else 0
    ends = sum(tensor.nbytes for group in (decoder.embed_tokens, decoder.head) for tensor in group.buffers()) - tied
    tensors = [tensor.nbytes for layer in layers for tensor in layer.buffers()]
    largest = max(*tensors, decoder.get_buffer("embed_tokens.weight").nbytes)
    return ends + sum(tensors) + largest + TRANSFORMERS_NBYTES
