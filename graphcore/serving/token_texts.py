"""Texts of single tokens, for log probabilities."""

from typing import Any

from graphcore.serving.chat_call import TokenRecord
from graphcore.tokenizer.tokenizer import Tokenizer


class TokenTexts:
    """The texts of single tokens; a token that is part of a character has U+FFFD.

    Args:
        tokenizer: the model's; None shows ids as "token_id:123".
        shows_ids: True shows ids always, as vLLM's `return_tokens_as_token_ids`.
    """

    def __init__(self, tokenizer: Tokenizer | None, shows_ids: bool = False) -> None:
        self._tokenizer = None if shows_ids else tokenizer

    def text(self, token_id: int) -> str:
        """Return the text of a token; special tokens are spelt."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def chat_record(self, record: TokenRecord) -> dict[str, Any]:
        """Return a token's log probability as chat completions have it."""
        top = [self._entry(one.token_id, one.logprob) for one in record.top]
        return {**self._entry(record.token_id, record.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
