"""Bodies of requests: what is no JSON object, or has numbers that no answer could repeat, is refused in plain words."""

import pytest

from graphcore.serving.guard import json_object
from graphcore.serving.request_errors import RequestError


@pytest.mark.parametrize("digits", [310, 5000])  # Python itself refuses 4301 and more, with advice for programmers
def test_a_whole_number_beyond_float64_is_refused(digits: int) -> None:
    assert json_object(b'{"seed": -' + 309 * b"1" + b"}") == {"seed": -int("1" * 309)}
    with pytest.raises(RequestError, match=r"^the body is no JSON: 1{20}\.\.\. is too large a number$"):
        json_object(b'{"seed": ' + digits * b"1" + b"}")
