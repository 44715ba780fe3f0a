"""From prompts of every form to token ids: texts, messages of a conversation, ids."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphcore.engine.arguments import Prompt, check_messages, is_conversation, token_row
from graphcore.errors import ConfigError, TokenizerError
from graphcore.tokenizer.chat_template import Tool
from graphcore.tokenizer.message_turns import Message
from graphcore.tokenizer.tokenizer import Tokenizer

NOTE_ON_BOS = "the prompt begins with the BOS token, which the tokenizer adds too; it is kept once"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptEncoder:
    """Encoder of prompts with a checkpoint's tokenizer.

    Attributes:
        known: the tokenizer; None if the checkpoint has none.
        source: the checkpoint, for messages.
        special_tokens: setting of the same name: how control tokens that a text spells are encoded.
        vocab: size of the vocabulary.
        unread: reason why the checkpoint's tokenizer is not read; empty if it is, or if there is none.
    """

    known: Tokenizer | None
    source: str
    special_tokens: str
    vocab: int
    unread: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about what was ignored or assumed in the tokenizer's files."""
        if self.known is not None:
            return self.known.notes
        return (self.unread,) if self.unread else ()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            TokenizerError: the checkpoint has none; only token ids can be used.
        """
        if self.known is None:
            raise TokenizerError(self.unread or f"{self.source} has no tokenizer; give token ids (prompt_ids=[1,2,3])")
        return self.known

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the checked token ids of a prompt of any form.

        Raises:
            ConfigError: the prompt is empty, or holds something that is no token.
            TokenizerError: the prompt has to be encoded, and the checkpoint has no tokenizer or no chat template.
        """
        if isinstance(prompt, str) and not prompt:
            raise ConfigError("the prompt is empty; give at least one character")
        if isinstance(prompt, str):
            if self.spells_bos(prompt):
                _log.warning(NOTE_ON_BOS)
            return token_row(self.text_ids(prompt), self.vocab)
        return token_row(self.chat_ids(prompt) if is_conversation(prompt) else prompt, self.vocab)

    def chat_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        options: Mapping[str, object] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        markup: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation in the model's chat template; arguments as for `Engine.chat_ids`."""
        if continue_final_message and add_generation_prompt:
            raise ConfigError(
                "add_generation_prompt opens a new message and continue_final_message continues the last one; "
                "leave one of them out"
            )
        return self.tokenizer.encode_chat(
            check_messages(messages),
            add_generation_prompt=add_generation_prompt is not False,
            parses_messages=self.special_tokens == "parse",
            tools=tools,
            options=options,
            continue_final_message=continue_final_message,
            markup=markup,
        )

    def text_ids(self, text: str, is_beginning: bool = True) -> list[int]:
        """Return the token ids of a raw text. Control tokens that it spells are parsed, unless special_tokens=text.

        Args:
            is_beginning: True puts BOS before the text where the checkpoint asks for it, unless the text spells it.
        """
        ids = self.tokenizer.encode(text, is_beginning, is_plain=self.special_tokens == "text")
        return ids[1:] if is_beginning and self._has_two_bos(ids) else ids

    def spells_bos(self, text: str) -> bool:
        """Return whether a raw text begins with the BOS token that would be put before it."""
        return self._has_two_bos(self.tokenizer.encode(text, is_plain=self.special_tokens == "text"))

    def _has_two_bos(self, ids: Sequence[int]) -> bool:
        """Return whether encoding has put BOS before a text that begins with it."""
        bos = self.tokenizer.bos_token_id
        return bos is not None and ids[:2] == [bos, bos] and self.tokenizer.encode("")[:1] == [bos]
