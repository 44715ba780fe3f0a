"""Compiled blocks are the eager ones on the device; tolerances are those of test_cuda_captured.py."""

import pytest
from support.comparisons import assert_same_tokens, largest_error, step_logits
from support.tiny_models import ARCHITECTURES, TinyModel

NEW_TOKENS = 256
PROMPT = 20
FLOAT32 = 1e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_compiled_logits_and_256_tokens_are_the_eager_ones(name: str, tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model(name)
    rows = tiny.ids[:1].tolist()
    eager, compiled = load_on(tiny.folder, graph="eager"), load_on(tiny.folder, graph="compiled")
    expected = step_logits(eager, rows, PROMPT)
    assert largest_error(step_logits(compiled, rows, PROMPT), expected) < FLOAT32
    prompt = rows[0][:PROMPT]
    tokens = [one.generate([prompt], max_new_tokens=NEW_TOKENS, ignore_eos=True)[0] for one in (compiled, eager)]
    assert_same_tokens(tokens[0].token_ids, tokens[1].token_ids, prompt, eager, FLOAT32)
