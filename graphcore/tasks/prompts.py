"""Where prompts come from: the command line, a file, standard input, token ids, a JSONL file; and the chat template."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graphcore.config.settings import Settings
from graphcore.engine.engine import Engine
from graphcore.errors import ConfigError

DEFAULT_QUESTION = "Why is the sky blue? Answer in two sentences."
DEFAULT_OPENING = "The sky is blue because"
DEFAULT_IDS = list(range(1, 9))


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


def read_requests(
    engine: Engine, settings: Settings, prompts_jsonl: str | None, note: Callable[[str], None]
) -> list[Request]:
    """Return the prompts that the settings ask for.

    Raises:
        ConfigError: there is none, two contradict each other, or a file cannot be read.
    """
    if prompts_jsonl is not None:
        given = [key for key in ("prompt", "prompt_file", "prompt_ids") if vars(settings)[key] is not None]
        if given:
            raise ConfigError(f"task.prompts_jsonl and {given[0]} are both given; use one")
        return _read_jsonl(engine, settings, Path(prompts_jsonl).expanduser())
    if settings.prompt_ids is not None:
        return [_of_ids(settings.prompt_ids, settings, "prompt_ids")]
    text = _read_text(settings)
    if text is not None:
        return [_of_text(engine, settings, text, "prompt")]
    if engine.has_tokenizer:
        return [_of_text(engine, settings, DEFAULT_QUESTION if uses_chat(engine, settings) else DEFAULT_OPENING, "")]
    note(f"the checkpoint has no tokenizer: running token ids {DEFAULT_IDS} (choose others with prompt_ids=[...])")
    return [Request(None, DEFAULT_IDS, "prompt_ids")]


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


def _of_text(engine: Engine, settings: Settings, text: str, key: str) -> Request:
    if not text:
        raise ConfigError(f"{key} is empty; give at least one character")
    if uses_chat(engine, settings):
        token_ids = engine.chat_ids(messages_of(settings, text))
    else:
        token_ids = engine.tokenizer.encode(text)
    label = text if len(text) <= 60 else text[:57] + "..."
    return Request(text, token_ids, label.replace("\n", " "))


def _of_ids(token_ids: list[int], settings: Settings, label: str) -> Request:
    if settings.system is not None or settings.chat == "on":
        raise ConfigError("prompt_ids are run as they are; system and chat=on need a prompt of text")
    return Request(None, token_ids, label)


def _read_text(settings: Settings) -> str | None:
    if settings.prompt_file is not None:
        return _read_file(Path(settings.prompt_file).expanduser(), "prompt_file")
    if settings.prompt == "-":
        return sys.stdin.read()
    return settings.prompt


def _read_file(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}={path} is not UTF-8 text (byte {error.start})") from error


def _read_jsonl(engine: Engine, settings: Settings, path: Path) -> list[Request]:
    """Return a request for each line that is not blank."""
    lines = _read_file(path, "task.prompts_jsonl").splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"task.prompts_jsonl={path} holds no prompt; write one JSON object a line")
    return [_of_json(engine, settings, line, f"{path}:{number}") for number, line in numbered]


def _of_json(engine: Engine, settings: Settings, line: str, where: str) -> Request:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    match item:
        case {"prompt": str(text)} if len(item) == 1:
            return _of_text(engine, settings, text, f"{where}: prompt")
        case {"prompt_ids": [*ids]} if len(item) == 1 and all(type(token_id) is int for token_id in ids):
            return _of_ids(ids, settings, where)
    raise ConfigError(f'{where}: expected {{"prompt": "text"}} or {{"prompt_ids": [1, 2]}}')
