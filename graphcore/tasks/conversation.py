"""What was said so far, as the token ids of the next turn: through the chat template, or as one growing text."""

from dataclasses import dataclass, field

from graphcore.engine.engine import Engine


@dataclass
class Conversation:
    """The turns of a chat.

    With a template the whole conversation is written anew for each turn: what a template does with earlier turns is
    its own affair. Without one, ids are appended, and the model goes on from everything above.

    Attributes:
        engine: whose tokenizer and template apply.
        system: the system message, if there is one.
        has_template: whether the template is used.
        messages: role and content of each message, oldest first; the system message is not among them.
        token_ids: everything so far, without a template.
    """

    engine: Engine
    system: str | None
    has_template: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def prompt_ids(self, text: str) -> list[int]:
        """Return what the model is given when the user says `text` next.

        Raises:
            TokenizerError: the text cannot be encoded, or the template refuses it.
        """
        if not self.has_template:
            tokenizer = self.engine.tokenizer
            if not self.token_ids:
                return tokenizer.encode(text)
            return self.token_ids + tokenizer.encode("\n" + text, add_special_tokens=False)
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        return self.engine.chat_ids([*system, *self.messages, {"role": "user", "content": text}])

    def add(self, text: str, prompt_ids: list[int], answer: str, answer_ids: list[int]) -> None:
        """Keep a turn: what the user said and what the model answered, without an end token."""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        self.token_ids = prompt_ids + answer_ids

    def reset(self) -> None:
        """Forget every turn; the system message stays."""
        self.messages, self.token_ids = [], []
