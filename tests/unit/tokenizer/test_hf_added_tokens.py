"""Tokens that a folder's other files name get transformers' ids, flags and places in a text."""

import json
from pathlib import Path

import pytest
from support.golden_vocab import golden_tokenizer
from transformers import AutoTokenizer

from graphcore.tokenizer.tokenizer import Tokenizer

END = "<|endoftext|>"
SPECIAL = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
COUNT = golden_tokenizer("gpt-2").vocab_size  # the first free id


def stated(**tokens: int) -> dict[str, object]:
    """Return an `added_tokens_decoder` of special tokens <name> with these ids."""
    return {"added_tokens_decoder": {str(at): {"content": f"<{name}>", **SPECIAL} for name, at in tokens.items()}}


def one(content: str, at: int = COUNT, **flags: bool) -> dict[str, object]:
    return {"added_tokens_decoder": {str(at): {"content": content, **SPECIAL, **flags}}, "eos_token": END}


CONFIGS: dict[str, dict[str, object]] = {
    "eos that tokenizer.json lacks": {"eos_token": "<|im_end|>"},
    "several": {"eos_token": "<|im_end|>", "pad_token": "<pad>", "bos_token": "<|im_start|>", "unk_token": None},
    "an ordinary token": {"eos_token": "!", "bos_token": END},
    "a gap": {**stated(new=COUNT + 5), "eos_token": "<new>"},
    "a taken id": {**stated(new=5, other=7), "eos_token": END},
    "out of order": {**stated(b=COUNT + 9, a=COUNT + 3), "eos_token": "<|c|>", "pad_token": "<a>"},
    "ordinary": one("<t>", special=False, normalized=True),
    "ordinary, but named": one("<t>", special=False) | {"eos_token": "<t>"},
    "strips": one("<t>", rstrip=True, lstrip=True),
    "a word": one("world", single_word=True),
    "few flags": {"added_tokens_decoder": {str(COUNT): {"content": "<t>"}}, "eos_token": END},
    "a list": {"additional_special_tokens": ["<e1>", {"content": "<e2>", "__type": "AddedToken", **SPECIAL}]},
    "a list by its new name": {"eos_token": END, "extra_special_tokens": ["<e1>", "<e2>"]},
    "an object": {"eos_token": END, "extra_special_tokens": {"image_token": "<img>", "boi_token": "<boi>"}},
    "a name of the model's own": {"eos_token": END, "image_token": "<img>"},
    "an object with flags": {"eos_token": {"content": "<e>", "__type": "AddedToken", **SPECIAL, "rstrip": True}},
    "null": {"eos_token": None, "bos_token": END},
    "an empty decoder": {"eos_token": "<|im_end|>", "added_tokens_decoder": {}},
}
FILES: dict[str, dict[str, dict[str, object]]] = {
    "a map": {"special_tokens_map.json": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<q>"]}},
    "a map against the config": {
        "tokenizer_config.json": {"eos_token": END},
        "special_tokens_map.json": {"eos_token": "!"},
    },
    "a map with objects": {"special_tokens_map.json": {"pad_token": {"content": "<pad>", "lstrip": True}}},
    "a map beside a decoder": {
        "tokenizer_config.json": one(END, COUNT - 1),
        "special_tokens_map.json": {"pad_token": "<p>"},
    },
    "added tokens": {"added_tokens.json": {"<t>": COUNT, "<u>": COUNT + 1}},
    "added tokens that are named": {
        "tokenizer_config.json": {"eos_token": "<t>"},
        "added_tokens.json": {"<t>": COUNT + 4},
    },
}
CASES = {**{name: {"tokenizer_config.json": config} for name, config in CONFIGS.items()}, **FILES}


@pytest.mark.parametrize("case", CASES)
def test_ids_and_texts_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    golden_tokenizer("gpt-2")._backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **CASES[case].get("tokenizer_config.json", {})}
    files = CASES[case] | {"tokenizer_config.json": config}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    ours, theirs = Tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    added = [token.content for token in theirs.added_tokens_decoder.values()]
    for token in (*added, "!"):
        for text in (f"Hello{token} world", f"a {token} {token}b"):
            ids = theirs.encode(text)
            assert ours.encode(text) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.bos_token_id == theirs.bos_token_id
    assert list(ours.eos_token_ids) == [at for at in (theirs.eos_token_id,) if at is not None]
    assert dict(ours._parts.template_variables) == theirs.special_tokens_map
    skipped = {at for at in theirs.added_tokens_decoder if not theirs.decode([at], skip_special_tokens=True)}
    assert ours.special_ids == skipped


def test_ids_other_than_the_stated_ones_are_a_note(tmp_path: Path) -> None:
    golden_tokenizer("gpt-2")._backend.save(str(tmp_path / "tokenizer.json"))
    config = {**stated(new=5), "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    moved, new = Tokenizer(str(tmp_path)).notes
    as_theirs = "as in transformers its id is"
    assert (
        moved
        == f"{tmp_path}: the files give '<new>' the id 5, which tokenizer.json cannot give it; {as_theirs} {COUNT}"
    )
    assert new == f"{tmp_path}: tokenizer.json has no '<|im_end|>', which other files name; {as_theirs} {COUNT + 1}"
