"""Reads the tokenizer of a Hugging Face folder.

`tokenizer.json` says how text becomes ids, BOS and EOS included (`add_bos_token` in `tokenizer_config.json` has no
effect beside it, as in transformers 5). These files are optional: `tokenizer_config.json` and `special_tokens_map.json`
(special tokens), `generation_config.json` and `config.json` (more ids that end a generation), and
`chat_template.jinja`, `chat_template.json` or an entry of `tokenizer_config.json` (the first that exists counts).
Further templates have names, in `additional_chat_templates/` or in the entry; "tool_use" is used where tools are given.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from graphcore.checkpoint.generation_config import read_generation_config
from graphcore.checkpoint.json_object import how_to_mend
from graphcore.checkpoint.token_ids import read_special_ids
from graphcore.errors import TokenizerError, UnreadTokenizerError, quoted
from graphcore.tokenizer.chat_template import has_tags, named_templates
from graphcore.tokenizer.hf_added_tokens import add_special_tokens
from graphcore.tokenizer.tokenizer_json import read_tokenizer_json
from graphcore.tokenizer.tokenizer_parts import TokenizerParts, bos_eos_processor

_SPACE = "\u2581"
_OTHER_FORMS = ("tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json", "spiece.model")
_TEKKEN = "tekken.json"
_TEKKEN_NAMES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_OPTIONAL_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json")


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has a tokenizer in any form."""
    return any((folder / name).is_file() for name in ("tokenizer.json", *_OTHER_FORMS))


def read_folder(folder: Path, is_as_stored: bool = False) -> TokenizerParts:
    """Return the parts of the folder's tokenizer.

    Args:
        is_as_stored: True for the ids of tokenizer.json, whatever class and treatment of special tokens the folder
            names for transformers.

    Raises:
        TokenizerError: the folder has no tokenizer, or one of its files is damaged or names an unknown token.
    """
    backend, defaults = _read_backend(folder)
    config = {**defaults, **_read_json(folder / "tokenizer_config.json")}
    special_map, added = (_read_json(folder / name) for name in ("special_tokens_map.json", "added_tokens.json"))
    model_config = _read_json(folder / "config.json")
    on_class = () if is_as_stored else _apply_llama_class(backend, config, model_config, str(folder))
    special = add_special_tokens(backend, config, special_map, added, str(folder))
    backend.encode_special_tokens = not is_as_stored and config.get("split_special_tokens") is True
    templates = _chat_templates(folder, config)
    bos_id, eos_id = (_token_id(backend, special.named.get(name)) for name in ("bos_token", "eos_token"))
    return TokenizerParts(
        backend=backend,
        source=str(folder),
        bos_id=bos_id,
        eos_ids=_eos_ids(eos_id, read_generation_config(folder).settings, model_config),
        chat_template=templates.get("default") or None,
        tool_template=templates.get("tool_use") or None,
        template_variables=special.named,
        id_limit=_vocab_size(model_config),
        notes=(
            *_take_dropout_away(backend, folder),
            *on_class,
            *_notes_on_split(backend, folder),
            *special.notes,
            *_notes_on_empty_files(folder),
            *_notes_on_templates(templates, folder),
        ),
    )


def _read_backend(folder: Path) -> tuple[tokenizers.Tokenizer, Mapping[str, str]]:
    """Return the backend, and the named tokens of transformers' class if the folder has no tokenizer.json."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return read_tokenizer_json(path), {}
    if not has_tokenizer(folder):
        raise TokenizerError(
            f"{folder}: no tokenizer.json (nor {', '.join(_OTHER_FORMS)}); fetch it from the model's page, or run on "
            "token ids (prompt_ids)"
        )
    return _converted(folder)


def _converted(folder: Path) -> tuple[tokenizers.Tokenizer, Mapping[str, str]]:
    """Return transformers' conversion of an older form. Only such folders import transformers, which takes a second."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (ImportError, OSError, TypeError, ValueError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise UnreadTokenizerError(
            f"{folder}: no tokenizer.json, and transformers cannot make one of the other files ({reason:.200}); save "
            "one with AutoTokenizer.from_pretrained(...).save_pretrained(folder), or run on token ids (prompt_ids)"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnreadTokenizerError(
            f"{folder}: {type(tokenizer).__name__} has no tokenizer.json form, which text needs; run on token ids "
            "(prompt_ids)"
        )
    if (folder / _TEKKEN).is_file() and not tokenizer.special_tokens_map:
        return _with_bos(tokenizer.backend_tokenizer), _TEKKEN_NAMES
    return tokenizer.backend_tokenizer, tokenizer.special_tokens_map


