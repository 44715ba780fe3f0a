"""Settings are composed as users' are."""

import hydra
import pytest


@pytest.fixture(autouse=True)
def composed_by_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose with Hydra itself, not with composed_groups.py."""
    monkeypatch.setattr("graphcore.config.compose.compose", hydra.compose)
