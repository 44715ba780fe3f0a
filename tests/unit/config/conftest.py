"""Settings are composed as users' are, but where values alone are tested."""

import hydra
import pytest


@pytest.fixture(autouse=True)
def composed_by_hydra(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Compose with Hydra itself, not with task_runs.py, which test_validate*.py do."""
    if request.module.__name__.startswith("test_validate"):
        return
    monkeypatch.setattr("graphcore.config.compose.compose", hydra.compose)
