"""Sampling parameters that a request does not set: what was typed, then the model's own, then graphcore's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.cases import in_case
from support.chat_folders import save_chat_folder

from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.engine.request import LONGEST_SPAN, REPEATED_TOKENS, repeats
from graphcore.engine.sampling_defaults import OF_CHATS, SamplingDefaults, gguf_values, sampling_defaults
from graphcore.errors import ConfigError

QWEN2_5 = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
GEMMA3 = {"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid"}


def defaults(
    folder: Path, config: object, is_chat: bool = True, of_card: dict[str, Any] | None = None, **typed: Any
) -> SamplingDefaults:
    """Return the defaults of a folder with a generation_config.json."""
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    return sampling_defaults(SafetensorsCheckpoint(folder), is_chat, of_card or {}, typed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_folder(tmp_path_factory.mktemp("model"))


def test_what_an_author_states_is_taken(folder: Path) -> None:
    """As vLLM's try_get_generation_config takes it, and transformers' generate where do_sample is true."""
    one = {"temperature": 1.0}
    for config, own in (
        (QWEN2_5, {name: value for name, value in QWEN2_5.items() if name != "do_sample"}),
        (GEMMA3, {**one, "top_k": 64, "top_p": 0.95}),
        ({"do_sample": True}, one),  # gpt-oss
        ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.2}, {"temperature": 0.0, "repetition_penalty": 1.2}),
        ({"do_sample": True, "temperature": 0, "top_k": 5}, {"temperature": 0.0}),
        ({"repetition_penalty": 1.2}, {**OF_CHATS, "repetition_penalty": 1.2}),
        ({"eos_token_id": 3}, OF_CHATS),
    ):
        for is_chat in (True, False):
            with in_case(config, is_chat):
                found = defaults(folder, config, is_chat)
                states = "temperature" in config or "do_sample" in config
                expected = own if is_chat or states else {k: v for k, v in own.items() if k not in OF_CHATS}
                assert (found.own, found.notes) == (expected, ())
                assert ("generation_config.json" in found.words) == states


def test_what_cannot_be_a_parameter_is_ignored_with_a_note(folder: Path) -> None:
    wrong = {"temperature": -1, "top_k": 2.5, "top_p": "much", "min_p": True, "repetition_penalty": 10**400}
    found = defaults(folder, wrong)
    assert found.own == OF_CHATS
    assert {note.partition(": ")[2].partition("=")[0] for note in found.notes} == set(wrong)
    assert found.notes[0] == "generation_config.json: temperature=-1 is ignored; it must be 0 (greedy) or more"


def test_settings_come_before_the_model_and_a_request_before_them(folder: Path) -> None:
    found = defaults(folder, QWEN2_5, top_k=7, min_p=0.1)
    params = found.params_with({"min_p": 0.2, "top_p": None})
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.7, 7, 0.8, 0.2)
    assert found.words == (
        "top_k 7, min_p 0.1 (as set), temperature 0.7, top_p 0.8, repetition_penalty 1.05 (generation_config.json)"
    )
    greedy = found.params_with({"temperature": 0})
    assert greedy.is_greedy
    assert found.params_with({"temperature": 0, "repetition_penalty": 1.1}).repetition_penalty == 1.1
    assert defaults(folder, QWEN2_5, temperature=0.0).params.is_greedy
    assert defaults(folder, {"eos_token_id": 3}, of_card={"temperature": 0.2, "top_p": 0.9}).values == {
        **OF_CHATS,
        "temperature": 0.2,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.0,
    }
    assert "the model card" in defaults(folder, {}, is_chat=False, of_card={"temperature": 0.2}).words


def test_a_truncation_of_a_greedy_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"top_k=7 has no effect with sampling.temperature=0"):
        defaults(folder, {}, is_chat=False, top_k=7)
    found = defaults(folder, {}, is_chat=False)
    assert found.words == "greedy (no chat template)"
    with pytest.raises(ConfigError, match=r"top_p=0.5 has no effect"):
        found.params_with({"top_p": 0.5})
    assert found.params_with({"top_p": 0.5, "temperature": 1}).top_p == 0.5
    with pytest.raises(ConfigError, match="unknown sampling parameter 'topk'"):
        found.params_with({"topk": None})


def test_the_longest_answer_is_the_author_s_where_he_says_it(folder: Path) -> None:
    for most, expected in ((2048, 2048), (0, None), (-1, None), (True, None), ("many", None), (None, None)):
        with in_case(most):
            assert defaults(folder, {"max_new_tokens": most}).max_new_tokens == expected


def test_a_gguf_file_states_them_under_llama_cpp_s_keys(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps(QWEN2_5), encoding="utf-8")
    written = gguf_values(SafetensorsCheckpoint(folder), {"temperature": 0.1})
    assert written == {
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.8,
        "general.sampling.penalty_repeat": 1.05,
    }
    file = object.__new__(GGUFCheckpoint)
    file.metadata = {**written, "general.sampling.mirostat": 2}
    found = sampling_defaults(cast("Any", file), is_chat=True, of_card={"temperature": 0.1}, typed={})
    assert found.own == {name: value for name, value in QWEN2_5.items() if name != "do_sample"}
    assert found.words.endswith("(the file's general.sampling)")
    unknown = SimpleNamespace(layout="decoder", files={})
    assert sampling_defaults(cast("Any", unknown), is_chat=False, of_card={}, typed={}).params.is_greedy


def test_a_span_that_comes_again_for_two_hundred_tokens_is_a_repetition() -> None:
    for span in (1, 2, 17, 60, LONGEST_SPAN):
        with in_case(span):
            begin, tokens = list(range(1000, 1037)), list[int]()
            ended = None
            for number in range(1000):
                tokens = [*begin, *(number % span for number in range(number))]
                if repeats(tokens):
                    ended = number
                    break
            assert ended is not None
            assert span + REPEATED_TOKENS <= ended < span + REPEATED_TOKENS + 16
    varied = [number % 10 for number in range(REPEATED_TOKENS)]
    for length in range(1000):
        tokens = [*range(length), *varied[:-1], 77, *varied[: REPEATED_TOKENS // 2]]
        assert not repeats(tokens)
        assert not repeats([number % (LONGEST_SPAN + 1) for number in range(length)])
