"""Vocabularies with broken entries are read as llama.cpp reads them, with one note.

The expected ids are those of llama-cpp-python 0.3.36 on files with the same metadata. It ends its process over a token
that stands there twice; there the later id is expected, as in its table and in transformers'.
"""

from itertools import product as every_pair

import pytest
from support.cases import in_case
from support.golden_vocab import golden_vocab

from graphcore.errors import TokenizerError
from graphcore.tokenizer.text_stream import IncrementalDecoder
from graphcore.tokenizer.tokenizer import Tokenizer

TOKENS = ("a", "b", "c", "d", "\u0120", "ab", "abc", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "\u0120a")
TYPES = (1, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 1)
TEXTS = ("abc abd", "ab abcd a", "<|im_start|>a<|im_end|>b</s><s>", " a", "dab")
PLAIN = [[6, 4, 5, 3], [5, 4, 6, 3, 11], [7, 0, 8, 1, 10, 9], [11], [3, 5]]

BY_LETTER = [[0, 1, 2, 4, 0, 1, 3], [0, 1, 4, 0, 1, 2, 3, 4, 0], [7, 0, 8, 1, 10, 9], [4, 0], [3, 0, 1]]


def read(**keys: object) -> Tokenizer:
    """Return the tokenizer of a small vocabulary with other values under tokenizer.ggml; None takes a key away."""
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": ("a b", "ab c", "\u0120 a"),
        "bos_token_id": 9,
        "eos_token_id": 10,
        **keys,
    }
    return Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}, "m.gguf")


def with_token(token_id: int, token: str) -> tuple[str, ...]:
    return (*TOKENS[:token_id], token, *TOKENS[token_id + 1 :])


def test_ids_are_those_of_llama_cpp() -> None:
    for keys, ids, notes in [
        ({}, PLAIN, []),
        (
            {"token_type": None},
            [*PLAIN[:2], [0, 0, 8, 1, 10], *PLAIN[3:]],
            ["token_type is missing; control tokens are told by their spelling"],
        ),
        (  # "ab" is no token: merged on the way to "abc", and cut into bytes where it is left
            {"tokens": with_token(5, "zz")},
            [[6, 4, 0, 1, 3], [0, 1, 4, 6, 3, 11], PLAIN[2], PLAIN[3], [3, 0, 1]],
            ["merges names 1 pieces that are no tokens"],
        ),
        (
            {"tokens": with_token(1, "zz")},
            [*PLAIN[:2], [7, 0, 8, 10, 9], *PLAIN[3:]],
            ["merges names 1 pieces that are no tokens"],
        ),
        (
            {"merges": ("q r", "x", "  ", "a b", "a  b", "ab c", "a b", "\u0120 a", "", "d")},
            PLAIN,
            ["merges has 3 entries that do not name two tokens", "merges names 5 pieces that are no tokens"],
        ),
        (
            {"tokens": (*TOKENS, "abc"), "token_type": (*TYPES, 1)},
            [[12, 4, 5, 3], [5, 4, 12, 3, 11], *PLAIN[2:]],
            ["1 of tokenizer.ggml.tokens stand there twice ('abc')"],
        ),
        (
            {"tokens": with_token(3, "\udcff\udcfe")},
            [[6, 4, 5], [5, 4, 6, 11], PLAIN[2], PLAIN[3], [5]],
            ["1 of tokenizer.ggml.tokens are not UTF-8"],
        ),
        ({"token_type": (*TYPES, 1, 1)}, PLAIN, ["token_type has 14 elements for 12 tokens; the first ones count"]),
        (
            {"tokens": with_token(11, "")},
            [PLAIN[0], [5, 4, 6, 3, 0], PLAIN[2], [0], PLAIN[4]],
            ["merges names 1 pieces that are no tokens"],
        ),
        ({"merges": ()}, BY_LETTER, ["merges names no merges; text may be cut into other tokens"]),
        (
            {"merges": (), "pre": "llama-bpe"},
            [[9, 6, 4, 0, 1, 3], [9, 5, 4, 0, 1, 2, 3, 11], [9, 7, 0, 8, 1, 10, 9], [9, 11], [9, 3, 0, 1]],
            ["merges names no merges; text may be cut into other tokens"],
        ),
        (
            {"merges": None, "pre": "kimi-k2"},
            BY_LETTER,
            ["merges names no merges; text may be cut into other tokens"],
        ),
    ]:
        with in_case(keys, ids, notes):
            tokenizer = read(**keys)
            assert [tokenizer.encode(text) for text in TEXTS] == ids
            assert len(tokenizer.notes) == len(notes)
            for note, part in zip(tokenizer.notes, notes, strict=True):
                assert part in note
                assert note.startswith("m.gguf: ")
            assert tokenizer.eos_token_ids == (8, 10)
            assert tokenizer.vocab_size == len(keys.get("tokens", TOKENS))


