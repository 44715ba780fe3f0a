"""A Hugging Face folder gives the tokenizer that transformers reads from it."""

import base64
import copy
import json
from itertools import product as every_pair
from pathlib import Path

import pytest
from support.cases import in_case
from support.golden_vocab import golden_tokenizer, golden_vocab
from tokenizers import pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from graphcore.errors import LONGEST, TokenizerError
from graphcore.tokenizer.hf_folder import has_tokenizer
from graphcore.tokenizer.tokenizer import Tokenizer

END = "<|endoftext|>"


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """GPT-2's cut-down vocabulary as tokenizer.json, alone."""
    golden_tokenizer("gpt-2")._backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def end_id() -> int:
    (token_id,) = golden_tokenizer("gpt-2").eos_token_ids
    return token_id


def test_special_tokens_are_added_as_transformers_adds_them(folder: Path, end_id: int) -> None:
    for config, has_rule in every_pair(
        [
            {},
            {"bos_token": END},
            {"bos_token": END, "eos_token": {"content": END, "__type": "AddedToken"}, "add_bos_token": True},
            {"bos_token": END, "eos_token": END, "add_bos_token": True, "add_eos_token": True},
            {"bos_token": END, "eos_token": END, "add_bos_token": False},
            {"bos_token": None, "eos_token": END, "add_eos_token": True},
        ],
        [True, False],
    ):
        with in_case(config, has_rule):
            if has_rule:
                backend = type(golden_tokenizer("gpt-2")._backend).from_file(str(folder / "tokenizer.json"))
                backend.post_processor = TemplateProcessing("$A E:0", special_tokens=[("E", end_id)])
                backend.save(str(folder / "tokenizer.json"))
            write(folder, "tokenizer_config.json", {**config, "tokenizer_class": "PreTrainedTokenizerFast"})
            theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer(str(folder))
            for text in ("Hello world", "", f"a{END}b", " \u00e9 12345\n"):
                assert ours.encode(text) == theirs.encode(text)
                assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
            ids = theirs.encode(f"Hello{END} world !")
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
            assert ours.bos_token_id == theirs.bos_token_id


def test_eos_is_the_union_of_all_files(folder: Path, end_id: int) -> None:
    assert Tokenizer(str(folder)).eos_token_id == []
    write(folder, "tokenizer_config.json", {"eos_token": END})
    assert Tokenizer(str(folder)).eos_token_id == end_id
    write(folder, "generation_config.json", {"eos_token_id": [7, 3]})
    write(folder, "config.json", {"eos_token_id": 5})
    assert Tokenizer.from_folder(folder).eos_token_id == sorted({3, 5, 7, end_id})
    write(folder, "config.json", {"text_config": {"eos_token_id": [6]}})
    assert Tokenizer.from_folder(folder).eos_token_ids == tuple(sorted({3, 6, 7, end_id}))


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ('{"eos_token_id": "7"}', {7}),
        ('{"eos_token_id": [7.0, null, -1, 4294967295, true, "x"]}', {7}),
        ('\ufeff{"eos_token_id": 7,}', {7}),
        ("", set()),
        ("[7]", set()),
        ('{"eos_token_id": 7', set()),
    ],
)
def test_a_generation_config_never_keeps_a_tokenizer_from_being_read(
    folder: Path, end_id: int, text: str, ends: set[int]
) -> None:
    write(folder, "tokenizer_config.json", {"eos_token": END})
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    assert set(Tokenizer(str(folder)).eos_token_ids) == ends | {end_id}


def test_a_template_that_no_message_enters_is_a_note(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"chat_template": "chatml"})
    ours, theirs = Tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "hello"}]
    assert ours.render_chat(messages) == theirs.apply_chat_template(messages, tokenize=False) == "chatml"
    assert ours.notes == (f"{folder}: the chat template 'chatml' is no Jinja template: the model reads no message",)


