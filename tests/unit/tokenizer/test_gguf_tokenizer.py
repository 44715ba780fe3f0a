"""GGUF metadata becomes the tokenizer that the model was trained with."""

from itertools import product as every_pair

import pytest
from support.cases import in_case
from support.golden_vocab import NAMES, golden_tokenizer, golden_vocab
from tokenizers import Regex, pre_tokenizers

from graphcore.errors import TokenizerError
from graphcore.tokenizer.gguf_bpe import LLAMA3_VOCAB, find_splitter
from graphcore.tokenizer.gguf_tokenizer import has_vocab
from graphcore.tokenizer.tokenizer import Tokenizer

ADDS_BOS = {"llama-bpe", "llama-spm", "phi-3", "gemma3", "gemma4"}


def changed(name: str, **keys: object) -> dict[str, object]:
    """The golden metadata with other values under tokenizer.ggml; None takes the key away."""
    metadata = {**golden_vocab(name).metadata, **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}}
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_published_tokenizer(name: str) -> None:
    golden, tokenizer = golden_vocab(name), golden_tokenizer(name)
    assert len(golden.cases) > 40
    wrong = [
        (text, ids, golden.in_full(found))
        for text, ids in golden.cases
        if golden.in_full(found := tokenizer.encode(text, add_special_tokens=False)) != ids
    ]
    assert wrong == []


def words(pre: str, text: str) -> list[tuple[int, int]]:
    """Return the begin and end of each word that a splitter cuts text into."""
    (pattern,) = find_splitter(pre, 0).patterns
    splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [place for _, place in splitter.pre_tokenize_str(text)]


def test_words_of_qwen_3_5_are_those_of_transformers_own_class() -> None:
    """Its own vocabulary is not at hand. Unlike Qwen 2's, its words keep combining marks."""
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    golden = golden_vocab("qwen2")
    tokens, merges = (golden.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
    theirs = Qwen3_5Tokenizer({token: at for at, token in enumerate(tokens)}, [tuple(one.split(" ")) for one in merges])
    split = theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    marked = "\u0939\u093f\u0928\u094d\u0926\u0940 1234 e\u0328\u0301x !\u0301a"
    texts = [text for text, _ in golden.cases] + [marked]
    assert [words("qwen35", text) for text in texts] == [[place for _, place in split(text)] for text in texts]
    assert words("qwen35", marked) != words("qwen2", marked)
    ours = Tokenizer.from_gguf(changed("qwen2", pre="qwen35"), "m")
    plain = [text for text in texts if "<" not in text]
    found = [ours.encode(text, add_special_tokens=False) for text in plain]
    assert found == [theirs.encode(text, add_special_tokens=False) for text in plain]


@pytest.mark.parametrize("name", ["gpt-2", "gpt-4o", "llama-bpe", "smollm", "starcoder", "gemma3", "gemma4"])
def test_decoding_gives_back_the_text(name: str) -> None:
    tokenizer = golden_tokenizer(name)
    for text, _ in golden_vocab(name).cases:
        if "\u2581" not in text:  # SentencePiece spells a space so: a literal one comes back as a space
            assert (
                tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False).removeprefix(
                    "<bos>" if name in ("gemma3", "gemma4") else "<|begin_of_text|>" if name == "llama-bpe" else ""
                )
                == text
            )


def test_legacy_sentencepiece_puts_a_space_before_text_and_takes_it_away_again() -> None:
    tokenizer = golden_tokenizer("llama-spm")
    assert tokenizer.id_to_piece(tokenizer.encode("Hello", add_special_tokens=False)[0]) == "\u2581Hello"
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    assert tokenizer.decode(tokenizer.encode(" Hello")) == " Hello"


