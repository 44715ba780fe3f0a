"""Reading prompts from the command line, a file, standard input or token ids, and encoding them.

settings --read_prompts--> Prompt (before anything is loaded) --encode_prompts--> EncodedPrompt (needs the tokenizer)

A JSONL file has a module of its own (`request_lines`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphcore.config.settings import Settings
from graphcore.config.user_path import STANDARD_STREAM
from graphcore.engine.engine import Engine
from graphcore.engine.prompt_encoder import NOTE_ON_BOS, PromptEncoder
from graphcore.errors import ConfigError
from graphcore.tasks.requests.text_input import LONGEST_PROMPT, read_text

DEFAULT_QUESTION = "Why is the sky blue? Answer in two sentences."
# A small base model soon repeats its sentences; in an alphabet each line differs from the last.
DEFAULT_OPENING = "The animals of the alphabet:\n\nA is for ant.\nB is for bear.\nC is for"
DEFAULT_IDS = tuple(range(1, 9))


@dataclass(frozen=True)
class Prompt:
    """A prompt as the user wrote it, not yet encoded.

    Attributes:
        content: text, token ids, or messages of a conversation.
        where: key, or file and line, of the prompt, for messages.
    """

    content: str | tuple[int, ...] | tuple[Mapping[str, str], ...]
    where: str


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt with its token ids.

    Attributes:
        text: text as the user wrote it, or that of the last message; None for token ids.
        label: a few words that tell the prompt from others.
        notes: lines for the user about how the text was encoded.
        is_chat: True if it is answered, in the chat template; False if it is continued.
    """

    text: str | None
    token_ids: list[int]
    label: str
    notes: tuple[str, ...] = ()
    is_chat: bool = False


def read_prompts(settings: Settings) -> list[Prompt]:
    """Return the prompts that the settings name; empty if they name none.

    Raises:
        ConfigError: two settings contradict each other, a prompt is empty, or a file cannot be read.
    """
    if settings.prompt_ids is not None:
        return [checked_prompt(tuple(settings.prompt_ids), "prompt_ids")]
    if settings.prompt_file is not None:
        return [checked_prompt(read_text(settings.prompt_file, "prompt_file", LONGEST_PROMPT), "prompt_file")]
    if settings.prompt == STANDARD_STREAM:
        text = read_text(settings.prompt, "prompt", LONGEST_PROMPT)
        return [checked_prompt(text, "prompt=- (standard input)")]
    return [checked_prompt(settings.prompt, "prompt")] if settings.prompt is not None else []


def encode_prompts(
    engine: Engine, settings: Settings, prompts: Sequence[Prompt], note: Callable[[str], None]
) -> list[EncodedPrompt]:
    """Return the prompts with their token ids; a default prompt if there is none.

    Args:
        note: callback with a line about a default that users may not expect.

    Raises:
        ConfigError: a setting contradicts a prompt or the model.
        TokenizerError: a text cannot be encoded.
    """
    if any(isinstance(prompt.content, str) for prompt in prompts) and _lacks_template(engine.prompts, settings):
        note(
            f"{settings.model.display_name} has no chat template: it continues the prompt and does not answer it; "
            "use an instruct model for answers, or set chat=off"
        )
    if prompts:
        encoded = [encode_prompt(engine, settings, prompt) for prompt in prompts]
        for line in notes_on(encoded):
            note(line)
        return encoded
    if engine.has_tokenizer:
        return [encode_prompt(engine, settings, Prompt(_default_text(engine, settings, note), "the default prompt"))]
    note(
        f"the checkpoint has no tokenizer: running token ids {list(DEFAULT_IDS)} (choose others with prompt_ids=[...])"
    )
    return [encode_prompt(engine, settings, Prompt(DEFAULT_IDS, "the default prompt"))]


def _default_text(engine: Engine, settings: Settings, note: Callable[[str], None]) -> str:
    """Return a question if a chat template is used, else a text to continue; pass `note` a line that quotes it."""
    if uses_chat(engine.prompts, settings):
        return DEFAULT_QUESTION
    note(f'no prompt was given: continuing "{" ".join(DEFAULT_OPENING.split())}"; choose another with prompt=...')
    return DEFAULT_OPENING


