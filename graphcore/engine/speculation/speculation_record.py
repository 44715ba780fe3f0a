"""How draft tokens fared, as a record for result.json and GET /status."""

from dataclasses import asdict
from typing import Any

from graphcore.engine.engine import Engine


def speculation_record(engine: Engine) -> dict[str, Any] | None:
    """Return how draft tokens fared since the engine was loaded; None without speculation."""
    found = engine.batching.speculation
    if found is None:
        return None
    return {
        "kind": engine.choices.speculation,
        "steps": found.steps,
        "draft_tokens": engine.totals.draft_tokens,
        "accepted_tokens": engine.totals.accepted_tokens,
        "drafted_by_position": list(found.acceptance.drafted),
        "accepted_by_position": list(found.acceptance.accepted),
        **asdict(found.times),
    }