@pytest.mark.parametrize("name", NAMES)
def test_bos_is_added_exactly_where_llama_cpp_adds_it(name: str) -> None:
    tokenizer = golden_tokenizer(name)
    plain, whole = tokenizer.encode("Hello", add_special_tokens=False), tokenizer.encode("Hello")
    assert whole == ([tokenizer.bos_token_id, *plain] if name in ADDS_BOS else plain)


def test_the_files_flags_decide_over_the_splitters_habit() -> None:
    without = Tokenizer.from_gguf(changed("llama-bpe", add_bos_token=False), "m")
    assert without.encode("a") == without.encode("a", add_special_tokens=False)
    with_both = Tokenizer.from_gguf(changed("gpt-2", add_bos_token=True, add_eos_token=True), "m")
    plain = with_both.encode("a", add_special_tokens=False)
    assert with_both.encode("a") == [with_both.bos_token_id, *plain, with_both.eos_token_id]


def test_gemma_4_adds_bos_even_if_the_file_says_no() -> None:
    """Early converters wrote no by mistake; llama.cpp adds it, too."""
    tokenizer = Tokenizer.from_gguf(changed("gemma4", add_bos_token=False), "m")
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id


def test_gemma_4_has_control_tokens_that_its_file_stores_as_user_defined() -> None:
    tokenizer = golden_tokenizer("gemma4")
    ids = tokenizer.encode('<|tool_call>call:f{a:<|"|>x y<|"|>}<tool_call|>')
    assert tokenizer.decode(ids) == "call:f{a:x y}"
    assert tokenizer.decode(ids, skip_special_tokens=False) == '<bos><|tool_call>call:f{a:<|"|>x y<|"|>}<tool_call|>'


def test_llama3_vocabulary_without_pre_is_split_as_llama3() -> None:
    golden = golden_vocab("llama-bpe")
    tokens, types = (golden.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    filler = tuple(f"<|filler_{i}|>" for i in range(LLAMA3_VOCAB - len(tokens)))
    metadata = changed("llama-bpe", pre=None, tokens=tokens + filler, token_type=types + (5,) * len(filler))
    tokenizer = Tokenizer.from_gguf(metadata, "bitnet.gguf")
    for text, ids in golden.cases:
        assert golden.in_full(tokenizer.encode(text, add_special_tokens=False)) == ids
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("gpt-2", ["<|endoftext|>"]),
        ("llama-bpe", ["<|end_of_text|>", "<|eot_id|>"]),
        ("qwen2", ["<|endoftext|>", "<|im_end|>"]),
        ("gpt-4o", ["<|endoftext|>", "<|return|>", "<|call|>"]),
        ("gemma3", ["<eos>", "<end_of_turn>"]),
        ("gemma4", ["<eos>", "<turn|>", "<|tool_response>"]),
        ("llama-spm", ["</s>"]),
    ],
)
def test_every_way_to_end_a_turn_is_an_eos(name: str, ends: list[str]) -> None:
    tokenizer = golden_tokenizer(name)
    assert {tokenizer.id_to_piece(token_id) for token_id in tokenizer.eos_token_ids} == set(ends)
    assert tokenizer.eos_token_id == (tokenizer.eos_token_ids[0] if len(ends) == 1 else list(tokenizer.eos_token_ids))


def test_eot_and_eom_keys_count_beside_the_spellings_of_ends() -> None:
    tokens = ("a", "b", "<|im_end|>", "<|eot_id|>")
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": (1, 1, 1, 4),
        "tokenizer.ggml.merges": ("a b",),
        "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.ggml.eom_token_id": 0,
    }
    metadata["tokenizer.ggml.tokens"] = ("a", "b", "<|im_end|>", "<|eot_id|>", "ab")
    metadata["tokenizer.ggml.token_type"] = (1, 1, 1, 4, 1)
    tokenizer = Tokenizer.from_gguf(metadata, "m.gguf")
    assert tokenizer.eos_token_ids == (0, 1, 2, 3)
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("ab<|eot_id|>b") == [4, 3, 1]
    assert tokenizer.vocab_size == 5


