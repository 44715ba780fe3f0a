"""A tokenizer whose tokens are the 256 bytes and one end token, as grammars take it."""

from typing import Any, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from graphcore.tokenizer.grammar import GrammarTokens

END = 256


class Letters:
    """What `GrammarTokens` needs of a tokenizer."""

    tag_ids = ()

    def serialized(self) -> str:
        """Return the text of a tokenizer.json."""
        vocab = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|end|>"])
        return cast("str", tokenizer.to_str())


def letter_tokens() -> GrammarTokens:
    """Return the tokens."""
    return GrammarTokens(cast("Any", Letters()), END + 1, [END])
