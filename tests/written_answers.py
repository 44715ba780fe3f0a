"""What a model of each family writes for an answer: thoughts, a text and calls, as its chat template has them."""

import json
import re
from collections.abc import Callable
from functools import cache

from tool_texts import ENDS, format_named, rendered, turn

LAST = {"gpt_oss": ("<|return|>", "<|call|>"), "llama3": ("<|eot_id|>", "<|eom_id|>")}  # of a text, of a call
LAST |= dict.fromkeys(["glm4", "glm45", "glm47"], ("<|user|>", "<|observation|>"))


@cache
def written(name: str, content: str, made: str) -> str:
    """Return the answer that a model of a family writes, without thoughts and with its end token."""
    calls, known = json.loads(made), format_named(name)
    text = ("<|channel|>final<|message|>" if name == "gpt_oss" else "") + content
    if calls:
        text = rendered(name, turn(*calls, content=content))[1]
        for end in ENDS:
            text = text.removesuffix(end)
        text = re.sub(r"^\s*<think>\s*</think>\n*", "", text).removeprefix("</think>")
    ends = [end.strip() for end in ENDS if end.strip() in known.controls]
    return text + (LAST[known.name][bool(calls)] if known.name in LAST else ends[0])


def script_of(name: str, thoughts: str, body: str, told: list[str]) -> Callable[[str], str]:
    """Return the script of an answer; `told` gets its thoughts, which it has only where the prompt leaves it any."""
    opened, closed = format_named(name).reasoning_open, format_named(name).reasoning_close

    def script(prompt: str) -> str:
        end = prompt.rstrip()
        may_think = bool(opened) and (name == "gpt_oss" or not end.endswith(closed))
        may_think = may_think and not end.endswith("<turn|>")  # Gemma's, where results follow a text: no turn is opened
        is_open = bool(opened) and end.endswith(opened.strip())
        told[:] = [thoughts if may_think else ""]
        if not may_think or not (thoughts or is_open):
            return body
        if name == "gpt_oss":
            return f"{opened}{thoughts}{closed}<|start|>assistant{body}"
        line = "\n" if opened == "<think>" else ""
        return f"{'' if is_open else opened + line}{thoughts}{line}{closed}{line * 2}{body}"

    return script
