"""Messages are prompts: `generate` and `stream` answer them in the chat template."""

from pathlib import Path

import pytest
from support.chat_folders import TEMPLATE, save_chat_folder
from tokenizers import Tokenizer

from graphcore import Engine
from graphcore.errors import TokenizerError


def load(folder: Path) -> Engine:
    overrides = ["batch_size=3", "context_length=128"]
    return Engine.load(folder, dtype="fp32", device="cpu", graph="eager", overrides=overrides)


def test_messages_are_answered_in_the_chat_template_wherever_a_prompt_is_taken(tmp_path: Path) -> None:
    folder = save_chat_folder(tmp_path / "chat")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    written = "system:be brief<|end|>\nuser:hi<|end|>\nassistant:"  # the folder's template, by hand
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(written).ids
    with load(folder) as engine:
        assert engine.chat_ids(messages) == ids
        (expected,) = engine.generate([ids], max_new_tokens=6, ignore_eos=True)
        plain, again, pair = engine.generate(["hi", messages, messages[1:]], max_new_tokens=6, ignore_eos=True)
        assert again.token_ids == expected.token_ids
        assert (plain.timings.prompt_tokens, pair.timings.prompt_tokens) == (2, len(ids) - len("system:be brief_\n"))
        for prompt in (messages, tuple(messages), [messages], engine.chat_ids(messages)):
            (found,) = engine.generate(prompt, max_new_tokens=6, ignore_eos=True)
            assert found.token_ids == expected.token_ids
            events = engine.stream(prompt, max_new_tokens=6)
            assert next(events).token_id == expected.token_ids[0]
            events.close()
    with load(save_chat_folder(tmp_path / "without", template=None)) as engine:
        for call in (engine.generate, engine.stream, engine.chat_ids):
            with pytest.raises(TokenizerError, match="chat template"):
                call(messages)


def test_tools_and_options_reach_the_template(tmp_path: Path) -> None:
    template = "{{ tools[0].function.name }}{% if thinking is defined %}{{ thinking }}{% endif %}<|end|>" + TEMPLATE
    folder = save_chat_folder(tmp_path, template)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tools = [{"type": "function", "function": {"name": "add<|end|>"}}]
    with load(folder) as engine:
        ids = engine.chat_ids([{"role": "user", "content": "hi"}], tools=tools, options={"thinking": "on"})
    text = engine.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "add<|end|>on<|end|>user:hi<|end|>\nassistant:"
    assert ids.count(backend.token_to_id("<|end|>")) == 2  # the tool's name is text
