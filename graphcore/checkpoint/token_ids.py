"""Special token ids as files state them: one id, a list, an id as text, or numbers that stand for none.

Files state -1, 4294967295 (-1 as an unsigned number) or an id beyond the vocabulary where a model has no such token.
Transformers and llama.cpp run these files, so an id that is no token counts as absent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from graphcore.errors import quoted

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # settings of config.json and generation_config.json
UNBOUNDED = 2**31  # where the size of the vocabulary is unknown: as many as a signed 32-bit id can tell apart
MOST_SHOWN = 4  # values that one note shows


@dataclass(frozen=True)
class SpecialIds:
    """The special token ids of one file.

    Attributes:
        ids: ids of the vocabulary by setting, in the file's order; settings without any are left out.
        ignored: settings and their values that are no ids of the vocabulary.
    """

    ids: Mapping[str, tuple[int, ...]]
    ignored: tuple[tuple[str, object], ...]

    def note(self, source: str) -> tuple[str, ...]:
        """Return one line about the ignored values; empty if there are none.

        Args:
            source: name of the file, for the line.
        """
        if not self.ignored:
            return ()
        shown = ", ".join(f"{name} {quoted(value)}" for name, value in self.ignored[:MOST_SHOWN])
        rest = len(self.ignored) - MOST_SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        return (f"{source}: ignored special token ids that are not in the vocabulary: {shown}{more}",)


def read_special_ids(settings: Mapping[str, object], names: Sequence[str], vocab_size: int | None) -> SpecialIds:
    """Return the special token ids among the settings of a file; null counts as absent.

    Args:
        names: settings to read.
        vocab_size: number of tokens; None if unknown.
    """
    ids: dict[str, tuple[int, ...]] = {}
    ignored: list[tuple[str, object]] = []
    for name in names:
        value = settings.get(name)
        members = value if isinstance(value, list | tuple) else (value,)
        found = {index: token_id_of(member, vocab_size) for index, member in enumerate(members)}
        ignored.extend((name, members[at]) for at, one in found.items() if one is None and members[at] is not None)
        known = tuple(one for one in found.values() if one is not None)
        if known:
            ids[name] = known
    return SpecialIds(MappingProxyType(ids), tuple(ignored))


def token_id_of(value: object, vocab_size: int | None) -> int | None:
    """Return the token id that a value states, as an integer, a whole float or decimal text; None if it states none."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < (vocab_size or UNBOUNDED):
        return None
    return value
