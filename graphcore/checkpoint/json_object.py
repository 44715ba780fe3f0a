"""Strict JSON out of checkpoints: one object, no key twice, no NaN.

Python's parser takes the last of two equal keys and reads NaN and Infinity; in a weight file either is a sign of
damage, or of two readers that would see two different models.
"""

import json
from collections import Counter

from graphcore.checkpoint.quoted import quoted
from graphcore.errors import CheckpointError


def parse_json_object(raw: bytes, where: str) -> dict[str, object]:
    """Return the JSON object in `raw` (UTF-8).

    Args:
        raw: the text, complete.
        where: the file and part it comes from, for messages.

    Raises:
        CheckpointError: it is not JSON, is nested too deep, is not an object, or has a key twice.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) < len(pairs):
            [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise CheckpointError(f"{where}: has the key {quoted(twice)} twice")
        return members

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=_refuse_constant)
    except CheckpointError:
        raise
    except RecursionError as error:
        raise CheckpointError(f"{where}: is nested too deep to be weights; fetch the file again") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: is not JSON ({error}); fetch the file again") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where}: is a JSON {type(parsed).__name__}, not an object; fetch the file again")
    return parsed


def _refuse_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not allowed")
