"""From prompts of every form to token ids: texts, messages of a conversation, ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphcore.engine.checked_arguments import Prompt, check_messages, is_conversation, token_row
from graphcore.errors import ConfigError, TokenizerError
from graphcore.tokenizer.chat_template import Message, Tool
from graphcore.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptEncoder:
    """Encoder of prompts with a checkpoint's tokenizer.

    Attributes:
        known: the tokenizer; None if the checkpoint has none.
        source: the checkpoint, for messages.
        special_tokens: setting of the same name: how control tokens that a text spells are encoded.
        vocab: size of the vocabulary.
    """

    known: Tokenizer | None
    source: str
    special_tokens: str
    vocab: int

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            TokenizerError: the checkpoint has none; only token ids can be used.
        """
        if self.known is None:
            raise TokenizerError(f"{self.source} has no tokenizer; give token ids (prompt_ids=[1,2,3])")
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
            return token_row(self.text_ids(prompt), self.vocab)
        return token_row(self.chat_ids(prompt) if is_conversation(prompt) else prompt, self.vocab)

    def chat_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation in the model's chat template, ready for its answer."""
        parses_messages = self.special_tokens == "parse"
        return self.tokenizer.encode_chat(
            check_messages(messages), parses_messages=parses_messages, tools=tools, options=options
        )

    def text_ids(self, text: str, is_beginning: bool = True) -> list[int]:
        """Return the token ids of a raw text. Control tokens that it spells are parsed, unless special_tokens=text.

        Args:
            is_beginning: True puts BOS before the text where the checkpoint asks for it.
        """
        return self.tokenizer.encode(text, is_beginning, is_plain=self.special_tokens == "text")
