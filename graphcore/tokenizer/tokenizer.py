"""Converts text to token ids and back, for every checkpoint that has a vocabulary."""

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from typing import Self

from graphcore.errors import TokenizerError
from graphcore.tokenizer.chat_encoding import encode_apart
from graphcore.tokenizer.chat_template import ChatTemplate, Tool
from graphcore.tokenizer.control_tokens import ControlTokens
from graphcore.tokenizer.gguf_tokenizer import read_gguf
from graphcore.tokenizer.hf_folder import read_folder
from graphcore.tokenizer.marked_messages import TemplateWords, texts_in
from graphcore.tokenizer.message_turns import Message
from graphcore.tokenizer.tokenizer_json import WithoutPanics
from graphcore.tokenizer.tokenizer_parts import TokenizerParts

_TAG = re.compile(r"<[^<>|]+>")
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


class PieceKind(Enum):
    """What an id spells: a text, one byte of a run of bytes, or nothing (rows that only pad the embedding)."""

    TEXT = auto()
    BYTE = auto()
    NONE = auto()


class Tokenizer:
    """Encodes and decodes as the model's own tokenizer does.

    Control tokens spelt in a text ("<|im_end|>") become their ids, as in transformers, unless the text is encoded as
    plain text. Those spelt in a conversation's messages stay plain text, unless the caller asks to parse them. Decoding
    keeps spaces before punctuation (without the "clean up" of transformers and llama.cpp), so that decoding what was
    encoded gives the text back.

    Args:
        model_path: a Hugging Face folder.

    Raises:
        TokenizerError: the folder has no tokenizer, or a damaged one.
    """

    def __init__(self, model_path: str) -> None:
        self._assemble(read_folder(_existing_folder(Path(model_path))))

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """Return the tokenizer of a Hugging Face folder."""
        return cls(str(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], source: str, cache_dir: Path | None = None) -> Self:
        """Return the tokenizer that a GGUF file's metadata describes.

        Args:
            metadata: the file's key-value pairs; arrays as tuples.
            source: the file, for messages.
            cache_dir: folder that keeps rebuilt tokenizers for the next start; None keeps none.

        Raises:
            TokenizerError: a key is missing or wrong, or names an unknown rule.
        """
        tokenizer = cls.__new__(cls)
        tokenizer._assemble(read_gguf(metadata, source, cache_dir))
        return tokenizer

    def _assemble(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._backend = parts.backend
        self._without_panics = WithoutPanics(parts.source)
        self._kinds: dict[int, PieceKind] = {}
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """The ids that `decode` leaves out by default."""
        self.tag_ids = frozenset(
            token_id for token_id, token in added.items() if not token.special and _TAG.fullmatch(token.content)
        )
        """The ids of tags that are text, such as <tool_call> and </think> of Qwen's tokenizers."""
        templates = "\n".join(filter(None, (parts.chat_template, parts.tool_template)))
        self._controls = ControlTokens(parts.backend, parts.eos_ids, templates)

    def encode(self, text: str, add_special_tokens: bool = True, is_plain: bool = False) -> list[int]:
        """Return the ids of a text, with BOS and EOS around it where the checkpoint asks for them.

        Args:
            is_plain: True to encode control tokens in the text as text, not as their ids.

        Raises:
            TokenizerError: the text is not valid Unicode, or holds a token that the model has no embedding for.
        """
        _check_unicode(text)
        encode = self._controls.plain if is_plain else self._controls.parsed
        with self._without_panics:
            ids = encode(text, add_special_tokens).ids
        return self._checked(ids)

    def encode_continuation(self, text: str) -> list[int]:
        """Return the ids of a text that continues another: plain, and without the space that some put before a text.

        Raises:
            TokenizerError: as in `encode`.
        """
        _check_unicode(text)
        with self._without_panics:
            ids = self._controls.plain_behind_text(text).ids
        return self._checked(ids)

    def _checked(self, ids: list[int]) -> list[int]:
        pieces = self._parts.bytes_of_pieces
        if pieces:
            ids = [token_id for piece in ids for token_id in pieces.get(piece, (piece,))]
        limit = self._parts.id_limit
        if limit is not None and ids and max(ids) >= limit:
            raise TokenizerError(
                f"{self._parts.source}: the text holds '{self.id_to_piece(max(ids))}', whose id {max(ids)} is beyond "
                f"the model's {limit} embeddings"
            )
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the ids; bytes that are not UTF-8 become U+FFFD, ids without a spelling are left out.

        Raises:
            TokenizerError: an id is negative.
        """
        if ids and min(ids) < 0:
            raise TokenizerError(f"token id {min(ids)} is negative")
        with self._without_panics:
            return self._backend.decode(self._spelt(ids), skip_special_tokens=skip_special_tokens)

    def _spelt(self, ids: Sequence[int]) -> list[int]:
        """Return the ids that have a spelling, in the place of those that do not."""
        same_as = self._parts.same_as
        if not same_as:
            return list(ids)
        return [token_id for given in ids if (token_id := same_as.get(given, given)) is not None]

    def id_to_piece(self, token_id: int) -> str:
        """Return the vocabulary's spelling of an id; empty for rows that only pad the embedding."""
        spelt = self._spelt([token_id])
        return self._backend.id_to_token(spelt[0]) or "" if spelt else ""

    def kind_of_piece(self, token_id: int) -> PieceKind:
        """Return what an id spells; the answer is remembered, because each new token of an answer asks for it."""
        kind = self._kinds.get(token_id)
        if kind is None:
            piece = self.id_to_piece(token_id)
            is_byte = _BYTE_PIECE.fullmatch(piece) is not None
            kind = PieceKind.BYTE if is_byte else PieceKind.TEXT if piece else PieceKind.NONE
            self._kinds[token_id] = kind
        return kind

    def token_texts(self, vocab: int) -> list[str]:
        """Return the text of each token alone, of the ids below `vocab`."""
        spelt = [self._spelt([token_id]) for token_id in range(vocab)]
        with self._without_panics:
            decoded: list[str] = self._backend.decode_batch(spelt, skip_special_tokens=False)
        return decoded

    @property
    def vocab_size(self) -> int:
        """The number of ids that have a spelling."""
        return self._backend.get_vocab_size() - len(self._parts.bytes_of_pieces)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about what was ignored or assumed when the vocabulary was read."""
        return self._parts.notes

    @property
    def bos_token_id(self) -> int | None:
        """The id that starts a text, if there is one; the checkpoint decides whether `encode` adds it."""
        return self._parts.bos_id

    @property
    def eos_token_id(self) -> int | list[int]:
        """The id that ends a generation, or the list of them."""
        ids = self.eos_token_ids
        return ids[0] if len(ids) == 1 else list(ids)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation, ascending."""
        return self._parts.eos_ids

    def serialized(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json, as it runs here; for other libraries."""
        return self._backend.to_str()

    @property
    def template_source(self) -> str | None:
        """The Jinja source that renders conversations with tools; None without a chat template."""
        return self._parts.tool_template or self._parts.chat_template

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return self._parts.chat_template is not None

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] | None = None,
        options: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Return the text of a conversation.

        Turns that the template would refuse or leave out are put into others first (`message_turns.py`).

        Args:
            messages: "role" and "content" of each turn, oldest first.
            add_generation_prompt: True to end with the text that opens the model's turn.
            tools: functions that the model may call, as JSON schemas.
            options: variables that the template reads, such as `enable_thinking`.
            continue_final_message: True to end with the last message's text, so that the model continues it.

        Raises:
            TokenizerError: there is no chat template, or no messages of plain data, or no text to continue.
            TemplateError: the template gives no text for them; see `ChatTemplate.render`.
        """
        variables = {**self._parts.template_variables, **(options or {})}
        template = self._template_for(tools)
        named = self._parts.template_variables
        turns = template.fitted(messages, named, tools is not None, continue_final_message)
        return template.render(turns, variables, add_generation_prompt, tools, continue_final_message)

    def refused_turns(self) -> frozenset[str]:
        """Return the names of the turns that the chat template refuses, which are put into others; it is tried once."""
        return self._chat_template.refused(self._parts.template_variables) if self.has_chat_template else frozenset()

    def prepare_chat(self) -> None:
        """Start the chat template's process, if there is a template, without waiting for it."""
        if self.has_chat_template:
            self._chat_template.start()

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        parses_messages: bool = False,
        tools: Sequence[Tool] | None = None,
        options: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
        markup: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation; the template writes BOS itself, so none is added.

        The turns are those of `render_chat`.

        Args:
            messages: "role" and "content" of each turn, oldest first.
            add_generation_prompt: True to end with the text that opens the model's turn.
            parses_messages: True to turn control tokens that a message spells into their ids. Otherwise they are text,
                and only the template's own count.
            tools: functions that the model may call, as JSON schemas.
            options: variables that the template reads, such as `enable_thinking`; their texts count as the template's.
            continue_final_message: True to end with the last message's text, so that the model continues it.
            markup: texts by the private-use letters that stand for them in the messages; they count as the template's.

        Raises:
            TokenizerError: as in `render_chat` and `encode`; or the template's control tokens cannot be told from
                those in a message.
        """
        _check_messages(messages, tools or ())
        table = str.maketrans(dict(markup or {}))
        variables, template = {**self._parts.template_variables, **(options or {})}, self._template_for(tools)
        named = self._parts.template_variables
        messages = template.fitted(messages, named, tools is not None, continue_final_message)

        def render(given: Sequence[Message], described: Sequence[Tool] | None) -> str:
            text = template.render(given, variables, add_generation_prompt, described, continue_final_message)
            _check_unicode(text)
            return text.translate(table)

        if parses_messages:
            return self.encode(render(messages, tools), add_special_tokens=False)

        with self._without_panics:
            ids = encode_apart(render, messages, tools, self._words_for(tools), self._parts.source)
        return self._checked(ids)

    @cached_property
    def _template_words(self) -> TemplateWords:
        return TemplateWords(self._parts.chat_template or "", self._controls)

    @cached_property
    def _tool_words(self) -> TemplateWords:
        return TemplateWords(self._parts.tool_template or "", self._controls)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        if self._parts.chat_template is None:
            raise TokenizerError(f"{self._parts.source}: has no chat template; give the prompt as plain text")
        return ChatTemplate(self._parts.chat_template, self._parts.source)

    @cached_property
    def _tool_template(self) -> ChatTemplate | None:
        text = self._parts.tool_template
        return None if text is None else ChatTemplate(text, self._parts.source)

    def _template_for(self, tools: Sequence[Tool] | None) -> ChatTemplate:
        return self._chat_template if tools is None or self._tool_template is None else self._tool_template

    def _words_for(self, tools: Sequence[Tool] | None) -> TemplateWords:
        return self._template_words if tools is None or self._tool_template is None else self._tool_words


def _check_unicode(text: str, name: str = "the text") -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{name} is not valid Unicode at character {error.start}; give it as UTF-8"
        raise TokenizerError(message) from error


def _check_messages(messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Reject invalid text in each message, since its position there is more useful than in the rendered text."""
    for index, tool in enumerate(tools):
        for text in texts_in(tool):
            _check_unicode(text, f"tool {index}")
    for index, message in enumerate(messages):
        for text in texts_in(message):
            _check_unicode(text, f"message {index} (role {message.get('role')!r})")


def _existing_folder(path: Path) -> Path:
    if not path.is_dir():
        raise TokenizerError(f"{path}: not a folder; give a Hugging Face folder, or use Tokenizer.from_gguf")
    return path
