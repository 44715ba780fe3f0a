"""The two real checkpoints: llama.cpp's choices, sensible text, and Gemma 3's activations in half precision."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphcore import Engine
from graphcore.device import find_cpp_compiler
from graphcore.tasks.requests.prompts import DEFAULT_OPENING

GOLDEN = Path(__file__).parents[1] / "golden" / "llamacpp"
HALF_MAX = 65504.0  # the largest float16
pytestmark = pytest.mark.real
both_models = pytest.mark.parametrize(
    ("name", "fixture"),
    [("smollm2", "smollm2_gguf"), pytest.param("gemma3", "gemma3_gguf", marks=pytest.mark.slow)],
)


@dataclass(frozen=True)
class Position:
    """Our likeliest token and llama.cpp's two opinions: on the stored file, and on its weights in float32."""

    ours: int
    stored: int
    stored_margin: float
    float32: int


def load(path: Path, dtype: str) -> Engine:
    return Engine.load(
        path, dtype=dtype, device="cpu", graph="eager", overrides=["context_length=256", "sampling=greedy"]
    )


def positions(logits_of: Callable[[Sequence[int]], Tensor], name: str, cases: int) -> list[Position]:
    """Return the positions of the first cases; `logits_of` gives [T, V] for T tokens."""
    found: list[Position] = []
    for case in json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))[:cases]:
        prompt_ids, token_ids = case["prompt_ids"], case["token_ids"]
        top = logits_of(prompt_ids + token_ids[:-1])[len(prompt_ids) - 1 :].argmax(dim=-1).tolist()
        stored, float32 = case["stored"], case["float32"]
        found += map(Position, top, stored["top_ids"], stored["margins"], float32["top_ids"])
    return found


def share(claims: Sequence[bool]) -> float:
    return sum(claims) / len(claims)


@pytest.mark.thorough
@pytest.mark.skipif(not find_cpp_compiler(), reason="needs a C++ compiler")
@both_models
def test_packed_weights_and_activations_of_16_bits_choose_what_llamacpp_chooses(
    name: str, fixture: str, request: pytest.FixtureRequest
) -> None:
    """Decode as it runs by default at bf16, but for the cache: what is left is the rounding of activations."""
    overrides = ["context_length=256", "kv_dtype=fp32"]
    path = request.getfixturevalue(fixture)
    with Engine.load(path, dtype="bf16", device="cpu", graph="captured", overrides=overrides) as engine:
        assert engine.runner.builder.decoder.layers[0].mlp.up_proj.rounding == "wide"

        def decode(token_ids: Sequence[int]) -> Tensor:
            return torch.stack([engine.runner.extend([[token]], [at])[0] for at, token in enumerate(token_ids)])

        found = positions(decode, name, cases=2)
    assert len(found) == 2 * 64
    assert share([at.ours == at.float32 for at in found]) >= 0.995


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "fixture", "cases"),
    [
        ("smollm2", "smollm2_gguf", 4),
        pytest.param("smollm2", "smollm2_gguf", 16, marks=pytest.mark.slow),
        pytest.param("gemma3", "gemma3_gguf", 3, marks=pytest.mark.thorough),
        pytest.param("gemma3", "gemma3_gguf", 16, marks=pytest.mark.slow),
    ],
)
def test_the_likeliest_token_is_llamacpps(name: str, fixture: str, cases: int, request: pytest.FixtureRequest) -> None:
    with load(request.getfixturevalue(fixture), "fp32") as engine:
        found = positions(lambda token_ids: engine.logits([token_ids])[0], name, cases)
    with_float32 = share([at.ours == at.float32 for at in found])
    with_stored = share([at.ours == at.stored for at in found])
    its_own = share([at.float32 == at.stored for at in found])
    print(f"\n{name}: top-1 agreement over {len(found)} positions with llama.cpp in float32: {with_float32:.4f}")
    print(f"with llama.cpp on packed weights: {with_stored:.4f}; of its two runs with each other: {its_own:.4f}")
    assert len(found) == cases * 64
    assert with_float32 >= 0.995  # promised: 0.98; measured: 1.0 and 0.999
    assert with_stored >= its_own - 0.005
    # Where it rounds activations to 8 bits and we do not, only a near tie may turn out otherwise.
    assert max(at.stored_margin for at in found if at.ours != at.stored) < 1.0


@pytest.mark.thorough
def test_smollm2_answers_a_question(smollm2_gguf: Path) -> None:
    with load(smollm2_gguf, "bf16") as engine:
        ids = engine.chat_ids([{"role": "user", "content": "What is the capital of France?"}])
        answer = engine.generate([ids], max_new_tokens=32)[0]
    assert "Paris" in answer.text
    assert answer.finish_reason == "end"


@pytest.fixture(scope="module")
def gemma3(gemma3_gguf: Path) -> Iterator[Engine]:
    with load(gemma3_gguf, "bf16") as engine:
        yield engine


@pytest.mark.slow
def test_gemma3_goes_on_from_a_text(gemma3: Engine) -> None:
    found = gemma3.generate(["The quick brown fox jumps over the lazy dog. The quick brown fox"], max_new_tokens=6)
    assert found[0].text == " jumps over the lazy dog."


@pytest.mark.slow
def test_a_base_models_default_text_goes_on_without_repeating_itself(gemma3: Engine) -> None:
    lines = gemma3.generate([DEFAULT_OPENING], max_new_tokens=128)[0].text.splitlines()
    assert [line[:9] for line in lines[1:21]] == [f"{letter} is for " for letter in "DEFGHIJKLMNOPQRSTUVW"]
    assert "\n".join(lines).startswith(" cat.\nD is for dog.\n")


def top_and_peak(path: Path, dtype: str, ids: list[list[int]]) -> tuple[Tensor, float]:
    """Return the likeliest token at each position and the largest activation between blocks."""
    with load(path, dtype) as engine:
        logits, hidden = engine.logits(ids, output_hidden_states=True)
    assert torch.isfinite(logits).all()
    return logits[0].argmax(dim=-1), max(layer.abs().max().item() for layer in hidden)


@pytest.mark.slow  # in CI test_dtypes.py has a tiny model whose residual stream does not fit either
def test_gemma3_is_right_in_float16_though_its_residual_stream_does_not_fit(gemma3_gguf: Path) -> None:
    cases = json.loads((GOLDEN / "gemma3.json").read_text("utf-8"))
    ids = [token for case in cases[:2] for token in case["prompt_ids"] + case["token_ids"]]
    tops, peaks = zip(*(top_and_peak(gemma3_gguf, dtype, [ids]) for dtype in ("fp32", "fp16", "bf16")), strict=True)
    agreement = [(top == tops[0]).double().mean().item() for top in tops]
    print(f"\nlargest activation (fp32, fp16, bf16): {peaks}; top-1 agreement with fp32: {agreement}")
    assert peaks[0] > HALF_MAX  # plain float16 would have overflowed
    assert min(agreement) > 0.95