def test_ordinary_tokens_with_the_spelling_of_control_tokens_are_those() -> None:
    for kind, (tokens, eos, ids, ends) in every_pair(
        [1, 5],
        [
            (["<|im_end|>"], 0, [2, 9, 2], (0, 9)),
            (["<|eot_id|>"], 0, [2, 9, 2], (0, 9)),
            (["<end_of_turn>"], 0, [2, 9, 2], (0, 9)),
            (["<|end|>"], 0, [2, 9, 2], (0, 9)),
            (["</s>"], 9, [2, 9, 2], (9,)),
            (["[PAD]", "<EOT>"], 0, [2, 9, 1, 10, 2], (0, 9, 10)),
            (["<|start|>", "<|im_start|>"], 0, [2, 9, 1, 3, 4, 0, 4, 5, 2], (0,)),
            (["<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>"], 0, [2, 9, 1, 10, 1, 11, 2], (0, 10, 11)),
            (["<|end|>", "<|return|>", "<|call|>", "<|message|>"], 0, [2, 9, 1, 10, 1, 11, 1, 12, 2], (0, 10, 11)),
        ],
    ):
        with in_case(kind, tokens, eos, ids, ends):
            words = ("a", "b", "ab", "<", "|", ">", "e", "n", "d", *tokens)
            types = (*[1] * 9, *[kind] * len(tokens))
            tokenizer = read(tokens=words, token_type=types, merges=("a b",), bos_token_id=None, eos_token_id=eos)
            assert tokenizer.encode(f"ab{'b'.join(tokens)}ab") == ids
            assert tokenizer.eos_token_ids == ends
            (note,) = tokenizer.notes
            assert "token_type has ordinary tokens with the spelling of control tokens" in note


def test_ordinary_markup_of_web_pages_ends_nothing() -> None:
    """Here llama.cpp gives [2, 9, 2], but Qwen was trained with `</s>` as text."""
    tokens = ("a", "b", "ab", "<", "/", "s", ">", "x", "y", "</s>")
    tokenizer = read(tokens=tokens, token_type=(1,) * 10, merges=("a b",), bos_token_id=None, eos_token_id=0)
    assert (tokenizer.encode("ab</s>ab"), tokenizer.eos_token_ids) == ([2, 3, 4, 5, 6, 2], (0,))
    assert tokenizer.notes == ()


def test_beside_a_tool_response_the_end_of_a_sentence_is_text() -> None:
    """In Gemma 4's vocabulary </s> is a normal token; without token_type, its control tokens tell that."""
    tokens = (*TOKENS[:7], "<|tool_response>", "<|im_end|>", "<s>", "<", "/", "s", ">", "\u0120a", "</s>")
    tokenizer = read(tokens=tokens, token_type=None, eos_token_id=8)
    assert tokenizer.encode("<|tool_response>a<|im_end|>b</s><s>") == [7, 0, 8, 1, 10, 11, 12, 13, 10, 12, 13]
    assert tokenizer.encode("a</s>b") == [0, 10, 11, 12, 13, 1]
    assert tokenizer.special_ids == {7, 8}
    assert tokenizer.eos_token_ids == (7, 8)


def test_both_ids_of_a_spelling_decode_to_it() -> None:
    tokenizer = read(tokens=(*TOKENS, "abc"), token_type=(*TYPES, 1))
    assert tokenizer.decode([6, 4, 12]) == "abc abc"
    assert [tokenizer.id_to_piece(token_id) for token_id in (6, 12)] == ["abc", "abc"]
    stream = IncrementalDecoder(tokenizer)
    assert stream.push(6) + stream.push(12) + stream.flush() == "abcabc"


