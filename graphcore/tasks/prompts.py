"""Where prompts come from: the command line, a file, standard input, token ids, a JSONL file; and the chat template.

settings --read_prompts--> Prompt (before anything is loaded) --encode_prompts--> Request (needs the tokenizer)
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphcore.config.settings import Settings
from graphcore.engine.engine import Engine
from graphcore.errors import ConfigError

DEFAULT_QUESTION = "Why is the sky blue? Answer in two sentences."
DEFAULT_OPENING = "The sky is blue because"
DEFAULT_IDS = tuple(range(1, 9))


@dataclass(frozen=True)
class Prompt:
    """One prompt as it was given: a text, or token ids.

    Attributes:
        where: the key, or the file and line, for messages.
    """

    content: str | tuple[int, ...]
    where: str


@dataclass(frozen=True)
class Request:
    """One prompt, encoded.

    Attributes:
        text: as given, or None for token ids.
        label: a few words to tell it from others.
    """

    text: str | None
    token_ids: list[int]
    label: str


def read_prompts(settings: Settings, prompts_jsonl: str | None = None) -> list[Prompt]:
    """Return the prompts that the settings name, none if they name none.

    Raises:
        ConfigError: two contradict each other, one is empty, or a file cannot be read.
    """
    if prompts_jsonl is not None:
        given = [key for key in ("prompt", "prompt_file", "prompt_ids") if vars(settings)[key] is not None]
        if given:
            raise ConfigError(f"task.prompts_jsonl and {given[0]} are both given; use one")
        return _read_jsonl(Path(prompts_jsonl).expanduser())
    if settings.prompt_ids is not None:
        return [_checked(tuple(settings.prompt_ids), "prompt_ids")]
    if settings.prompt_file is not None:
        return [_checked(read_text_file(Path(settings.prompt_file).expanduser(), "prompt_file"), "prompt_file")]
    if settings.prompt == "-":
        return [_checked(sys.stdin.read(), "prompt=- (standard input)")]
    return [_checked(settings.prompt, "prompt")] if settings.prompt is not None else []


def encode_prompts(
    engine: Engine, settings: Settings, prompts: Sequence[Prompt], note: Callable[[str], None]
) -> list[Request]:
    """Return the prompts as token ids; a default one if there is none.

    Args:
        note: called with a line about a default that people may not expect.

    Raises:
        ConfigError: a setting contradicts a prompt or the model.
        TokenizerError: a text cannot be encoded.
    """
    if prompts:
        return [_encoded(engine, settings, prompt) for prompt in prompts]
    if engine.has_tokenizer:
        text = DEFAULT_QUESTION if uses_chat(engine, settings) else DEFAULT_OPENING
        return [_encoded(engine, settings, Prompt(text, "the default prompt"))]
    note(
        f"the checkpoint has no tokenizer: running token ids {list(DEFAULT_IDS)} (choose others with prompt_ids=[...])"
    )
    return [_encoded(engine, settings, Prompt(DEFAULT_IDS, "the default prompt"))]


def uses_chat(engine: Engine, settings: Settings) -> bool:
    """Return whether prompts go through the model's chat template.

    Raises:
        ConfigError: chat=on, and there is no template; or a system message without one.
    """
    has_template = engine.has_tokenizer and engine.tokenizer.has_chat_template
    if settings.chat == "on" and not has_template:
        raise ConfigError(f"chat=on, but {settings.model.checkpoint} has no chat template; use chat=off")
    is_used = has_template and settings.chat != "off"
    if settings.system is not None and not is_used:
        raise ConfigError("system=... needs a chat template, and none is used here; put it into the prompt")
    return is_used


def messages_of(settings: Settings, text: str) -> list[dict[str, str]]:
    """Return a conversation of one question."""
    system = [{"role": "system", "content": settings.system}] if settings.system is not None else []
    return [*system, {"role": "user", "content": text}]


def _encoded(engine: Engine, settings: Settings, prompt: Prompt) -> Request:
    if isinstance(prompt.content, tuple):
        if settings.system is not None or settings.chat == "on":
            raise ConfigError(f"{prompt.where}: token ids run as they are; system and chat=on need a prompt of text")
        return Request(None, list(prompt.content), prompt.where)
    text = prompt.content
    is_chat = uses_chat(engine, settings)
    token_ids = engine.chat_ids(messages_of(settings, text)) if is_chat else engine.tokenizer.encode(text)
    label = text if len(text) <= 60 else text[:57] + "..."
    return Request(text, token_ids, label.replace("\n", " "))


def _checked(content: str | tuple[int, ...], where: str) -> Prompt:
    if not content:
        raise ConfigError(f"{where} is empty; give at least one character or token id")
    return Prompt(content, where)


def read_text_file(path: Path, key: str) -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8; the message starts with `key`.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}={path} is not UTF-8 text (byte {error.start})") from error


def _read_jsonl(path: Path) -> list[Prompt]:
    """Return a prompt for each line that is not blank."""
    lines = read_text_file(path, "task.prompts_jsonl").split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"task.prompts_jsonl={path} holds no prompt; write one JSON object a line")
    return [_of_json(line, f"{path}:{number}") for number, line in numbered]


def _of_json(line: str, where: str) -> Prompt:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    match item:
        case {"prompt": str(text)} if len(item) == 1:
            return _checked(text, where)
        case {"prompt_ids": [*ids]} if len(item) == 1 and all(type(token_id) is int for token_id in ids):
            return _checked(tuple(ids), where)
    raise ConfigError(f'{where}: expected {{"prompt": "text"}} or {{"prompt_ids": [1, 2]}}')
