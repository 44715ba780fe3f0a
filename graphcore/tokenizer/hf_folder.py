"""Reads the tokenizer of a Hugging Face folder.

`tokenizer.json` says how text becomes ids, BOS and EOS included (`add_bos_token` in `tokenizer_config.json` has no
effect beside it, as in transformers 5). These files are optional: `tokenizer_config.json` and `special_tokens_map.json`
(special tokens), `generation_config.json` and `config.json` (more ids that end a generation), and
`chat_template.jinja`, `chat_template.json` or an entry of `tokenizer_config.json` (the first that exists counts).
"""

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from graphcore.checkpoint.generation_config import read_generation_config
from graphcore.checkpoint.token_ids import read_special_ids
from graphcore.errors import TokenizerError
from graphcore.tokenizer.chat_template import default_template
from graphcore.tokenizer.tokenizer_json import read_tokenizer_json
from graphcore.tokenizer.tokenizer_parts import TokenizerParts

_OTHER_FORMS = ("tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json", "spiece.model")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has a tokenizer in any form."""
    return any((folder / name).is_file() for name in ("tokenizer.json", *_OTHER_FORMS))


def read_folder(folder: Path) -> TokenizerParts:
    """Return the parts of the folder's tokenizer.

    Raises:
        TokenizerError: the folder has no tokenizer, or one of its files is damaged or names an unknown token.
    """
    backend = _read_backend(folder)
    config = _read_json(folder / "tokenizer_config.json")
    _add_missing(backend, config, folder)
    texts = {**_token_texts(_read_json(folder / "special_tokens_map.json")), **_token_texts(config)}
    model_config = _read_json(folder / "config.json")
    bos_id, eos_id = (_token_id(backend, texts, name, folder) for name in ("bos_token", "eos_token"))
    return TokenizerParts(
        backend=backend,
        source=str(folder),
        bos_id=bos_id,
        eos_ids=_eos_ids(eos_id, read_generation_config(folder).settings, model_config),
        chat_template=_chat_template(folder, config),
        template_variables=texts,
        id_limit=_vocab_size(model_config),
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        return read_tokenizer_json(path)
    if not has_tokenizer(folder):
        raise TokenizerError(
            f"{folder}: no tokenizer.json (nor {', '.join(_OTHER_FORMS)}); fetch it from the model's page, or run on "
            "token ids (prompt_ids)"
        )
    return _converted(folder)


def _converted(folder: Path) -> tokenizers.Tokenizer:
    """Return transformers' conversion of an older form. Only such folders import transformers, which takes a second."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (ImportError, OSError, TypeError, ValueError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise TokenizerError(
            f"{folder}: no tokenizer.json, and transformers cannot make one of the other files ({reason:.200}); save "
            "one with AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TokenizerError(f"{folder}: {type(tokenizer).__name__} has no tokenizer.json form; text needs one")
    return tokenizer.backend_tokenizer


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, object], folder: Path) -> None:
    """Add tokens that tokenizer_config.json has under an id and tokenizer.json lacks, as transformers does."""
    for token_id, token in _stated_tokens(config, folder):
        if backend.token_to_id(token.content) is not None:
            continue
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise TokenizerError(
                f"{folder}: tokenizer_config.json gives '{token.content}' the id {token_id}, which tokenizer.json "
                "cannot give it; the files do not match"
            )


def _stated_tokens(config: Mapping[str, object], folder: Path) -> list[tuple[int, tokenizers.AddedToken]]:
    """Return the entries of `added_tokens_decoder`, by id."""
    stated = config.get("added_tokens_decoder") or {}
    try:
        tokens = [
            (int(token_id), tokenizers.AddedToken(entry["content"], **{flag: bool(entry.get(flag)) for flag in _FLAGS}))
            for token_id, entry in dict(stated).items()  # type: ignore[call-overload]  # TypeError: not an object
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder}/tokenizer_config.json: added_tokens_decoder is malformed ({error!r})"
        ) from error
    return sorted(tokens, key=lambda entry: entry[0])


def _read_json(path: Path) -> dict[str, object]:
    """Return the object in the file, or an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError as error:
        raise TokenizerError(f"{path}: is nested too deep; fetch the file again") from error
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds {type(value).__name__}, where an object is expected")
    return value


def _token_texts(config: Mapping[str, object]) -> dict[str, str]:
    """Return the spellings of the named special tokens: a text, or an object with its text under "content"."""
    entries = {name: config.get(name) for name in _NAMED_TOKENS}
    texts = {name: entry.get("content") if isinstance(entry, dict) else entry for name, entry in entries.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _token_id(backend: tokenizers.Tokenizer, texts: Mapping[str, str], name: str, folder: Path) -> int | None:
    if name not in texts:
        return None
    try:
        token_id = backend.token_to_id(texts[name])
    except UnicodeEncodeError:  # half a surrogate pair, which no vocabulary has
        token_id = None
    if token_id is None:
        raise TokenizerError(f"{folder}: {name} '{texts[name]}' is not in tokenizer.json; the files do not match")
    return token_id


def _eos_ids(eos_id: int | None, generation: Mapping[str, object], model: Mapping[str, object]) -> tuple[int, ...]:
    """Return the ids that end a generation; values that are no ids of the vocabulary are left out."""
    found = set() if eos_id is None else {eos_id}
    for config in (generation, model, _text_config(model)):
        found.update(read_special_ids(config, ("eos_token_id",), _vocab_size(model)).ids.get("eos_token_id", ()))
    return tuple(sorted(found))


def _text_config(model: Mapping[str, object]) -> Mapping[str, object]:
    """Return the language part of a multimodal config, or an empty mapping for a plain one."""
    nested = model.get("text_config")
    return nested if isinstance(nested, dict) else {}


def _vocab_size(model: Mapping[str, object]) -> int | None:
    size = _text_config(model).get("vocab_size", model.get("vocab_size"))
    return size if isinstance(size, int) else None


def _chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{jinja}: is not UTF-8 (byte {error.start}); fetch the file again") from error
    processor = _read_json(folder / "chat_template.json")
    return default_template(processor.get("chat_template", config.get("chat_template")), str(folder))
