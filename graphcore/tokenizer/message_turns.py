"""Conversations in the turns that a chat template takes.

Clients send what some templates refuse, or leave out without a word: system messages behind the first, two of them,
neighbouring turns of a user, an answer that comes first. Each template is tried once, with tiny conversations
(`refused_turns`); what it refuses is put into turns that it takes (`fitted_turns`), and the rest stays as it is.

    system, system, user          system (both), user
    ..., answer, system           ..., answer, user        in its place: further up, it would change the cached prefix
    ..., user, user               ..., user (both)
    ..., result of a tool, user   ..., result (both)
    ..., result of no call        ..., user                a summary may have taken the place of the call
    ..., call, user, result       ..., call, result, user
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest

Message = Mapping[str, object]
"""One turn: "role" and "content", and any other fields that the template reads, of the types that JSON has."""

SYSTEM = ("system", "developer")
TEXTS = ("content", "reasoning_content", "reasoning", "thinking")

TRIALS: Mapping[str, str] = {
    "system": "SU",
    "developer": "DU",
    "two systems": "SSU",
    "later system": "USASUAS",
    "system before a last result": "SUCT",
    "neighbouring users": "UUAUU",
    "neighbouring answers": "UAAU",
    "answer first": "AU",
    "no user": "S",
    "user behind a result": "UCTUAU",
    "call without a result": "UCUAU",
    "result without a call": "UATAU",
    "empty answer": "UEU",
}
"""What a template may refuse, by its name, with the conversation that shows it. The letters are those of `_turn`."""

_RESULT_TRIAL = "UCTA"  # a template that does not take it knows no results in this form, and is left alone
_CALL_ID = "call00001"  # nine letters and digits, as Mistral's templates ask for


def refused_turns(render: Callable[[Sequence[Message]], str | None]) -> frozenset[str]:
    """Return the names of the trials that a template refuses, or whose texts it leaves out or puts elsewhere.

    Args:
        render: function that returns the template's text for messages; None if the template refuses them, or if no
            further trial is to be made.
    """

    def shows(letters: str) -> bool:
        conversation = [_turn(letter, at) for at, letter in enumerate(letters)]
        text = render(conversation)
        count = _num_leading_systems(conversation)  # templates may put the first into the last user's turn
        words = [str(message["content"]) for message in conversation]
        return text is not None and _are_in_order(words[:count], text) and _are_in_order(words[count:], text)

    if not shows("U"):  # the template is broken: the error belongs to the conversation that asks for it
        return frozenset()
    knows_results = shows(_RESULT_TRIAL)
    trials = {name: letters for name, letters in TRIALS.items() if knows_results or not set("CT") & set(letters)}
    return frozenset(name for name, letters in trials.items() if not shows(letters))


def _turn(letter: str, at: int) -> Message:
    """Return the message for one letter of a trial conversation, with a content that can be found in the prompt."""
    word = f"qz{letter}{at}zq"
    match letter:
        case "C":
            call = {"id": _CALL_ID, "type": "function", "function": {"name": "look", "arguments": {}}}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "T":
            return {"role": "tool", "tool_call_id": _CALL_ID, "name": "look", "content": word}
        case "E":
            return {"role": "assistant", "content": ""}
    roles = {"S": "system", "D": "developer", "U": "user", "A": "assistant"}
    return {"role": roles[letter], "content": word}


def _are_in_order(words: Iterable[str], text: str) -> bool:
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return False
        at += len(word)
    return True


def is_alternating(messages: Sequence[Message]) -> bool:
    """Return whether messages are a user's turns and answers without calls, in alternation: all templates take them."""
    roles = ("user", "assistant")
    return all(
        turn.get("role") == roles[at % 2] and bool(turn.get("content")) and not turn.get("tool_calls")
        for at, turn in enumerate(messages)
    )