def test_sentencepiece_ids_that_a_file_leaves_out_are_llama_2s() -> None:
    keys = ("bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token", "add_space_prefix")
    tokenizer = Tokenizer.from_gguf(changed("llama-spm", **dict.fromkeys(keys)), "m")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("Hello") == golden_tokenizer("llama-spm").encode("Hello")


def test_a_special_token_id_outside_the_vocabulary_counts_as_absent() -> None:
    """llama.cpp's rule (llama-vocab.cpp: "bad special token ... using default id"), which keeps SentencePiece's ids."""
    for value, key, name in every_pair(
        [2**32 - 1, -1, 10**6, True, "x", 1.5],
        ["bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id", "padding_token_id"],
        ["llama-spm", "gpt-2"],
    ):
        with in_case(value, key, name):
            absent = Tokenizer.from_gguf(changed(name, **{key: None}), "m")
            ours = Tokenizer.from_gguf(changed(name, **{key: value}), "m")
            assert ours.encode("Hello world") == absent.encode("Hello world")
            assert (ours.bos_token_id, ours.eos_token_ids) == (absent.bos_token_id, absent.eos_token_ids)
            if name == "llama-spm" and not key.startswith("eo"):
                assert ours.bos_token_id == 1
            assert ours._parts.template_variables == absent._parts.template_variables


@pytest.mark.parametrize("name", NAMES)
def test_no_id_is_outside_the_vocabulary(name: str) -> None:
    tokenizer = golden_tokenizer(name)
    stored = golden_vocab(name).metadata["tokenizer.ggml.tokens"]
    assert isinstance(stored, tuple)
    assert tokenizer.vocab_size == len(stored)
    text = "".join(stored) + "<|endoftext|><|im_end|><s></s><bos><image_soft_token>"
    assert max(tokenizer.encode(text)) < len(stored)


def test_control_tokens_are_left_out_of_decoded_text_and_user_defined_ones_are_not() -> None:
    tokenizer = golden_tokenizer("gemma3")
    ids = tokenizer.encode("<start_of_turn>a<h1>b</h1><end_of_turn>\n")
    assert tokenizer.decode(ids) == "a<h1>b</h1>\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos><start_of_turn>a<h1>b</h1><end_of_turn>\n"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": 3}, "pre is 3, where str is expected"),
        ({"model": None}, "model is missing"),
        ({"model": "t5"}, "model 't5' is not supported; known: gpt2, llama, gemma4; run on token ids"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": ()}, "tokens is not an array with elements"),
        ({"tokens": "abc"}, "tokens is not an array"),
        ({"merges": None}, "merges is missing"),
        ({"merges": (1, 2)}, "merges holds int, where str is expected"),
        ({"token_type": (1,)}, "token_type has 1 elements for 1237 tokens"),
        ({"add_bos_token": 1}, "add_bos_token is 1, where bool is expected"),
    ],
)
def test_a_damaged_vocabulary_is_refused_with_its_key(keys: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerError, match=rf"^model\.gguf: tokenizer\.ggml\.{message}") as caught:
        Tokenizer.from_gguf(changed("gpt-2", **keys), "model.gguf")
    assert "\n" not in str(caught.value)


def test_a_file_without_vocabulary_is_told_from_one_with() -> None:
    assert has_vocab(golden_vocab("gpt-2").metadata)
    assert not has_vocab({"general.architecture": "llama"})


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(TokenizerError, match="not valid Unicode at character 1"):
        golden_tokenizer("gpt-2").encode("a\udcff")


def test_negative_ids_are_refused_and_padding_ids_decode_to_nothing() -> None:
    tokenizer = golden_tokenizer("gpt-2")
    with pytest.raises(TokenizerError, match="-1 is negative"):
        tokenizer.decode([-1])
    assert tokenizer.decode([10**6]) == ""
    assert tokenizer.id_to_piece(10**6) == ""
