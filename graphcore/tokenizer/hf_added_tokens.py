"""Tokens that a folder's other files add to those of `tokenizer.json`, with the ids that transformers gives them.

    tokenizer_config.json     added_tokens_decoder (id -> token), bos_token, eos_token, ..., further `*_token` entries,
                              additional_special_tokens or extra_special_tokens
    special_tokens_map.json   the same names; it counts only if the config has no added_tokens_decoder
    added_tokens.json         text -> id, likewise

The library gives a new token the next free id, whatever the files say, so the order matters: stated tokens by id, then
named ones, then the rest. Source: transformers 5, tokenization_utils_base.py (`_from_pretrained`) and
tokenization_utils_tokenizers.py (`TokenizersBackend.__init__`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import tokenizers

from graphcore.errors import TokenizerError, quoted

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LISTS = ("extra_special_tokens", "additional_special_tokens")


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that a folder's files name.

    Attributes:
        named: spelling by name, such as `eos_token`; only those that the files have.
        notes: lines for the user about ids other than the stated ones.
    """

    named: Mapping[str, str]
    notes: tuple[str, ...]


def add_special_tokens(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, object],
    special_map: Mapping[str, object],
    added: Mapping[str, object],
    folder: str,
) -> SpecialTokens:
    """Add the tokens that the files have and the backend lacks, and return those that have names.

    Args:
        config: contents of tokenizer_config.json.
        special_map: contents of special_tokens_map.json.
        added: contents of added_tokens.json.
        folder: the folder, for messages.

    Raises:
        TokenizerError: a file's entry is malformed, or a token is not valid Unicode.
    """
    is_legacy = "added_tokens_decoder" not in config
    settings = {**config, **special_map} if is_legacy else config
    try:
        named = {name: _token(entry) for name, entry in _named(settings)}
        special = {token.content: token for token in (*named.values(), *map(_token, _listed(settings)))}
        stated = _stated_tokens(config)
        if is_legacy:
            stated |= {int(str(at)): _token({"content": text, "normalized": True}) for text, at in added.items()}
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{folder}: the special token {quoted(error.object)} is not valid Unicode; correct the files"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder}: added_tokens_decoder is malformed, or a special token is ({error!r}); correct the files"
        ) from error
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    wanted = special | {token.content: token for token in stated.values()}
    order = dict.fromkeys([*(stated[at].content for at in sorted(stated)), *special])
    for text in special:
        wanted[text].special = True
    before = backend.get_vocab_size()
    backend.add_tokens([wanted[text] for text in order if text not in known])
    notes = _notes(backend, {token.content: at for at, token in stated.items()}, special, before, folder)
    return SpecialTokens({name: token.content for name, token in named.items()}, tuple(notes))


def _token(entry: object) -> tokenizers.AddedToken:
    """Return the token of an entry: a text, or an object with its text under "content"."""
    if isinstance(entry, str):
        return tokenizers.AddedToken(entry, special=True)
    fields = dict(entry)  # type: ignore[call-overload]  # TypeError: not an object
    return tokenizers.AddedToken(fields["content"], **{flag: bool(fields.get(flag)) for flag in _FLAGS})


def _stated_tokens(config: Mapping[str, object]) -> dict[int, tokenizers.AddedToken]:
    """Return the entries of `added_tokens_decoder` by id."""
    stated = config.get("added_tokens_decoder") or {}
    return {int(at): _token(entry) for at, entry in dict(stated).items()}  # type: ignore[call-overload]  # TypeError


def _named(settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield name and entry of each named token: the standard ones first, then the model's own."""
    own = {name: entry for name, entry in settings.items() if name.endswith("_token") and isinstance(entry, str | dict)}
    for listed in _LISTS:
        value = settings.get(listed)
        own |= value if isinstance(value, dict) else {}
    yield from ((name, own.pop(name)) for name in NAMED_TOKENS if own.get(name))
    yield from ((name, entry) for name, entry in own.items() if entry and name not in NAMED_TOKENS)


def _listed(settings: Mapping[str, object]) -> list[object]:
    """Return the entries of special tokens without names."""
    lists = (settings.get(name) for name in _LISTS)
    return [entry for entries in lists if isinstance(entries, list) for entry in entries if entry]


def _notes(
    backend: tokenizers.Tokenizer, stated: Mapping[str, int], special: Iterable[str], before: int, folder: str
) -> Iterator[str]:
    for text, at in stated.items():
        if backend.token_to_id(text) != at:
            yield (
                f"{folder}: the files give {quoted(text)} the id {at}, which tokenizer.json cannot give it; as in "
                f"transformers its id is {backend.token_to_id(text)}"
            )
            break
    for text in special:
        if text not in stated and (backend.token_to_id(text) or 0) >= before:
            yield (
                f"{folder}: tokenizer.json has no {quoted(text)}, which other files name; as in transformers its id is "
                f"{backend.token_to_id(text)}"
            )
            break
