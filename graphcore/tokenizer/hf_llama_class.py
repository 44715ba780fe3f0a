"""Spaces before text as transformers 5 puts them for folders that name its class LlamaTokenizer (Llama 2, TinyLlama).

Like most classes of transformers it takes words and merges of `tokenizer.json`, but it makes the normalizer anew:

    tokenizer.json    <s>hello</s>\\nhello   ->   <s> _hello </s> _ \\n hello       a space before each stretch of text
    the class         <s>hello</s>\\nhello   ->   <s> hello </s> \\n hello          one before the beginning of a text

`legacy: true` asks for a space before each stretch, and `add_prefix_space: false` for none. The other classes that the
model families have make what their published files say. Source: transformers, models/llama/tokenization_llama.py, and
models/auto/tokenization_auto.py for the folders to which the class applies.
"""

from collections.abc import Mapping

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

_SPACE = "\u2581"


def apply_llama_class(
    backend: tokenizers.Tokenizer, config: Mapping[str, object], model: Mapping[str, object], folder: str
) -> tuple[str, ...]:
    """Give a folder's tokenizer the spaces of LlamaTokenizer if the folder names it, and return a note if it does.

    Args:
        config: contents of tokenizer_config.json.
        model: contents of config.json.
        folder: the folder, for messages.
    """
    named = str(config.get("tokenizer_class") or model.get("tokenizer_class")).removesuffix("Fast")
    if named != "LlamaTokenizer" or "auto_map" in config or model.get("model_type", "llama") != "llama":
        return ()
    if not isinstance(backend.model, models.BPE) or not backend.model.byte_fallback:
        return ()
    has_prefix = config.get("add_prefix_space") in (None, True)
    scheme = ("always" if config.get("legacy") else "first") if has_prefix else "never"
    stored = backend.pre_tokenizer
    if backend.normalizer is None and isinstance(stored, pre_tokenizers.Metaspace) and stored.prepend_scheme == scheme:
        return ()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    where = {"always": "before each stretch of text", "first": "before the beginning of a text", "never": "nowhere"}
    return (f"{folder}: names LlamaTokenizer, so as in transformers 5 a space is put {where[scheme]}",)
