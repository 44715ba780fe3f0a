"""Greedy tokens of captured decode are the eager ones, whatever ran between its replays.

Float32; two tokens whose eager logits differ by less than twice the tolerance of test_cuda_captured.py are a tie.
"""

import pytest
import torch
from support.comparisons import assert_same_tokens
from support.tiny_models import ARCHITECTURES, TinyModel

NEW_TOKENS = 256
PROMPT = 20
FLOAT32 = 1e-4


def prompts_of(tiny: TinyModel) -> list[list[int]]:
    """Return three prompts of different lengths."""
    return [tiny.ids[0, :PROMPT].tolist(), tiny.ids[1, :7].tolist(), tiny.ids[1, 3:30].tolist()]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_256_greedy_tokens_are_the_eager_ones_alone_and_in_a_batch(name: str, tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model(name)
    prompts = prompts_of(tiny)
    eager, captured = load_on(tiny.folder, graph="eager"), load_on(tiny.folder, graph="captured")
    for batch in (prompts[:1], prompts):
        expected = eager.generate(batch, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        found = captured.generate(batch, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        for one, other, prompt in zip(found, expected, batch, strict=True):
            assert_same_tokens(one.token_ids, other.token_ids, prompt, eager, FLOAT32)


def test_a_graph_survives_other_generations_between_its_replays(tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model("gemma3")  # whose rings wrap
    prompts = prompts_of(tiny)
    engine = load_on(tiny.folder, graph="captured")
    alone = [engine.generate([prompt], max_new_tokens=40, ignore_eos=True)[0].token_ids for prompt in prompts]
    together = [one.token_ids for one in engine.generate(prompts, max_new_tokens=40, ignore_eos=True)]
    engine.logits(tiny.ids)
    list(engine.stream(prompts[1], max_new_tokens=9, temperature=1.0, seed=2))
    again = [engine.generate([prompt], max_new_tokens=40, ignore_eos=True)[0].token_ids for prompt in prompts]
    assert again == alone
    assert [one.token_ids for one in engine.generate(prompts, max_new_tokens=40, ignore_eos=True)] == together


def test_a_second_engine_and_its_end_do_not_touch_the_first(tiny_model, load_on) -> None:
    tiny: TinyModel = tiny_model("llama3")
    prompt = prompts_of(tiny)[0]
    first = load_on(tiny.folder, graph="captured")
    expected = first.generate([prompt], max_new_tokens=30, ignore_eos=True)[0].token_ids
    second = load_on(tiny_model("qwen3").folder, graph="captured")
    second.generate([prompt], max_new_tokens=30, ignore_eos=True)
    assert first.generate([prompt], max_new_tokens=30, ignore_eos=True)[0].token_ids == expected
    second.close()
    torch.cuda.empty_cache()
    assert first.generate([prompt], max_new_tokens=30, ignore_eos=True)[0].token_ids == expected