@pytest.mark.parametrize("scheme", [None, "first", "always"])
@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({}, "first"),
        ({"tokenizer_class": "LlamaTokenizerFast", "legacy": False, "add_bos_token": True}, "first"),
        ({"legacy": True, "add_bos_token": False, "add_eos_token": True}, "always"),
        ({"legacy": None, "add_prefix_space": None}, "first"),
        ({"add_prefix_space": False}, "never"),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "legacy": False, "add_prefix_space": False}, None),
    ],
)
def test_spaces_are_those_of_the_class_that_a_folder_names(
    config: dict[str, object], where: str | None, scheme: str | None, tmp_path: Path
) -> None:
    """`scheme`: how tokenizer.json itself puts spaces, None for the normalizer of Llama 2's."""
    backend = copy.deepcopy(golden_tokenizer("llama-spm")._backend)
    if scheme is not None:
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    write(tmp_path, "tokenizer_config.json", named | config)
    write(tmp_path, "config.json", {"model_type": "llama"})
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(str(tmp_path))
    for text in ("hello", "  lead", "<s>hello", "x</s>\nhello </s> a", "<s>[INST] hello [/INST]", ""):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids, False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert len(ours.notes) == (where not in (None, scheme))


def test_a_class_that_transformers_does_not_believe_changes_nothing(tmp_path: Path) -> None:
    golden_tokenizer("llama-spm")._backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False})
    write(tmp_path, "config.json", {"model_type": "mistral"})
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(str(tmp_path))
    assert ours.encode("x</s> hello") == theirs.encode("x</s> hello")
    assert ours.notes == ()


def test_special_tokens_stay_text_if_the_folder_asks_for_it(folder: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
    config = {"eos_token": END, "split_special_tokens": True, "chat_template": template}
    write(folder, "tokenizer_config.json", config)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer(str(folder))
    messages = [{"role": "user", "content": f"a{END}"}]
    for _ in range(2):
        assert ours.encode(f"a{END}b") == ours.encode(f"a{END}b", is_plain=True) == theirs.encode(f"a{END}b")
        assert ours.encode_chat(messages) == theirs.apply_chat_template(messages, return_dict=False)
    assert "split_special_tokens" in ours.notes[0]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_git_lfs_pointer_is_named_as_such(name: str, folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (folder / name).write_text(pointer, encoding="utf-8")
    with pytest.raises(TokenizerError, match=f"{name}: not .*it is a Git LFS pointer: run `git lfs pull`"):
        Tokenizer(str(folder))


def test_dropout_left_from_training_is_taken_away(folder: Path) -> None:
    """The ids to expect are transformers' for the same file without dropout."""
    text, theirs = "hello world, the quick brown fox " * 4, AutoTokenizer.from_pretrained(folder)
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["dropout"] = 0.9
    write(folder, "tokenizer.json", described)
    ours = Tokenizer(str(folder))
    assert {tuple(ours.encode(text)) for _ in range(5)} == {tuple(theirs.encode(text))}
    assert ours.notes == (
        f"{folder}: tokenizer.json has a dropout of 0.9, which is for training; no merge is left out",
    )


def test_byte_order_marks_of_windows_editors_are_left_out(folder: Path, end_id: int) -> None:
    (folder / "config.json").write_text('\ufeff{"eos_token_id": 7, "vocab_size": 50257}', encoding="utf-8")
    (folder / "tokenizer_config.json").write_text("\ufeff" + json.dumps({"eos_token": END}), encoding="utf-8")
    assert set(Tokenizer(str(folder)).eos_token_ids) == {7, end_id}


def test_tokens_that_only_the_config_has_are_added(folder: Path, end_id: int) -> None:
    flags = {"lstrip": False, "normalized": False, "rstrip": True, "single_word": False, "special": True}
    added = {str(end_id + 1): {"content": "<|new|>", **flags}, str(end_id): {"content": END, **flags}}
    config = {"added_tokens_decoder": added, "eos_token": "<|new|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write(folder, "tokenizer_config.json", config)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer(str(folder))
    assert ours.eos_token_id == end_id + 1 == theirs.eos_token_id
    ids = theirs.encode("Hello<|new|>  world")
    assert ours.encode("Hello<|new|>  world") == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_special_tokens_map_counts_as_in_transformers(folder: Path, end_id: int) -> None:
    write(folder, "special_tokens_map.json", {"bos_token": {"content": END}, "eos_token": "!"})
    config = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    for stated in ({}, {"added_tokens_decoder": {str(end_id): {"content": END, "special": True}}}):
        write(folder, "tokenizer_config.json", config | stated)
        tokenizer, theirs = Tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
        assert tokenizer.eos_token_id == (end_id if stated else 0)


def test_a_template_file_counts_before_the_config_entry(folder: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    write(folder, "tokenizer_config.json", {"eos_token": END, "chat_template": "config {{ eos_token }}"})
    assert Tokenizer(str(folder)).render_chat(chat) == f"config {END}"
    write(folder, "chat_template.json", {"chat_template": "json"})
    assert Tokenizer(str(folder)).render_chat(chat) == "json"
    (folder / "chat_template.jinja").write_text("jinja {{ messages[0].content }}")
    assert Tokenizer(str(folder)).render_chat(chat) == "jinja x"
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False) == "jinja x"


def test_templates_have_names_as_in_transformers(folder: Path) -> None:
    """A list or an object in the config, or files; tools take the one that is called "tool_use"."""
    chat, tools = [{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "f"}}]
    named = {"default": "d {{ messages[0].content }}", "tool_use": "t {{ messages[0].content }}", "rag": "r"}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    config = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    for entry in (listed, named, named["default"]):
        write(folder, "tokenizer_config.json", config | {"chat_template": entry})
        ours, theirs = Tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
        for given in (None, tools):
            text = theirs.apply_chat_template(chat, tools=given, tokenize=False)
            assert ours.render_chat(chat, tools=given) == text
            assert ours.encode_chat(chat, tools=given) == ours.encode(text, add_special_tokens=False)
    (folder / "chat_template.jinja").write_text("\ufefffile", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools of a file", encoding="utf-8")
    ours, theirs = Tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert ours.render_chat(chat) == "file"
    assert ours.render_chat(chat, tools=tools) == theirs.apply_chat_template(chat, tools=tools, tokenize=False)
    (folder / "additional_chat_templates" / "._tool_use.jinja").write_bytes(b"\0\5\x16\7\xff")  # macOS's; not UTF-8
    assert Tokenizer(str(folder)).render_chat(chat, tools=tools) == ours.render_chat(chat, tools=tools)


def test_templates_without_a_default_are_a_note(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "r"}]})
    tokenizer = Tokenizer(str(folder))
    assert not tokenizer.has_chat_template
    assert tokenizer.notes == (f"{folder}: no chat template is called 'default', only 'rag'",)


