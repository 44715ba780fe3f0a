"""Requests of /v1/completions: what cannot be taken is named before anything is submitted."""

import pytest

from graphcore.serving.openai_completions import read_completion
from graphcore.serving.request_errors import RequestError


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []]])
def test_an_empty_prompt_is_named(prompt: object) -> None:
    with pytest.raises(RequestError, match="prompt is empty") as caught:
        read_completion({"prompt": prompt})
    assert caught.value.field == "prompt"
