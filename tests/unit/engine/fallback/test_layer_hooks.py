"""A transformers model's forward tells a policy what is about to run, and reads no slot outside of that."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.fallback_models import ISSUE, FallbackModel, save_fallback
from torch import Tensor, nn

from graphcore.config.compose import compose_settings
from graphcore.engine.fallback.layer_hooks import LayerHooks
from graphcore.engine.fallback.runner import TransformersRunner
from graphcore.engine.fallback.transformers_loader import TransformersLoader
from graphcore.errors import UnsupportedError
from graphcore.weights.groups import Group


@dataclass
class Poisoning:
    """A policy that overwrites with NaN what is not acquired, and writes down what is asked of it."""

    groups: dict[int, list[Tensor]]
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kept = {group: [tensor.clone() for tensor in tensors] for group, tensors in self.groups.items()}
        for group in self.groups:
            self._poison(group)

    def acquire(self, group: int) -> None:
        self.log.append(f"+{group}")
        for tensor, kept in zip(self.groups.get(group, ()), self.kept.get(group, ()), strict=True):
            tensor.copy_(kept)

    def release(self, group: int) -> None:
        self.log.append(f"-{group}")
        self._poison(group)

    def _poison(self, group: int) -> None:
        for tensor in self.groups.get(group, ()):
            tensor.fill_(float("nan"))


def poisoned_runner(model: FallbackModel, *overrides: str) -> tuple[TransformersRunner, Poisoning]:
    keys = ["model.fallback=transformers", f"model.attention={model.attention}", "device=cpu", "dtype=fp32"]
    sizes = ["context_length=128", "batch_size=2", f"model.checkpoint={model.folder}"]
    settings = compose_settings([*keys, *sizes, *overrides])
    backend = TransformersLoader()
    parts = backend.prepare(settings, backend.open(settings, lambda *_: None), lambda *_: None)
    parts.weights.load_resident(torch.device("cpu"), lambda *_: None)
    groups: list[Group] = parts.weights.groups()
    policy = Poisoning({group.index: [weight.tensor.data for weight in group.weights] for group in groups})
    return TransformersRunner(parts.weights, policy, parts.runtime, 128, 0), policy


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("name", ISSUE)
def test_groups_are_read_only_between_acquire_and_release(name: str, group_size: int, tmp_path: Path) -> None:
    model = save_fallback(name, tmp_path, tie_word_embeddings=False)
    sizes = ["streaming=on", f"streaming.layer_group_size={group_size}", "streaming.memory_budget=1GB"]
    runner, policy = poisoned_runner(model, *sizes)
    assert torch.equal(runner.logits(model.ids.tolist()), model.outputs().logits)
    groups = [1, 2, 3, 4] if group_size == 1 else [1, 2, 3]
    inner = [f"{sign}{group}" for group in groups for sign in "+-"]
    assert policy.log == ["+0", *inner, "-0"]


def test_what_runs_between_other_groups_is_seen_to_be_missing(tmp_path: Path) -> None:
    model = save_fallback("phi3", tmp_path)
    runner, policy = poisoned_runner(model)
    policy.acquire = lambda group: None  # type: ignore[method-assign]
    assert runner.logits(model.ids.tolist()).isnan().all()


class Skipping(nn.Module):
    """Two layers, of which one runs."""

    def __init__(self, order: Callable[[nn.ModuleList], list[nn.Module]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Linear(2, 2)
        self.order = order

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.order(self.layers):
            hidden = layer(hidden)
        return self.head(hidden)


@dataclass
class Silent:
    def acquire(self, group: int) -> None: ...

    def release(self, group: int) -> None: ...


@pytest.mark.parametrize(
    ("order", "is_right"),
    [
        (lambda layers: [layers[0], layers[1]], True),
        (lambda layers: [layers[0]], False),
        (lambda layers: [layers[1], layers[0]], False),
        (lambda layers: [layers[0], layers[1], layers[0]], False),
    ],
)
def test_a_model_that_does_not_run_its_layers_once_each_in_order_is_refused(
    order: Callable[[nn.ModuleList], list[nn.Module]], is_right: bool
) -> None:
    model = Skipping(order)
    hooks = LayerHooks(model, [[layer] for layer in model.layers], [model.head], Silent())
    model(torch.zeros(1, 2))
    if is_right:
        hooks.check_order()
    else:
        with pytest.raises(UnsupportedError, match="instead of"):
            hooks.check_order()
