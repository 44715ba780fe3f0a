"""What the end of a prompt says about the answer: whether it begins within thoughts, or after a text's beginning."""

from graphcore.serving.tool_formats.tool_format import ToolFormat


def is_reasoning_open(known: ToolFormat, prompt_tail: str) -> bool:
    """Return whether the prompt opened thoughts and did not close them, so that the answer begins within them.

    Tags that messages spell do not count: the model's turn begins after them, or the text does not end with the tag.

    Args:
        prompt_tail: end of the prompt's text, from the model's turn on or from before it.
    """
    if not known.knows_reasoning:
        return False
    _, header, turn = prompt_tail.rpartition(known.turn_start)
    opened = (turn if known.turn_start and header else prompt_tail).rpartition(known.reasoning_open)
    if not opened[1]:
        return False
    return known.reasoning_close not in opened[2] if header else not opened[2].strip()


def is_at_start(known: ToolFormat, prompt_tail: str) -> bool:
    """Return whether the answer begins the model's turn, rather than going on with text that the prompt began."""
    _, header, turn = prompt_tail.rpartition(known.turn_start)
    return not header or not turn.strip()


def is_reasoning_closed(known: ToolFormat, prompt_tail: str) -> bool:
    """Return whether the prompt holds whole thoughts in the model's turn, so that the answer has none."""
    _, header, turn = prompt_tail.rpartition(known.turn_start)
    return known.knows_reasoning and bool(header) and known.reasoning_close in turn
