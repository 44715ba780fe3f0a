"""The conversation so far, encoded for the next turn: through the chat template, or as one growing text.

If a turn and room for its answer do not fit in the context, the oldest exchanges are left out of the prompt. The
conversation keeps them, for `/save` and for a longer context.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from graphcore.engine.engine import Engine
from graphcore.errors import ConfigError, GraphcoreError
from graphcore.tasks.report.output_files import OutputError, write_text
from graphcore.tasks.requests.text_input import LONGEST_PROMPT, read_file
from graphcore.tokenizer.tokenizer import Tokenizer

ROLES = ("user", "assistant")
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
MARKS = (START, CHANNEL, MESSAGE, "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
SAID = "final"


@dataclass
class Exchange:
    """A user's message and the model's answer to it.

    Attributes:
        answer: text of the answer for the chat template; only the final channel of an answer with channels.
        answer_ids: tokens of the whole answer, without an end token.
    """

    user: str
    answer: str
    answer_ids: list[int]


@dataclass
class Conversation:
    """The exchanges of a chat.

    With a template the whole conversation is rendered anew for each turn, because a template may change earlier turns.
    Without one, ids are appended, and the model continues the text so far.

    Attributes:
        engine: the engine with the tokenizer and the template.
        system: the system message; None without one.
        has_template: True if the template is used.
        exchanges: exchanges, oldest first.
        left_out: number of the oldest exchanges that are left out of the prompt.
    """

    engine: Engine
    system: str | None
    has_template: bool
    exchanges: list[Exchange] = field(default_factory=list)
    _counted: tuple[object, int] = field(default=(None, 0), init=False, repr=False)
    left_out: int = 0

    def prompt_ids(self, text: str, room: int) -> list[int]:
        """Return the prompt's token ids after the user has said `text`; may leave out more exchanges.

        Args:
            room: number of tokens to keep free for the answer, if leaving out exchanges can free them.

        Raises:
            TokenizerError: the text cannot be encoded, or the template refuses it.
        """
        return self._fitting(lambda: self._ids(self.exchanges[self.left_out :], text), len(self.exchanges), room)

    def unfinished_ids(self, room: int) -> list[int]:
        """Return the prompt's token ids with which the model continues its last answer; `room` as in `prompt_ids`."""
        return self._fitting(self._ids_so_far, len(self.exchanges) - 1, room)

    @property
    def num_tokens(self) -> int:
        """Number of context tokens that the conversation uses, without the oldest exchanges if they are left out."""
        if not self.exchanges:
            return 0
        state = len(self.exchanges), self.left_out, self.system, self.exchanges[-1]
        if self._counted[0] != state:  # a long chat takes a second to encode
            self._counted = state, len(self._ids_so_far())
        return self._counted[1]

    def _ids_so_far(self) -> list[int]:
        *_, last = self.exchanges
        return self._ids(self.exchanges[self.left_out : -1], last.user) + last.answer_ids

    @property
    def can_leave_out(self) -> bool:
        """Whether the prompt still has an exchange before the last one, which could be left out."""
        return self.left_out < len(self.exchanges) - 1

    def _fitting(self, ids: Callable[[], list[int]], most: int, room: int) -> list[int]:
        found = ids()
        while len(found) + room > self.engine.choices.context_length and self.left_out < most:
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
        return self.engine.prompts.text_ids(text if is_first else "\n" + text, is_beginning=is_first)

    def _system(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system is not None else []

    def add(self, user: str, answer: str, answer_ids: Sequence[int]) -> None:
        """Append an exchange; `answer_ids` has no end token."""
        self.exchanges.append(Exchange(user, self._kept(answer, answer_ids), list(answer_ids)))

    def extend(self, answer: str, answer_ids: Sequence[int]) -> None:
        """Append to the last answer."""
        last = self.exchanges[-1]
        last.answer_ids += answer_ids
        last.answer = self._kept(last.answer + answer, last.answer_ids)

    def _kept(self, answer: str, answer_ids: Sequence[int]) -> str:
        said = final_message(self.engine.tokenizer, answer_ids)
        return answer if said is None else said

    def pop_exchange(self) -> str:
        """Remove the last exchange and return the user's message."""
        self.left_out = min(self.left_out, len(self.exchanges) - 1)
        return self.exchanges.pop().user

    def clear(self) -> None:
        """Remove every exchange; the system message stays."""
        self.exchanges, self.left_out = [], 0

    def save(self, path: Path) -> None:
        """Write the conversation as JSON, {"messages": [{"role": ..., "content": ...}, ...]}.

        Raises:
            ConfigError: the file cannot be written, or exists and holds something else.
        """
        with suppress(PermissionError):  # reported when the file is written
            if path.exists():
                read_messages(path)
        record = {"messages": [*self._system(), *_messages(self.exchanges)]}
        try:
            write_text(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        except OutputError as error:
            raise ConfigError(f"{path} cannot be written ({_reason(error)}); choose another file") from error

    def load(self, path: Path) -> None:
        """Replace this conversation by a saved one; after an error it is unchanged.

        Raises:
            ConfigError: the file cannot be read, or holds something else.
            TokenizerError: a message in it cannot be encoded.
        """
        messages = read_messages(path)
        system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        if system is not None and not self.has_template:
            raise ConfigError(f"{path} has a system message, which needs a chat template, and none is used here")
        pairs = zip(messages[::2], messages[1::2], strict=True)
        exchanges = [Exchange(user["content"], said["content"], self._loaded(said["content"])) for user, said in pairs]
        self.system, self.exchanges, self.left_out = system, exchanges, 0

    def _loaded(self, answer: str) -> list[int]:
        """Return the tokens of an answer from a file, encoded as plain text, because the file is untrusted."""
        if self.has_template and self.engine.settings.special_tokens != "parse":
            return self.engine.tokenizer.encode(answer, add_special_tokens=False, is_plain=True)
        return self.engine.prompts.text_ids(answer, is_beginning=False)


def _messages(exchanges: Sequence[Exchange]) -> list[dict[str, str]]:
    """Return role and content of each message."""
    return [
        {"role": role, "content": content}
        for exchange in exchanges
        for role, content in zip(ROLES, (exchange.user, exchange.answer), strict=True)
    ]


def read_messages(path: Path) -> list[dict[str, str]]:
    """Return the messages of a saved conversation: at most one system message, then user and assistant in turn.

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


def final_message(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str | None:
    """Return the text of an answer's final channel, empty if it was not reached; None for an answer without channels.

    gpt-oss thinks in one channel and answers in another. Source: OpenAI harmony response format, "Receiving messages".

        <|channel|>analysis<|message|>The user asks ...<|end|><|start|>assistant<|channel|>final<|message|>Hello!

    A chat template writes earlier answers into the final channel itself, so only this text is passed to the template.
    """
    marks = [(at, piece) for at, piece in enumerate(map(tokenizer.id_to_piece, token_ids)) if piece in MARKS]
    if CHANNEL not in {piece for _, piece in marks}:
        return None
    channel, said = "", []
    for (at, piece), (end, _) in pairwise([*marks, (len(token_ids), "")]):
        text = tokenizer.decode(token_ids[at + 1 : end])
        if piece == START:
            channel = ""
        elif piece == CHANNEL:
            channel = text.strip()
        elif piece == MESSAGE and channel == SAID:
            said.append(text)
    return "".join(said)