def fitted_turns(messages: Sequence[Message], refused: Collection[str], continues_last: bool = False) -> list[Message]:
    """Return messages in turns that a template takes; the messages are not changed.

    Args:
        refused: names of trials, as `refused_turns` returns them; without any, the messages stay as they are.
        continues_last: True if the last message is to be continued, so that it stays although it is empty.
    """
    turns = list(messages)
    if "developer" in refused:
        turns = [_with_role(turn, "system") if turn.get("role") == "developer" else turn for turn in turns]
    count = _num_leading_systems(turns)
    head, rest = turns[:count], turns[count:]
    if "system" in refused and count:  # one turn with the user's: what a model was trained on has a single one there
        end = 1 if rest and rest[0].get("role") == "user" else 0
        head, rest = [], [_joined([*(_with_role(turn, "user") for turn in head), *rest[:end]]), *rest[end:]]
    elif "two systems" in refused and count > 1:
        head = [_joined(head)]
    if "later system" in refused or "system" in refused:
        rest = [_with_role(turn, "user") if turn.get("role") in SYSTEM else turn for turn in rest]
    if "result without a call" in refused:
        rest = _orphaned_results_as_user(rest)
    if "call without a result" in refused:  # one that was cut short, and did not run
        rest = _results_behind_calls(rest)
        rest = [_unanswered(turn, after) for turn, after in zip_longest(rest, rest[1:])]
    if "empty answer" in refused:
        continued = rest[-1:] if continues_last else []
        rest = [*(turn for turn in rest[: len(rest) - len(continued)] if not _is_empty_answer(turn)), *continued]
    is_without_user = "no user" in refused and all(turn.get("role") != "user" for turn in rest)
    if is_without_user or ("answer first" in refused and rest and rest[0].get("role") == "assistant"):
        rest = [{"role": "user", "content": ""}, *rest]
    if "user behind a result" in refused:
        rest = _joined_runs(rest, lambda last, turn: _is_result(last) and turn.get("role") == "user")
    names = {"user": "neighbouring users", "assistant": "neighbouring answers"}
    rest = joined_turns(rest, [role for role, name in names.items() if name in refused])
    if "system before a last result" in refused and rest and rest[-1].get("role") != "user":
        at = max((at for at, turn in enumerate(rest) if turn.get("role") == "user"), default=None)
        if at is not None:  # where the template itself writes it while that turn is the last
            user = _with_role(_joined([*head, rest[at]]), "user")
            head, rest = [], [*rest[:at], user, *rest[at + 1 :]]
    return [*head, *rest]


def joined_turns(
    messages: Iterable[Message], roles: Collection[str] = ("system", "user", "assistant")
) -> list[Message]:
    """Return messages of which neighbours of one of these roles are joined to one.

    Contents, and thoughts, are joined with an empty line between them, and calls are put into one list. Results of
    tools stay apart, because each belongs to a call of its own.
    """
    return _joined_runs(messages, lambda last, turn: last.get("role") == turn.get("role") and turn["role"] in roles)


def _joined_runs(messages: Iterable[Message], belong: Callable[[Message, Message], bool]) -> list[Message]:
    """Return messages of which each is joined to those before it while it belongs to the first of them."""
    runs: list[list[Message]] = []
    for message in messages:
        if runs and belong(runs[-1][0], message):
            runs[-1].append(message)
        else:
            runs.append([message])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _joined(run: Sequence[Message]) -> Message:
    """Return neighbours as one message with the role of the first; linear, since a request may have a million."""
    whole: dict[str, object] = {}
    for message in reversed(run):
        whole |= message
    for name in TEXTS:
        if name in whole:
            whole[name] = _joined_text([message[name] for message in run if message.get(name)])
    calls = [call for message in run if isinstance(some := message.get("tool_calls"), list | tuple) for call in some]
    return {**whole, "tool_calls": calls} if calls else whole


def _joined_text(contents: Sequence[object]) -> object:
    """Return contents, texts or lists of parts, as one with an empty line between them."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n\n".join(texts)
    parts: list[object] = []
    for content in contents:
        parts += [{"type": "text", "text": "\n\n"}] if parts else []
        parts += content if isinstance(content, list | tuple) else [{"type": "text", "text": str(content)}]
    return parts


def _with_role(message: Message, role: str) -> Message:
    return {**message, "role": role}


def _num_leading_systems(messages: Sequence[Message]) -> int:
    others = (at for at, message in enumerate(messages) if message.get("role") not in SYSTEM)
    return next(others, len(messages))


def _is_empty_answer(message: Message) -> bool:
    return message.get("role") == "assistant" and not message.get("content") and not message.get("tool_calls")


def _orphaned_results_as_user(messages: Iterable[Message]) -> list[Message]:
    """Give tool results that follow no tool call the user's role."""
    found: list[Message] = []
    follows_calls = False
    for message in messages:
        if message.get("role") == "assistant":
            follows_calls = bool(message.get("tool_calls")) or "metadata" in message  # a family's own form of calls
        found.append(message if follows_calls or not _is_result(message) else _with_role(message, "user"))
    return found


def _results_behind_calls(messages: Iterable[Message]) -> list[Message]:
    """Move user and system messages that stand between tool calls and their results behind the results."""
    found: list[Message] = []
    between: list[Message] = []
    follows_calls = False
    for message in messages:
        if message.get("role") == "assistant":
            found += between
            between, follows_calls = [], bool(message.get("tool_calls"))
        (between if follows_calls and message.get("role") in (*SYSTEM, "user") else found).append(message)
    return found + between


def _unanswered(message: Message, after: Message | None) -> Message:
    """Return a message without its calls if another than a result comes after it."""
    if after is None or _is_result(after) or not message.get("tool_calls"):
        return message
    return {name: value for name, value in message.items() if name != "tool_calls"}


def _is_result(message: Message) -> bool:
    """Return whether a message is a tool's result, whose role differs between families."""
    return message.get("role") not in (*SYSTEM, "user", "assistant")
