"""Buffers that nobody fills, and tensors that are no buffers, are refused rather than guessed."""

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from graphcore.engine.fallback.computed_buffers import materialise_buffers
from graphcore.errors import UnsupportedError


class Filled(PreTrainedModel):
    """A model whose class says what its buffer holds."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.register_buffer("slopes", torch.arange(4.0), persistent=False)

    def _init_weights(self, module: torch.nn.Module) -> None:
        self.slopes.copy_(torch.arange(4.0))


class Unfilled(Filled):
    """A model whose class does not."""

    def _init_weights(self, module: torch.nn.Module) -> None:
        self.slopes[:3] = torch.arange(3.0)


class Plain(Filled):
    """A model with a tensor that is no buffer."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.table = torch.zeros(3)


def on_meta(kind: type[Filled]) -> Filled:
    with torch.device("meta"):
        return kind(PreTrainedConfig())


def test_a_buffer_is_filled_by_its_class() -> None:
    model = on_meta(Filled)
    assert model.slopes.is_meta
    materialise_buffers(model, "model")
    assert model.slopes.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_buffer_that_is_filled_in_part_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Unfilled does not say what its buffer 'slopes' holds"):
        materialise_buffers(on_meta(Unfilled), "model")


def test_a_tensor_that_is_no_buffer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Plain keeps a tensor outside its buffers \('table'\)"):
        materialise_buffers(on_meta(Plain), "model")
