"""A name of `tokenizer.ggml.pre` is a word in a table: a vocabulary that has it cuts text as the entry's others do."""

import gzip
import json
from pathlib import Path

import pytest
from checkout import Checkout

pytestmark = pytest.mark.slow

TITLE = "A pre-tokenizer"
GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer" / "pre.json.gz"
ENCODE = """
import gzip, json
from pathlib import Path
from graphcore.tokenizer.tokenizer import Tokenizer
golden = json.loads(gzip.decompress(Path({golden!r}).read_bytes()))
metadata = golden["metadata"] | {{"tokenizer.ggml.pre": "mira"}}
stored = {{key: tuple(value) if isinstance(value, list) else value for key, value in metadata.items()}}
tokenizer = Tokenizer.from_gguf(stored, "m.gguf")
print(json.dumps([tokenizer.encode(text) for text in golden["texts"]]))
"""


def test_a_pre_tokenizer_is_a_name_in_a_table(checkout: Checkout) -> None:
    """The ids are llama.cpp's for the name beside which the new one stands."""
    code, golden = ENCODE.format(golden=str(GOLDEN)), json.loads(gzip.decompress(GOLDEN.read_bytes()))
    by_default, expected = (golden["ids"][golden["names"][name]] for name in ("default", "smollm"))
    assert json.loads(checkout.python(code)) == by_default != expected
    checkout.edit(TITLE, {"graphcore/tokenizer/gguf_splitters.py": (('"smollm", "starcoder"', '"mira", '),)})
    assert json.loads(checkout.python(code)) == expected
