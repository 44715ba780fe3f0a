"""An answer that begins with given text: the ids are those of transformers' `continue_final_message`."""

from itertools import product as every_pair

import pytest
from support.cases import in_case
from test_chat_template import TEMPLATES, reference_with, with_template

from graphcore.engine.prompt_encoder import PromptEncoder
from graphcore.errors import ConfigError, TokenizerError

CHAT = [{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "The river is "}]


@pytest.mark.thorough
def test_a_continued_message_is_that_of_transformers() -> None:
    for answer, template in every_pair(
        ["The river is", "The river is ", '  {"a": 1,', "x\n\n"], ["smollm2", "bitnet", "headers", "alternating"]
    ):
        with in_case(answer, template):
            chat = [CHAT[0], {"role": "assistant", "content": answer}]
            ours = with_template(TEMPLATES[template])
            theirs = reference_with(TEMPLATES[template])
            asked = {"continue_final_message": True}
            assert ours.render_chat(chat, continue_final_message=True) == theirs.apply_chat_template(
                chat, tokenize=False, **asked
            )
            ids = theirs.apply_chat_template(chat, return_dict=False, **asked)
            assert ours.encode_chat(chat, continue_final_message=True) == ids
            assert ours.encode_chat(chat, parses_messages=True, continue_final_message=True) == ids


def test_the_last_part_of_a_message_is_continued() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"
    chat = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert with_template(template).render_chat(chat, continue_final_message=True) == "<assistant>a|b"


@pytest.mark.parametrize(
    ("message", "template", "said"),
    [
        ({"role": "assistant", "tool_calls": []}, TEMPLATES["smollm2"], "no text that could be continued"),
        ({"role": "assistant", "content": "x"}, "{{ messages[0].role }}", "leaves out the last message"),
    ],
)
def test_what_cannot_be_continued_is_refused(message: dict[str, object], template: str, said: str) -> None:
    with pytest.raises(TokenizerError, match=said):
        with_template(template).render_chat([message], continue_final_message=True)


def test_a_continuation_opens_no_message() -> None:
    encoder = PromptEncoder(with_template(TEMPLATES["smollm2"]), "a model", "text", 50_000)
    opened, bare = encoder.chat_ids(CHAT), encoder.chat_ids(CHAT, add_generation_prompt=False)
    continued = encoder.chat_ids(CHAT, continue_final_message=True)
    assert opened[: len(bare)] == bare
    assert len(continued) < len(bare) < len(opened)
    with pytest.raises(ConfigError, match="leave one of them out"):
        encoder.chat_ids(CHAT, add_generation_prompt=True, continue_final_message=True)