@pytest.mark.parametrize("text", ["", " \n", "null"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
def test_files_that_say_nothing_are_a_note(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    tokenizer = Tokenizer(str(folder))
    assert tokenizer.encode("Hello") == golden_tokenizer("gpt-2").encode("Hello")
    assert tokenizer.notes == (f"{folder}: {name} is empty",)


def test_byte_order_marks_are_left_out(folder: Path, end_id: int) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_text(json.dumps({"eos_token": END}), encoding="utf-8-sig")
    tokenizer = Tokenizer(str(folder))
    assert tokenizer.encode("Hello") == golden_tokenizer("gpt-2").encode("Hello")
    assert tokenizer.eos_token_id == end_id


def test_truncation_and_padding_stored_in_the_file_do_not_cut_a_prompt(folder: Path) -> None:
    backend = type(golden_tokenizer("gpt-2")._backend).from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    text = "Hello world, this is a prompt of some length"
    assert Tokenizer(str(folder)).encode(text) == golden_tokenizer("gpt-2").encode(text)
    assert Tokenizer(str(folder)).encode("Hello") == golden_tokenizer("gpt-2").encode("Hello")


def test_a_token_that_the_model_has_no_row_for_is_refused(folder: Path, end_id: int) -> None:
    write(folder, "config.json", {"vocab_size": end_id})
    tokenizer = Tokenizer(str(folder))
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    with pytest.raises(TokenizerError, match=rf"'<\|endoftext\|>', whose id {end_id} is beyond the model's {end_id}"):
        tokenizer.encode(f"Hello{END}")


def test_an_older_form_is_converted_through_transformers(tmp_path: Path) -> None:
    golden = golden_vocab("gpt-2")
    tokens, merges = (golden.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
    assert isinstance(tokens, tuple)
    assert isinstance(merges, tuple)
    write(tmp_path, "vocab.json", {token: token_id for token_id, token in enumerate(tokens)})
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    write(tmp_path, "config.json", {"model_type": "gpt2"})
    tokenizer = Tokenizer(str(tmp_path))
    assert tokenizer.eos_token_id == AutoTokenizer.from_pretrained(tmp_path).eos_token_id  # of its class: END
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "!"})
    assert Tokenizer(str(tmp_path)).eos_token_id == 0
    for text, ids in golden.cases:
        assert golden.in_full(tokenizer.encode(text, add_special_tokens=False)) == ids


def test_a_folder_without_tokenizer_is_told_from_one_with(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*prompt_ids"):
        Tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    assert has_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"transformers cannot make one.*save_pretrained") as caught:
        Tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: not a readable"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: not JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: holds list, where an object"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"x": {"content": "y"}}}',
            "added_tokens_decoder is malformed",
        ),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"9": {}}}', "added_tokens_decoder is malformed"),
        ("tokenizer_config.json", '{"added_tokens_decoder": ["9"]}', "added_tokens_decoder is malformed"),
        ("chat_template.json", "3", r"chat_template\.json: holds int"),
    ],
)
def test_a_damaged_file_is_named(name: str, text: str, message: str, folder: Path) -> None:
    (folder / name).write_text(text)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(str(folder))


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="not a folder"):
        Tokenizer(str(tmp_path / "model.gguf"))