def test_a_token_that_is_not_utf_8_decodes_to_nothing() -> None:
    tokenizer = read(tokens=with_token(3, "\udcff\udcfe"))
    assert tokenizer.decode([0, 3, 1]) == "ab"
    assert tokenizer.id_to_piece(3) == ""
    stream = IncrementalDecoder(tokenizer)
    assert stream.push(0) + stream.push(3) + stream.push(1) + stream.flush() == "ab"


def test_a_template_that_is_not_utf_8_has_replacement_characters() -> None:
    metadata = golden_vocab("gpt-2").metadata | {"tokenizer.chat_template": "x\udcff{{ messages[0].content }}"}
    assert Tokenizer.from_gguf(metadata, "m").render_chat([{"role": "user", "content": "y"}]) == "x\ufffdy"


def test_the_name_chatml_is_llama_cpps_template() -> None:
    """The text to expect is that of llama.cpp's `llama_chat_apply_template` for the name."""
    metadata = golden_vocab("smollm").metadata | {"tokenizer.chat_template": "chatml"}
    text = Tokenizer.from_gguf(metadata, "m").render_chat([{"role": "user", "content": "hello"}])
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template", ["llama2", "", "Answer briefly."])
def test_a_template_that_no_message_enters_is_left_out(template: str) -> None:
    tokenizer = Tokenizer.from_gguf(golden_vocab("smollm").metadata | {"tokenizer.chat_template": template}, "m")
    assert not tokenizer.has_chat_template
    assert tokenizer.notes[-1] == f"m: tokenizer.chat_template '{template}' is no Jinja template; it is left out"


@pytest.mark.parametrize(
    ("name", "keys", "note"),
    [
        ("llama-spm", {"token_type": None}, "token_type is missing"),
        ("gemma4", {"token_type": None}, "token_type is missing"),
        ("llama-spm", {"pre": "any"}, None),
        ("gemma4", {"model": "gpt2", "pre": "gemma4"}, None),
        ("gemma4", {"model": "gpt2", "pre": "sarvam-moe"}, None),
        ("gemma4", {"model": "gpt2", "pre": "granite-embed-multi-311m", "add_bos_token": None}, None),
    ],
)
def test_sentencepiece_vocabularies_give_the_same_ids(name: str, keys: dict[str, object], note: str | None) -> None:
    """So they do in llama.cpp, which reads Gemma 4's under three names."""
    golden = golden_vocab(name)
    changed = golden.metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    tokenizer = Tokenizer.from_gguf({key: value for key, value in changed.items() if value is not None}, "m")
    plain = Tokenizer.from_gguf(golden.metadata, "m")
    texts = [text for text, _ in golden.cases if not any(mark in text for mark in "<[|>]")]
    assert len(texts) > 30
    assert [tokenizer.encode(text) for text in texts] == [plain.encode(text) for text in texts]
    assert len(tokenizer.notes) == (note is not None)
    assert note is None or note in tokenizer.notes[0]


def test_scores_that_are_missing_are_a_note() -> None:
    metadata = dict(golden_vocab("llama-spm").metadata)
    del metadata["tokenizer.ggml.scores"]
    tokenizer = Tokenizer.from_gguf(metadata, "m")
    assert tokenizer.encode("Hello world") == Tokenizer.from_gguf(golden_vocab("llama-spm").metadata, "m").encode(
        "Hello world"
    )
    assert tokenizer.notes == ("m: tokenizer.ggml.scores is missing; text may be cut into other tokens",)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "hybriddna", "whitespace"])
def test_kinds_that_are_not_read_are_named(model: str) -> None:
    with pytest.raises(TokenizerError, match=f"model '{model}' is not supported.*prompt_ids"):
        read(model=model)


def test_of_equal_merges_the_first_counts() -> None:
    """llama.cpp's table keeps the first rank: "b c" comes before the second "a b"."""
    tokens = (*TOKENS, "bc")
    tokenizer = read(tokens=tokens, token_type=(*TYPES, 1), merges=("a b", "b c", "a b"))
    assert tokenizer.encode("abc") == [5, 2]
