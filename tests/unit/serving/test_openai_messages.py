"""Contents of messages: texts, and lists of text parts; errors say what is wrong with which part."""

import pytest

from graphcore.serving.openai_messages import text_of
from graphcore.serving.request_errors import RequestError


def test_parts_are_joined() -> None:
    assert text_of([{"type": "text", "text": "a"}, {"type": "input_text", "text": ""}], "content") == "a"


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("hi", "content[0] must be an object with a type and a text"),
        ({"type": "text"}, "content[0].text must be a text"),
        ({"type": "text", "text": 5}, "content[0].text must be a text"),
        ({"type": "image_url"}, "content[0]: a part of type 'image_url' cannot be read; this model takes text alone"),
    ],
)
def test_a_part_that_is_no_text_is_refused_for_what_it_is(part: object, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        text_of([part], "content")
    assert caught.value.message == said