def notes_on(prompts: Sequence[EncodedPrompt]) -> list[str]:
    """Return the distinct notes of the prompts."""
    return list(dict.fromkeys(note for prompt in prompts for note in prompt.notes))


def uses_chat(encoder: PromptEncoder, settings: Settings) -> bool:
    """Return whether prompts go through the model's chat template.

    Raises:
        ConfigError: chat=on, and there is no template; or a system message without one.
    """
    has_template = encoder.known is not None and encoder.known.has_chat_template
    if settings.chat == "on" and not has_template:
        raise ConfigError(f"chat=on, but {settings.model.display_name} has no chat template; use chat=off")
    is_used = has_template and settings.chat != "off"
    if settings.system is not None and not is_used:
        raise ConfigError("system=... needs a chat template, and none is used here; put it into the prompt")
    return is_used


def _lacks_template(encoder: PromptEncoder, settings: Settings) -> bool:
    """Return whether the model has no chat template, and the settings neither declined one nor asked for one."""
    return settings.chat == "auto" and encoder.known is not None and not encoder.known.has_chat_template


def messages_of(settings: Settings, text: str) -> list[dict[str, str]]:
    """Return the messages of a conversation with one question, after the system message if there is one."""
    system = [{"role": "system", "content": settings.system}] if settings.system is not None else []
    return [*system, {"role": "user", "content": text}]


def encode_prompt(engine: Engine, settings: Settings, prompt: Prompt) -> EncodedPrompt:
    """Return a prompt with its token ids.

    Raises:
        ConfigError: a setting contradicts the prompt or the model.
        TokenizerError: a text cannot be encoded.
    """
    if isinstance(prompt.content, str):
        text, messages = prompt.content, messages_of(settings, prompt.content)
    elif isinstance(prompt.content[0], Mapping):
        messages = _with_system(settings, prompt)
        text = _text_of(messages[-1])
    else:
        if settings.system is not None or settings.chat == "on":
            raise ConfigError(f"{prompt.where}: token ids run as they are; system and chat=on need a prompt of text")
        return EncodedPrompt(None, list(prompt.content), prompt.where)
    is_chat = _is_chat(engine.prompts, settings, prompt)
    token_ids = engine.chat_ids(messages) if is_chat else engine.prompts.text_ids(text)
    notes = () if is_chat or not engine.prompts.spells_bos(text) else (NOTE_ON_BOS,)
    label = text if len(text) <= 60 else text[:57] + "..."
    return EncodedPrompt(text, token_ids, label.replace("\n", " "), notes, is_chat)


def _text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, whose content may be a list of parts, or absent."""
    content = message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    return "".join(part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def check_prompt(encoder: PromptEncoder, settings: Settings, prompt: Prompt) -> None:
    """Check that a checkpoint can encode a prompt.

    Raises:
        ConfigError: the prompt or a setting needs a chat template, and there is none.
        TokenizerError: the prompt has to be encoded, and the checkpoint has no tokenizer.
    """
    if isinstance(prompt.content, str) or isinstance(prompt.content[0], Mapping):
        _is_chat(encoder, settings, prompt)
        encoder.tokenizer  # noqa: B018  # raises where there is none


def _is_chat(encoder: PromptEncoder, settings: Settings, prompt: Prompt) -> bool:
    """Return whether a text or messages go through the model's chat template."""
    is_chat = uses_chat(encoder, settings)
    if not is_chat and not isinstance(prompt.content, str):
        raise ConfigError(f"{prompt.where}: messages need a chat template, and none is used here; give a prompt")
    return is_chat


def _with_system(settings: Settings, prompt: Prompt) -> list[dict[str, str]]:
    """Return a prompt's messages, after the system message of the settings if there is one."""
    messages = [dict(message) for message in prompt.content if isinstance(message, Mapping)]
    if settings.system is None:
        return messages
    if messages[0]["role"] == "system":
        raise ConfigError(f"{prompt.where}: system=... and the messages' own system message are both given; use one")
    return [{"role": "system", "content": settings.system}, *messages]


def checked_prompt(content: str | tuple[int, ...] | tuple[Mapping[str, str], ...], where: str) -> Prompt:
    """Return the prompt of a content that is not empty.

    Raises:
        ConfigError: the content is empty.
    """
    if not content:
        raise ConfigError(f"{where} is empty; give at least one character, token id or message")
    return Prompt(content, where)
