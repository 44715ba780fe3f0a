"""A chat that goes on from its cache says what a chat that runs everything again says, rings and all."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.packed_matrices import native_kernels
from support.tiny_models import NO_TOKENS, VOCAB, TinyModel, randomise
from torch import nn

from graphcore import Engine
from graphcore.device import find_cpp_compiler
from graphcore.kernels.cpu.products import has_panels

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
Load = Callable[[str, str], Engine]
NEW_TOKENS = 12
SECONDS = 120.0
# Two layers of the real widths, because the order of a library's sums depends on all three sizes of a product.
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
GEMMA3 = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
}
GPT2 = {"n_embd": 768, "n_head": 12, "n_layer": 2, "n_positions": 512}
QWEN3_MOE = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
PROMPT_LENGTHS = (17, 40, 129, 200, 300)
CHUNK = 256  # tokens


def run(engine: Engine, prompt: list[int], reuse: bool) -> tuple[int, list[int]]:
    handle = engine.submit(prompt, NEW_TOKENS, ignore_eos=True, reuse_cache=reuse)
    answer = list(handle.result().token_ids)
    return handle.cached, answer


def turn(engine: Engine, prompt: list[int]) -> tuple[int, list[int]]:
    """Take one turn as a chat does; return how many tokens were not run again, and the answer."""
    return run(engine, prompt, reuse=True)


def words(generator: torch.Generator, length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def test_a_ring_that_has_not_wrapped_goes_back(tiny_model: Tiny, load_tiny: Load) -> None:
    engine = load_tiny("gemma3", "eager")
    engine.submit([1, 2, 3, 4, 5], 1, ignore_eos=True, reuse_cache=True).result()
    reused, answer = turn(engine, [1, 2, 3, 9])
    assert reused == 3
    logits = tiny_model("gemma3").logits_of(torch.tensor([[1, 2, 3, 9, *answer]]))[0]
    assert answer == logits[3:-1].argmax(dim=-1).tolist()


def test_other_requests_take_the_rows_that_hold_least(load_tiny: Load) -> None:
    engine = load_tiny("llama3", "eager")
    prompt = [1, 2, 3, 4]
    _, answer = turn(engine, prompt)
    engine.generate([[9]], max_new_tokens=1)
    assert turn(engine, prompt) == (len(prompt) - 1, answer)
    engine.generate([[9]] * engine.runner.sizes.batch_size, max_new_tokens=3, ignore_eos=True)
    assert turn(engine, prompt)[1] == answer
    assert run(engine, prompt, reuse=False) == (0, answer)


def test_each_of_several_chats_goes_on_from_its_own_row(load_tiny: Load, tiny_model: Tiny) -> None:
    engine = load_tiny("llama3", "eager")
    chats = [[31, 32, 33, 34], [49, 48, 47]]
    for is_second in (False, True):
        handles = [engine.submit(chat, NEW_TOKENS, ignore_eos=True, reuse_cache=True) for chat in chats]
        answers = [list(handle.result().token_ids) for handle in handles]
        for chat, answer in zip(chats, answers, strict=True):
            logits = tiny_model("llama3").logits_of(torch.tensor([chat + answer]))[0]
            assert answer == logits[len(chat) - 1 : -1].argmax(dim=-1).tolist()
        assert [handle.cached for handle in handles] == [len(chat) - 2 if is_second else 0 for chat in chats]
        chats = [[*chat, *answer, 5] for chat, answer in zip(chats, answers, strict=True)]


def model_of(name: str) -> nn.Module:
    import transformers as hf

    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 512, **NO_TOKENS}
    if name == "smollm2":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **SMOLLM2))
    if name == "gemma3":
        return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes, **GEMMA3))
    if name == "qwen3_moe":
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, **QWEN3_MOE))
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, **GPT2, **NO_TOKENS))


@pytest.fixture(scope="module")
def real_widths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a model's name to a checkpoint of two of its layers."""
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            model = model_of(name)
            randomise(model, 1)
            folders[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(folders[name])
        return folders[name]

    return save


def answers(engine: Engine, prompts: Sequence[Sequence[int]], together: bool) -> list[tuple[Any, ...]]:
    """Return what each prompt is answered, and how many of its tokens were cached: all at once, or in empty caches."""
    settings: dict[str, Any] = {"max_new_tokens": 3, "ignore_eos": True, "logprobs": True}
    found = []
    if together:
        with engine.holding_back():
            handles = [engine.submit(prompt, **settings) for prompt in prompts]
        found = [(handle, handle.result(SECONDS)) for handle in handles]
    else:
        admission: Any = engine._queue.batching._admission  # type: ignore[attr-defined]
        for prompt in prompts:
            with engine.while_idle():  # the last request has left
                admission.clear_prefix_cache()
            handle = engine.submit(prompt, **settings)
            found.append((handle, handle.result(SECONDS)))
    return [(answer.token_ids, answer.logprobs, handle.cached) for handle, answer in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "multiplied"),
    [
        ("smollm2", "as here"),
        pytest.param("smollm2", "by torch", marks=pytest.mark.thorough),
        pytest.param("smollm2", "without AMX", marks=pytest.mark.thorough),
        pytest.param("smollm2", "compiled", marks=pytest.mark.slow),
        pytest.param("gemma3", "as here", marks=pytest.mark.thorough),
        pytest.param("gemma3", "by torch", marks=pytest.mark.slow),
        pytest.param("gpt2", "as here", marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", "as here", marks=pytest.mark.thorough),
    ],
)
def test_neither_a_hit_nor_a_neighbour_changes_a_bit(
    name: str, multiplied: str, real_widths: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all dtypes, packed and dense. A hit ends within a chunk only where the C++ kernels multiply everything."""
    library = native_kernels()
    if multiplied == "compiled" and not find_cpp_compiler():
        pytest.skip("no C++ compiler works here")
    if multiplied == "by torch":
        monkeypatch.setattr("graphcore.kernels.cpu.products.has_panels", lambda _: False)
    if multiplied == "without AMX":
        monkeypatch.setattr("graphcore.kernels.cpu.products.has_amx", lambda _: False)
    generator = torch.Generator().manual_seed(7)
    shared = words(generator, max(PROMPT_LENGTHS))
    prompts = [[*shared[: length - 1], (shared[length - 1] + 1) % VOCAB] for length in PROMPT_LENGTHS]
    for dtype in ("bf16", "fp16", "fp32"):
        for quant in ("stored", "q8_0", "q4_0"):
            case = f"{name} {dtype} {quant}"
            sizes = [
                "context_length=512",
                "batching.max_sequences=5",
                "batching.cache_tokens=4096",
                f"prefill_chunk={CHUNK}",
            ]
            how = [f"quant={quant}", *(["graph=compiled"] if multiplied == "compiled" else [])]
            with Engine.load(real_widths(name), dtype=dtype, device="cpu", overrides=[*sizes, *how]) as engine:
                alone = answers(engine, prompts, together=False)
                assert [cached for *_, cached in alone] == [0] * len(prompts), case
                answers(engine, [shared], together=False)
                beside = answers(engine, prompts, together=True)
                assert [found[:-1] for found in beside] == [found[:-1] for found in alone], case
                in_panels = dtype == "bf16" and has_panels(library) and multiplied in ("as here", "without AMX")
                is_fine = in_panels and (name != "qwen3_moe" or quant != "stored")  # torch multiplies dense experts
                whole = [(length - 1) // CHUNK * CHUNK for length in PROMPT_LENGTHS]
                fine = [max(least, length - 16) for least, length in zip(whole, PROMPT_LENGTHS, strict=True)]
                assert [cached for *_, cached in beside] == (fine if is_fine else whole), case
                assert is_fine != any("prompts reuse cached prefixes in whole chunks" in note for note in engine.notes)
