"""What people type, made safe for Hydra's grammar.

Hydra refuses commas, quotes, "!", "(", "=" and more in a bare value. The keys that hold text are quoted here, so that
prompt=What's 2+2, really? means what it says. Everything else goes to Hydra untouched.
"""

import re
from collections.abc import Sequence

TEXT_KEYS = ("prompt", "system", "prompt_file", "model.checkpoint", "task.prompts_jsonl", "cache_dir")
LIST_KEYS = ("stop",)


def quoted_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the values of text keys quoted for Hydra.

    A list key takes one text as it is, or Hydra's own [a,b] in brackets.
    """
    return [_quoted_argument(argument) for argument in arguments]


def _quoted_argument(argument: str) -> str:
    key, separator, value = argument.partition("=")
    if not separator:
        return argument
    if key in LIST_KEYS and not (value.startswith("[") and value.endswith("]")):
        return f"{key}=[{quote(value)}]"
    return f"{key}={quote(value)}" if key in TEXT_KEYS else argument


def quote(text: str) -> str:
    """Return the text as a quoted value of Hydra's grammar that OmegaConf will not interpolate.

    Backslashes count only before what they could escape: a quote, the closing quote, or "${".
    """
    plain = re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + "\\${", text)
    escaped = re.sub(r"(\\*)'", lambda match: 2 * match[1] + "\\'", plain)
    return "'" + re.sub(r"(\\+)$", lambda match: 2 * match[1], escaped) + "'"
