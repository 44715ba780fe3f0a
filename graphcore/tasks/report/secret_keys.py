"""Secrets among the settings: they are left out of everything that a run writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECRET_KEYS = frozenset({"api_key"})
HIDDEN = "***"


def secrets_in(settings: Mapping[str, Any]) -> list[str]:
    """Return the values of secret keys, at any depth."""
    found: list[str] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found += secrets_in(value)
        elif key in SECRET_KEYS and isinstance(value, str) and value:
            found.append(value)
    return found


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with HIDDEN in the place of each secret."""
    return {
        key: without_secrets(value)
        if isinstance(value, Mapping)
        else HIDDEN
        if key in SECRET_KEYS and value is not None
        else value
        for key, value in settings.items()
    }


def hide_secrets(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write HIDDEN over the secrets in the files that Hydra has written into a run's folder."""
    secrets = secrets_in(settings)
    for file in (folder / ".hydra").glob("*.yaml") if secrets else ():
        text = file.read_text(encoding="utf-8")
        for secret in secrets:
            text = text.replace(secret, HIDDEN)
        file.write_text(text, encoding="utf-8")
