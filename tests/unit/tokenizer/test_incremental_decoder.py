"""Text printed id by id is the text of all ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.golden_vocab import NAMES, golden_tokenizer, golden_vocab

from graphcore.tokenizer.text_stream import IncrementalDecoder
from graphcore.tokenizer.tokenizer import Tokenizer

UNDECIDED = "\ufffd"


def pieces(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


def broken_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids that are a part of a character on their own."""
    return [i for i in range(tokenizer.vocab_size) if UNDECIDED in tokenizer.decode([i], skip_special_tokens=False)]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_random_ids_print_what_they_decode_to(name: str, data: st.DataObject) -> None:
    tokenizer = golden_tokenizer(name)
    anything = st.integers(0, tokenizer.vocab_size + 2)
    few = st.sampled_from(
        [*broken_ids(tokenizer)[:40], *sorted(tokenizer.special_ids)[:3], *tokenizer.encode(" a b  c")]
    )
    ids = data.draw(st.lists(anything | few | few, max_size=60))
    skip = data.draw(st.booleans())
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", NAMES)
def test_real_text_never_shows_half_a_character(name: str) -> None:
    tokenizer = golden_tokenizer(name)
    for text, _ in golden_vocab(name).cases:
        ids = tokenizer.encode(text)
        printed = pieces(tokenizer, ids)
        assert "".join(printed) == tokenizer.decode(ids)
        assert sum(piece.count(UNDECIDED) for piece in printed) == text.count(UNDECIDED)


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "gemma3", "llama-spm"])
@given(text=st.text(st.sampled_from("a \u00e9\u4e2d\U0001f600\ufffd\n\u2581"), max_size=30))
def test_characters_in_parts_and_real_replacement_characters_come_through(name: str, text: str) -> None:
    tokenizer = golden_tokenizer(name)
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_word_is_printed_with_its_id_and_a_character_with_its_last() -> None:
    tokenizer = golden_tokenizer("gpt-2")
    assert pieces(tokenizer, tokenizer.encode("Hello world")) == ["Hello", " world", ""]
    ids = tokenizer.encode("\U0001f9d1")
    assert len(ids) > 1
    assert pieces(tokenizer, ids) == [*[""] * (len(ids) - 1), "\U0001f9d1", ""]


def test_only_the_first_space_of_a_sentencepiece_text_is_dropped() -> None:
    tokenizer = golden_tokenizer("llama-spm")
    ids = tokenizer.encode("Hello world", add_special_tokens=False)
    assert pieces(tokenizer, ids) == ["Hello", " world", ""]
    eos = tokenizer.eos_token_id
    assert isinstance(eos, int)
    assert pieces(tokenizer, [ids[0], eos, ids[1]]) == ["Hello", "", " world", ""]


def test_an_unfinished_character_at_the_end_is_shown_by_flush() -> None:
    tokenizer = golden_tokenizer("gpt-2")
    ids = tokenizer.encode("ok \U0001f9d1")[:-1]
    assert pieces(tokenizer, ids)[-1] == UNDECIDED
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "ok " + UNDECIDED


def test_flush_starts_a_new_text() -> None:
    tokenizer = golden_tokenizer("llama-spm")
    decoder = IncrementalDecoder(tokenizer)
    (hello,) = tokenizer.encode("Hello", add_special_tokens=False)
    assert [decoder.push(hello), decoder.flush(), decoder.push(hello)] == ["Hello", "", "Hello"]


@pytest.mark.parametrize("name", ["gpt-2", "gemma3"])
def test_the_work_per_id_does_not_grow_with_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = golden_tokenizer(name)
    longest = 0
    decode = Tokenizer.decode

    def watched(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", watched)
    (real,) = [ids for text, ids in golden_vocab(name).cases if text == "\ufffd"] or [[]]
    assert real, "the vocabulary has no U+FFFD of its own"
    ids = tokenizer.encode("\ufffd" * 200 + "word " * 200, add_special_tokens=False)
    pieces(tokenizer, ids)
    assert longest <= 16
