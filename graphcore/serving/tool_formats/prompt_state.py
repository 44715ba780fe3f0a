"""What the end of a prompt says about the answer: whether it begins within thoughts, or after a text's beginning.

Tags that messages spell do not count. They come before the header of the model's turn; where no header is known, a tag
counts only at the prompt's very end.
"""

from graphcore.serving.tool_formats.tool_format import ToolFormat


def model_turn(known: ToolFormat, prompt_tail: str) -> str | None:
    """Return the text of the model's turn that the prompt holds already; None if the turn's header is not found."""
    ends = [at + len(header) for header in known.turn_starts if (at := prompt_tail.rfind(header)) >= 0]
    return prompt_tail[max(ends) :] if ends else None


def is_reasoning_open(known: ToolFormat, prompt_tail: str) -> bool:
    """Return whether the prompt opened thoughts and did not close them, so that the answer begins within them.

    Args:
        prompt_tail: end of the prompt's text, from the header of the model's turn on or from before it.
    """
    if not known.knows_reasoning:
        return False
    turn = model_turn(known, prompt_tail)
    _, opened, after = (prompt_tail if turn is None else turn).rpartition(known.reasoning_open)
    return bool(opened) and (not after.strip() if turn is None else known.reasoning_close not in after)


def is_reasoning_closed(known: ToolFormat, prompt_tail: str) -> bool:
    """Return whether the prompt holds whole thoughts in the model's turn, so that the answer has none."""
    if not known.knows_reasoning:
        return False
    turn = model_turn(known, prompt_tail)
    if turn is None:
        return prompt_tail.rstrip().endswith(known.reasoning_close)
    return known.reasoning_close in turn


def is_at_start(known: ToolFormat, prompt_tail: str) -> bool:
    """Return whether the answer begins the model's turn, rather than going on with text that the prompt began."""
    return not (model_turn(known, prompt_tail) or "").strip()
