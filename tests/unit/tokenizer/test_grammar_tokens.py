"""Texts that a grammar forces, with a tokenizer that puts a space before a text, as Llama 2's does."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from graphcore.tokenizer.grammar import GrammarMask, GrammarTokens
from graphcore.tokenizer.tokenizer import Tokenizer

CONTROLS = ("<unk>", "<s>", "</s>")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> GrammarTokens:
    vocab = {name: at for at, name in enumerate(CONTROLS)}
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *'abcdefghijklmnopqrstuvwxyz"{}:,</>']
    merges = [("▁", "f"), ("f", "o"), ("fo", "o"), ("▁", "foo")]
    for piece in [*pieces, *map("".join, merges)]:
        vocab[piece] = len(vocab)
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROLS])
    folder: Path = tmp_path_factory.mktemp("prepends")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return GrammarTokens(Tokenizer.from_folder(folder), len(vocab), [2])


def pieces_of(tokens: GrammarTokens, mask: GrammarMask) -> list[str]:
    """Return the forced pieces, which the grammar then takes."""
    forced = list(mask.forced())
    mask.begin(forced)
    return [tokens.tokenizer.id_to_piece(token_id) for token_id in forced]


def test_a_forced_text_has_no_space_before_it(tokens: GrammarTokens) -> None:
    assert pieces_of(tokens, GrammarMask(tokens, "choice", ["foo"])) == ["foo"]


def test_a_forced_text_after_others_has_none_either(tokens: GrammarTokens) -> None:
    schema = {"type": "object", "properties": {"foo": {"type": "boolean"}}, "required": ["foo"]}
    mask = GrammarMask(tokens, "json_schema", {**schema, "additionalProperties": False})
    for piece in ("{", '"'):
        mask.begin([tokens.tokenizer.encode(piece, add_special_tokens=False)[-1]])
    assert pieces_of(tokens, mask)[0] == "foo"


def test_a_text_that_spells_a_control_token_is_text_without_a_space_before_it(tokens: GrammarTokens) -> None:
    assert pieces_of(tokens, GrammarMask(tokens, "choice", ["foo</s>b"])) == ["foo", "<", "/", "s", ">", "b"]
