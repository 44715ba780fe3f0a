"""How names out of files appear in messages: on one line, printable, and short."""

LONGEST = 100  # characters; llama.cpp's tensor names end at 63, Hugging Face's at about 90


def quoted(name: object) -> str:
    """Return `name` as a one-line literal, cut in the middle if it is long."""
    literal = ascii(name)
    if len(literal) <= LONGEST:
        return literal
    return f"{literal[: LONGEST // 2]}...{literal[-LONGEST // 4 :]}"