def test_json_nested_too_deep_is_one_line(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[" * 10**5 + "]" * 10**5, encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: is nested too deep; fetch the file again$"):
        Tokenizer.from_folder(folder)


def test_a_template_that_is_not_utf_8_is_one_line(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"Hi \xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: is not UTF-8 \(byte 3\); fetch the file again$"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", [[], {"a": 1}, None, 3])
def test_templates_with_names_that_are_no_text_are_left_out(folder: Path, name: object) -> None:
    write(folder, "tokenizer_config.json", {"chat_template": [{"name": name, "template": "t"}]})
    assert not Tokenizer.from_folder(folder).has_chat_template


def test_a_token_that_a_terminal_would_obey_is_noted_as_its_escapes(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"eos_token": "\x1b[31m\u202e" + "x" * 9999})
    (note,) = Tokenizer.from_folder(folder).notes
    assert r"tokenizer.json has no '\x1b[31m\u202exxx" in note
    assert len(note) <= LONGEST
    assert note.isprintable()


def test_a_tokenizer_over_which_the_library_panics_is_refused(folder: Path) -> None:
    """Its post-processor adds a token that it does not list: the library finds out when a text comes."""
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|lost|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {},
    }
    write(folder, "tokenizer.json", described)
    with pytest.raises(TokenizerError, match=r"the tokenizer is damaged \(.+\); fetch the file again"):
        Tokenizer.from_folder(folder).encode("text")


def test_a_special_token_that_is_no_unicode_is_refused(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"bos_token": "\ud800"})
    with pytest.raises(TokenizerError, match=r"the special token '\\ud800' is not valid Unicode"):
        Tokenizer.from_folder(folder)


def test_mistrals_own_form_is_converted_with_its_bos_and_end(tmp_path: Path) -> None:
    """A token's id is its rank behind the special tokens, as in mistral-common."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w"]
    vocab = [{"rank": at, "token_bytes": base64.b64encode(piece).decode()} for at, piece in enumerate(pieces)]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    listed = [{"rank": at, "token_str": text, "is_control": True} for at, text in enumerate(special)]
    counts = {"num_vocab_tokens": 261, "default_vocab_size": 266, "default_num_special_tokens": 5, "version": "v11"}
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
    tekken = {"config": {"pattern": pattern, **counts}, "vocab": vocab, "special_tokens": listed}
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("[INST]hello w[/INST]") == [1, 3, 264, 265, 4]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.decode([264, 265]) == "hello w"
    assert not tokenizer.has_chat_template


def test_each_token_has_the_text_that_it_decodes_to() -> None:
    """Also if a vocabulary spells a character in another way, as GPT-2's a new line; ids beyond it have no text."""
    tokenizer = golden_tokenizer("gpt-2")
    vocab = tokenizer.vocab_size + 3
    found = tokenizer.token_texts(vocab)
    assert found == [tokenizer.decode([at], skip_special_tokens=False) for at in range(vocab)]
    assert [found[ids[0]] for ids in map(tokenizer.encode, ("\n", ":", "Hello"))] == ["\n", ":", "Hello"]
