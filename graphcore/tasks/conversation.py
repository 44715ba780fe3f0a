"""What was said so far, as the token ids of the next turn: through the chat template, or as one growing text.

When a turn does not fit in the context beside room for its answer, the oldest exchanges are left out. They are still
there: for `/save`, and for a longer context.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from graphcore.engine.engine import Engine
from graphcore.errors import ConfigError, GraphcoreError
from graphcore.tasks.output import OutputError, write_text
from graphcore.tasks.text_input import LONGEST_PROMPT, read_file
from graphcore.tokenizer.channels import final_message

ROLES = ("user", "assistant")


@dataclass
class Exchange:
    """What the user said, and what the model answered.

    Attributes:
        answer: the part of the answer that goes back to a template: the final channel of one with channels.
        answer_ids: the whole answer's tokens, without an end token.
    """

    user: str
    answer: str
    answer_ids: list[int]


@dataclass
class Conversation:
    """The exchanges of a chat.

    With a template the whole conversation is written anew for each turn: what a template does with earlier turns is
    its own affair. Without one, ids are appended, and the model goes on from everything above.

    Attributes:
        engine: whose tokenizer and template apply.
        system: the system message, if there is one.
        has_template: whether the template is used.
        exchanges: oldest first.
        left_out: number of the oldest exchanges that the model is not given.
    """

    engine: Engine
    system: str | None
    has_template: bool
    exchanges: list[Exchange] = field(default_factory=list)
    left_out: int = 0

    def prompt_ids(self, text: str, room: int) -> list[int]:
        """Return what the model is given when the user says `text` next; may leave out more exchanges.

        Args:
            room: tokens to keep free for the answer, if leaving out exchanges can free them.

        Raises:
            TokenizerError: the text cannot be encoded, or the template refuses it.
        """
        return self._fitting(lambda: self._ids(self.exchanges[self.left_out :], text), len(self.exchanges), room)

    def unfinished_ids(self, room: int) -> list[int]:
        """Return what the model is given to go on with its last answer; as `prompt_ids`."""
        *_, last = self.exchanges

        def ids() -> list[int]:
            return self._ids(self.exchanges[self.left_out : -1], last.user) + last.answer_ids

        return self._fitting(ids, len(self.exchanges) - 1, room)

    @property
    def can_leave_out(self) -> bool:
        """Whether the model is given anything before the last exchange."""
        return self.left_out < len(self.exchanges) - 1

    def _fitting(self, ids: Callable[[], list[int]], most: int, room: int) -> list[int]:
        found = ids()
        while len(found) + room > self.engine.choices.context and self.left_out < most:
            self.left_out += 1
            found = ids()
        return found

    def _ids(self, exchanges: Sequence[Exchange], text: str) -> list[int]:
        if self.has_template:
            user = {"role": "user", "content": text}
            return self.engine.chat_ids([*self._system(), *_messages(exchanges), user])
        token_ids: list[int] = []
        for exchange in exchanges:
            token_ids += self._said(exchange.user, not token_ids) + exchange.answer_ids
        return token_ids + self._said(text, not token_ids)

    def _said(self, text: str, is_first: bool) -> list[int]:
        return self.engine.text_ids(text if is_first else "\n" + text, is_beginning=is_first)

    def _system(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system is not None else []

    def add(self, user: str, answer: str, answer_ids: Sequence[int]) -> None:
        """Keep what was said and answered; the ids without an end token."""
        self.exchanges.append(Exchange(user, self._kept(answer, answer_ids), list(answer_ids)))

    def extend(self, answer: str, answer_ids: Sequence[int]) -> None:
        """Add to the last answer."""
        last = self.exchanges[-1]
        last.answer_ids += answer_ids
        last.answer = self._kept(last.answer + answer, last.answer_ids)

    def _kept(self, answer: str, answer_ids: Sequence[int]) -> str:
        said = final_message(self.engine.tokenizer, answer_ids)
        return answer if said is None else said

    def take_back(self) -> str:
        """Forget the last exchange and return what the user said in it."""
        self.left_out = min(self.left_out, len(self.exchanges) - 1)
        return self.exchanges.pop().user

    def clear(self) -> None:
        """Forget every exchange; the system message stays."""
        self.exchanges, self.left_out = [], 0

    def save(self, path: Path) -> None:
        """Write the conversation as JSON, {"messages": [{"role": ..., "content": ...}, ...]}.

        Raises:
            ConfigError: the file cannot be written, or is there and holds something else.
        """
        with suppress(PermissionError):  # which is said when it is written
            if path.exists():
                read_messages(path)
        record = {"messages": [*self._system(), *_messages(self.exchanges)]}
        try:
            write_text(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        except OutputError as error:
            raise ConfigError(f"{path} cannot be written ({_reason(error)}); choose another file") from error

    def load(self, path: Path) -> None:
        """Go on from a saved conversation instead of this one, which stays as it is where that fails.

        Raises:
            ConfigError: the file cannot be read, or holds something else.
            TokenizerError: what it holds cannot be encoded.
        """
        messages = read_messages(path)
        system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        if system is not None and not self.has_template:
            raise ConfigError(f"{path} has a system message, which needs a chat template, and none is used here")
        pairs = zip(messages[::2], messages[1::2], strict=True)
        exchanges = [Exchange(user["content"], said["content"], self._loaded(said["content"])) for user, said in pairs]
        self.system, self.exchanges, self.left_out = system, exchanges, 0

    def _loaded(self, answer: str) -> list[int]:
        """Return the tokens of an answer out of a file, which anybody may have written: text, as all messages are."""
        if self.has_template and self.engine.settings.special_tokens != "parse":
            return self.engine.tokenizer.encode(answer, add_special_tokens=False, is_plain=True)
        return self.engine.text_ids(answer, is_beginning=False)


def _messages(exchanges: Sequence[Exchange]) -> list[dict[str, str]]:
    """Return role and content of each message."""
    return [
        {"role": role, "content": content}
        for exchange in exchanges
        for role, content in zip(ROLES, (exchange.user, exchange.answer), strict=True)
    ]


def read_messages(path: Path) -> list[dict[str, str]]:
    """Return the messages of a saved conversation: a system message or none, then user and assistant in turn.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    text = read_file(path, str(path), LONGEST_PROMPT)
    try:
        saved = json.loads(text)
    except (ValueError, RecursionError):
        saved = None
    messages = saved.get("messages") if isinstance(saved, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ConfigError(f"{path} holds no saved chat; choose another file")
    roles = [message["role"] for message in messages]
    said = roles[1:] if roles[:1] == ["system"] else roles
    if said != [*ROLES] * (len(said) // 2):
        raise ConfigError(
            f"{path} is no saved chat: user and assistant must take turns, and the last must be an answer"
        )
    return messages


def _is_message(item: object) -> bool:
    return isinstance(item, dict) and all(isinstance(item.get(key), str) for key in ("role", "content"))


def _reason(error: GraphcoreError) -> str:
    cause = error.__cause__
    return cause.strerror or str(cause) if isinstance(cause, OSError) else str(error)
