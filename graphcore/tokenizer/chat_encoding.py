"""Token ids of a rendered conversation: control tokens of the template are parsed, the messages stay plain text.

    <|im_start|>user\nprint <|im_end|> twice<|im_end|>\n        text, as the template gives it
    [control  ]                            [control  ]          the template's own: parsed
                .....................                           a message's: plain text, its spelling unchanged

If no message spells a control token, the ids are those of the whole text with its control tokens parsed. Otherwise only
the stretches between the template's control tokens in which a message spells one are encoded again, as plain text.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import tokenizers

from graphcore.errors import TokenizerError
from graphcore.tokenizer.chat_template import Tool
from graphcore.tokenizer.control_tokens import ControlTokens, Spot
from graphcore.tokenizer.marked_messages import Marking, TemplateWords, signs_of
from graphcore.tokenizer.message_turns import Message

Render = Callable[[Sequence[Message], Sequence[Tool] | None], str]


def encode_apart(
    render: Render, messages: Sequence[Message], tools: Sequence[Tool] | None, words: TemplateWords, source: str
) -> list[int]:
    """Return the ids of a conversation, in which no control token comes from a message or from a tool's description.

    Args:
        render: the chat template.
        source: the checkpoint, for messages.

    Raises:
        TokenizerError: the template rejects the messages, a role spells a control token, or the template changes the
            messages so that its own control tokens cannot be told from theirs.
    """
    controls, text = words.controls, render(messages, tools)
    encoding = controls.parsed(text)
    spots = controls.found(text, encoding, controls.of_template)
    marking = Marking(messages, tools, words)
    for structure in marking.unmarked:
        if controls.found(structure, controls.parsed(structure), controls.of_template):
            raise TokenizerError(f"{source}: a message has the role or field '{structure}', which is a control token")
    marked = _rendered(render, marking)
    if marked is not None and marking.taken_back(marked) == text:
        ids = encoding.ids  # a new list at each access
        theirs = {spot.token for spot in spots if _is_theirs(spot, ids, marked, marking, controls)}
        return _ids_apart(text, encoding, spots, theirs, controls)
    if not _must_be_the_templates(encoding, spots, marked, marking, controls):
        spelt = controls.spelling(encoding.ids[spots[-1].token])
        raise TokenizerError(
            f"{source}: the chat template changes what messages say, so that its own '{spelt}' cannot be told from "
            "one that a message spells; leave control tokens out of the messages"
        )
    return encoding.ids


def _rendered(render: Render, marking: Marking) -> str | None:
    """Return the text of the marked messages; None if the template treats the messages as more than text."""
    try:
        return render(marking.messages, marking.tools)
    except TokenizerError:
        return None


def _is_theirs(spot: Spot, ids: Sequence[int], marked: str, marking: Marking, controls: ControlTokens) -> bool:
    """Return whether the control token comes from a message; an answer may spell markup that is no special token."""
    spelling = marked[spot.start : spot.end]
    if ids[spot.token] in controls.always:
        return marking.has_mark(spelling)
    return marking.has_mark_of_others(spelling)


def _ids_apart(
    text: str, encoding: tokenizers.Encoding, spots: Sequence[Spot], theirs: set[int], controls: ControlTokens
) -> list[int]:
    """Return the ids; `theirs` are the positions of control tokens that come from messages."""
    every, ids = encoding.ids, list[int]()
    own = [spot for spot in spots if spot.token not in theirs]
    for before, after in pairwise([Spot(-1, 0, 0), *own, Spot(len(every), len(text), len(text))]):
        between = range(before.token + 1, after.token)
        if theirs.isdisjoint(between):
            ids += every[between.start : between.stop]
        else:
            ids += controls.plain_section(text[before.end : after.start], is_first=before.token < 0)
        ids += every[after.token : after.token + 1]
    return ids


def _must_be_the_templates(
    encoding: tokenizers.Encoding, spots: Sequence[Spot], marked: str | None, marking: Marking, controls: ControlTokens
) -> bool:
    """Return whether no control token of a text can come from a message, whatever the template did to the messages.

    That holds if no message has a character that such a token consists of, or if the template writes the same tokens,
    in the same order, around messages that have none.
    """
    every = encoding.ids
    found = [every[spot.token] for spot in spots]
    if all(marking.letters.isdisjoint(signs_of(spelling)) for spelling in controls.spellings(found)):
        return True
    if marked is None:
        return False
    without = controls.parsed(marked)
    ids = without.ids
    written = [
        ids[spot.token]
        for spot in controls.found(marked, without, controls.of_template)
        if not marking.has_mark(marked[spot.start : spot.end])
    ]
    return found == written
