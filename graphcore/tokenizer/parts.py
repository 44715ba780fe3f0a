"""What a folder or a GGUF file gives up about its tokenizer, in one shape whatever the source."""

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers import processors


@dataclass(frozen=True)
class TokenizerParts:
    """All that `Tokenizer` needs.

    Attributes:
        backend: turns text into ids and back; its post-processor adds BOS and EOS where the checkpoint asks for it.
        source: what the user named, for messages.
        bos_id: the id that starts a text, if the vocabulary has one.
        eos_ids: every id that ends a generation, ascending.
        chat_template: Jinja source, or None.
        template_variables: `bos_token`, `eos_token` and the like as chat templates see them.
        id_limit: rows of the model's embedding where known; an id at or above it cannot be fed to the model.
    """

    backend: tokenizers.Tokenizer
    source: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None
    template_variables: Mapping[str, str]
    id_limit: int | None = None


def bos_eos_processor(bos_id: int | None, eos_id: int | None) -> processors.PostProcessor:
    """Return a post-processor that puts these ids around an encoded text; None adds nothing on that side."""
    named = [("BOS", bos_id), ("EOS", eos_id)]
    template = [name for name, token_id in (named[0], ("$A", 0), named[1]) if token_id is not None]
    return processors.TemplateProcessing(
        single=template,
        pair=[*template, "$B"],
        special_tokens=[(name, token_id) for name, token_id in named if token_id is not None],
    )
