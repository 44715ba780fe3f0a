"""One node of the tree of prefixes: a page of tokens after others, and what the caches hold of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class Prefix:
    """A page of tokens after others, or the beginning of a page.

    Attributes:
        tokens: its tokens, at most a page of them.
        pages: the page of each table; None where it was given back.
        is_prompt: whether its bits are those of a prompt that was computed alone.
        snapshot: row of the states after its last token; None if there is none.
        has_prompt_states: whether the snapshot has the bits of a prompt that was computed alone.
        used: number of the last use of any prefix that was one of this.
    """

    parent: "Prefix | None"
    tokens: tuple[int, ...]
    pages: list[int | None]
    is_prompt: bool
    snapshot: int | None = None
    has_prompt_states: bool = False
    used: int = 0
    children: dict[tuple[int, ...], "Prefix"] = field(default_factory=dict)

    def below(self) -> Iterator["Prefix"]:
        """Yield all prefixes that begin with this one, itself left out."""
        waiting = list(self.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    def prune(self) -> None:
        """Take this prefix, and those before it, out of the tree if they hold nothing and lead nowhere."""
        node = self
        while node.parent is not None and not node.children and node.snapshot is None and not any(node.pages):
            del node.parent.children[node.tokens]
            node = node.parent
