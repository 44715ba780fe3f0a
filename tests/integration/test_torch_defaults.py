"""Answers do not depend on the defaults of torch in the program that loads a model and asks it, to the bit."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.tiny_models import TinyModel

from graphcore import Engine, ForwardState
from graphcore.engine.scoring import token_losses

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [3] * 20]
DRAWN = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 3}
SIZES = ("batch_size=3", "prefill_chunk=16", "context_length=128")
HIDDEN = 0.1 * torch.arange(9 * 64, dtype=torch.float32).view(1, 9, 64).sin()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def bfloat16_on_meta() -> Iterator[None]:
    """Make every tensor that lacks a dtype one of bfloat16, and every one that lacks a device one without values."""
    with default_dtype(torch.bfloat16), default_device("meta"):
        yield


DEFAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "meta": lambda: default_device("meta"),  # every tensor without a device of its own would be without values
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic_algorithms,
    "bfloat16 on meta": bfloat16_on_meta,
}
CASES = {
    "eager": ("llama3",),
    "delta rules and experts": ("qwen3_5_moe",),
    "features of layers": ("gemma4",),
    "rings, streamed": ("gemma3", "streaming=on"),
    "experts, streamed": ("gpt_oss", "streaming=on", "dtype=bf16"),
    "packed at load": ("llama3", "quant=q8_0"),
    "codes in caches": ("qwen3_moe", "kv_dtype=q8_0"),
    "transformers": ("qwen3", "model.fallback=transformers"),
    "learned positions": ("gpt2", "dtype=fp16"),
    "native": ("qwen3", "graph=auto", "quant=q4_0"),
}


def load(source: Path | str, *overrides: str) -> Engine:
    chosen = ["dtype=fp32", "graph=eager", *SIZES, *overrides]
    return Engine.load(source, device="cpu", overrides=[*{key.split("=")[0]: key for key in chosen}.values()])


def answers(engine: Engine, file: Path) -> list[object]:
    """Return what an engine answers in each of its ways, tensors as bytes."""
    found: list[object] = [
        (one.token_ids, one.logprobs)
        for settings in ({}, DRAWN)
        for one in engine.generate(PROMPTS, max_new_tokens=5, logprobs=True, **settings)
    ]
    logits, states = engine.logits(PROMPTS[:1], output_hidden_states=True)
    state = ForwardState()
    parts = [engine.forward(part, state) for part in HIDDEN.split((5, 1, 3), dim=1)]
    found += [tensor.numpy().tobytes() for tensor in (logits, *(state.float() for state in states), *parts)]
    if engine.settings.model.fallback is None:
        engine.save_cache(PROMPTS[2] * 3, file)
        with safe_open(file, "pt") as opened:
            found += [engine.load_cache(file), opened.metadata()]  # a sha256 of the tensors is among them
        found += [
            engine.submit(PROMPTS[2] * 3 + end, max_new_tokens=3, reuse_cache=True).result().token_ids
            for end in ([], [7])
        ]
        work = lambda: token_losses(engine.runner, PROMPTS[2], 1, "prefill").numpy().tobytes()  # type: ignore[arg-type]  # noqa: E731
        found.append(engine._queue.run_alone("losses", work))
    return found


@pytest.fixture(scope="module")
def expected(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[object]]:
    @cache
    def of(case: str) -> list[object]:
        name, *overrides = CASES[case]
        with load(tiny_model(name).folder, *overrides) as engine:
            return answers(engine, tmp_path_factory.mktemp("expected") / "cache")

    return of


@pytest.mark.parametrize(
    ("case", "default"),
    [(case, default) for case in CASES for default in DEFAULTS if case == "eager" or default == "bfloat16 on meta"],
)
def test_answers_are_those_of_a_program_without_defaults(
    case: str, default: str, tiny_model: Tiny, expected: Callable[[str], list[object]], tmp_path: Path
) -> None:
    name, *overrides = CASES[case]
    folder, right = tiny_model(name).folder, expected(case)
    with DEFAULTS[default](), load(folder, *overrides) as engine:
        found = answers(engine, tmp_path / "cache")
    assert found == right


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        ("eager", ("float64", "bfloat16", "meta")),
        # each in an engine of its own, which has compiled nothing under another default
        pytest.param("compiled", ("bfloat16",), marks=pytest.mark.thorough),
        pytest.param("compiled", ("meta",), marks=pytest.mark.slow),
        pytest.param("compiled", ("float64",), marks=pytest.mark.slow),
    ],
)
def test_defaults_may_change_after_the_model_was_loaded(
    kind: str, defaults: tuple[str, ...], tiny_model: Tiny, tmp_path: Path
) -> None:
    with load(tiny_model("llama3").folder, f"graph={kind}") as engine:
        right = answers(engine, tmp_path / "right")
        for default in defaults:
            with DEFAULTS[default](), ThreadPoolExecutor(2) as threads:
                here = answers(engine, tmp_path / "here")
                elsewhere = threads.submit(answers, engine, tmp_path / "elsewhere").result()
            assert here == elsewhere == right, default


def test_random_weights_are_the_same() -> None:
    sizes = ("model=smollm2", "model.num_hidden_layers=1")

    def logits(source: str) -> torch.Tensor:
        with load(source, *sizes) as engine:
            found = engine.logits(PROMPTS[:1])
            assert isinstance(found, torch.Tensor)
            return found

    for source in ("random:", "random:q8_0"):
        right = logits(source)
        for default in ("float64", "meta"):
            with DEFAULTS[default]():
                assert torch.equal(logits(source), right), default


def test_the_program_keeps_its_defaults(tiny_model: Tiny) -> None:
    with default_dtype(torch.float64), default_device("meta"):
        with load(tiny_model("qwen3").folder, "model.fallback=transformers") as engine:
            engine.generate(PROMPTS, max_new_tokens=2)
        assert torch.get_default_dtype() is torch.float64
        assert torch.get_default_device() == torch.device("meta")