def _with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer of tekken.json that puts BOS before a text, as mistral-common does."""
    backend.post_processor = bos_eos_processor(backend.token_to_id(_TEKKEN_NAMES["bos_token"]), None)
    return backend


def _read_json(path: Path) -> dict[str, object]:
    """Return the object in the file, or an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        raw = path.read_bytes()
        value = json.loads(raw.decode("utf-8-sig").strip() or "null")
    except RecursionError as error:
        raise TokenizerError(f"{path}: is nested too deep; fetch the file again") from error
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON ({error}); {how_to_mend(raw)}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds {type(value).__name__}, where an object is expected")
    return value


def _take_dropout_away(backend: tokenizers.Tokenizer, folder: Path) -> tuple[str, ...]:
    """Disable BPE dropout, which would make the ids of a text random, and return a note if it was enabled."""
    model = backend.model
    if not isinstance(model, models.BPE) or not model.dropout:
        return ()
    dropout, model.dropout = model.dropout, None
    return (f"{folder}: tokenizer.json has a dropout of {dropout:.3g}, which is for training; no merge is left out",)


def _apply_llama_class(
    backend: tokenizers.Tokenizer, config: Mapping[str, object], model: Mapping[str, object], folder: str
) -> tuple[str, ...]:
    """Put spaces before text as LlamaTokenizer of transformers 5 does if the folder names it, and return a note.

    Like most classes it takes words and merges of tokenizer.json, but it makes the normalizer anew:

        tokenizer.json    <s>hello</s>\\nhello   ->   <s> _hello </s> _\\nhello    a space before each stretch of text
        the class         <s>hello</s>\\nhello   ->   <s> hello </s> \\n hello     one before the beginning of a text

    `legacy: true` asks for the former, and `add_prefix_space: false` for no space. The other classes of the model
    families make what published files say. Source: transformers, models/llama/tokenization_llama.py, and
    models/auto/tokenization_auto.py for the folders to which the class applies.
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


def _token_id(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _notes_on_split(backend: tokenizers.Tokenizer, folder: Path) -> tuple[str, ...]:
    note = f"{folder}: tokenizer_config.json asks for split_special_tokens: special tokens in a text or chat stay text"
    return (note,) if backend.encode_special_tokens else ()


def _notes_on_templates(templates: Mapping[str, str], folder: Path) -> tuple[str, ...]:
    default = templates.get("default", "")
    if default and not has_tags(default):
        return (f"{folder}: the chat template {quoted(default)} is no Jinja template: the model reads no message",)
    if not templates or "default" in templates:
        return ()
    return (f"{folder}: no chat template is called 'default', only {quoted(', '.join(sorted(templates)))}",)


def _notes_on_empty_files(folder: Path) -> tuple[str, ...]:
    files = [folder / name for name in _OPTIONAL_FILES]
    empty = [file.name for file in files if file.is_file() and file.read_bytes().strip() in (b"", b"null")]
    return tuple(f"{folder}: {name} is empty" for name in empty)


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


def _chat_templates(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Return the chat templates by name; the one that is used without tools is called "default"."""
    processor = _read_json(folder / "chat_template.json")
    found = named_templates(processor.get("chat_template", config.get("chat_template")), str(folder))
    others = sorted((folder / "additional_chat_templates").glob("[!.]*.jinja"))
    files = {"default": folder / "chat_template.jinja", **{file.stem: file for file in others}}
    return {**found, **{name: _read_text(file) for name, file in files.items() if file.is_file()}}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file}: is not UTF-8 (byte {error.start}); fetch the file again") from error
