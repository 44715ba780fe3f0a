"""The parts of a tokenizer in one shape, whether they come from a folder or a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers
from tokenizers import processors


@dataclass(frozen=True)
class TokenizerParts:
    """Everything that `Tokenizer` needs.

    Attributes:
        backend: the `tokenizers` library's object; its post-processor adds BOS and EOS if the checkpoint asks for it.
        source: name that the user gave, for messages.
        bos_id: id that starts a text, if the vocabulary has one.
        eos_ids: ids that end a generation, ascending.
        chat_template: Jinja source, or None.
        tool_template: Jinja source for conversations with tools; None if `chat_template` serves them, too.
        template_variables: variables for chat templates: `bos_token`, `eos_token` and the like.
        id_limit: rows of the model's embedding where known; ids at or above it have no embedding.
        same_as: for ids without a spelling of their own, the id that decodes in their place; None decodes to nothing.
        bytes_of_pieces: for ids of the backend that are no tokens, the tokens that stand for them.
        notes: lines for the user about what was ignored or assumed.
    """

    backend: tokenizers.Tokenizer
    source: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None
    template_variables: Mapping[str, str]
    id_limit: int | None = None
    tool_template: str | None = None
    same_as: Mapping[int, int | None] = field(default_factory=dict)
    bytes_of_pieces: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def bos_eos_processor(bos_id: int | None, eos_id: int | None) -> processors.PostProcessor:
    """Return a post-processor that adds these ids around an encoded text; None adds nothing on that side."""
    named = [("BOS", bos_id), ("EOS", eos_id)]
    template = [name for name, token_id in (named[0], ("$A", 0), named[1]) if token_id is not None]
    return processors.TemplateProcessing(
        single=template,
        pair=[*template, "$B"],
        special_tokens=[(name, token_id) for name, token_id in named if token_id is not None],
    )
