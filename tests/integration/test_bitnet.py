"""BitNet b1.58 end to end: golden checkpoints, every stored form against transformers, and decoding over the cache.

int8 rounding makes steps of errors in the last place: where a float32 sum ends the other way up, a code changes by one
and the logits by 1/127 of what that feature weighs. So whole models are compared by argmax and mean error, which the
project puts at 100 % and 2e-3. Products in the order of the checkpoint's own class make the error of these 0 on the
machine where they were written; in another order three seeds in ten are beyond 2e-3.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from support.files.ternary_files import FORMS, TernaryModel, save_ternary

from graphcore import Engine
from graphcore.kernels.ops.int8_rows import Int8Rows

pytestmark = pytest.mark.thorough

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"
MEAN_ERROR = 2e-3
COMPILED = [  # in CI one form; test_model_parity.py compiles the block with plain weights
    pytest.param(form, marks=pytest.mark.thorough if form == "autobitlinear" else pytest.mark.slow) for form in FORMS
]
Ternary = Callable[[str, str, int], TernaryModel]
SIZES = ["batch_size=2", "prefill_chunk=16", "context_length=64"]


@pytest.fixture(scope="module")
def ternary(tmp_path_factory: pytest.TempPathFactory) -> Ternary:
    """A function from family, form and seed to the checkpoint and its reference."""

    @cache
    def make(name: str, form: str, seed: int) -> TernaryModel:
        return save_ternary(name, form, seed, tmp_path_factory.mktemp(f"{name}_{form}_{seed}"))

    return make


def load(path: Path, graph: str = "eager", dtype: str = "fp32", *overrides: str) -> Engine:
    return Engine.load(path, dtype=dtype, device="cpu", graph=graph, overrides=[*SIZES, *overrides])


@pytest.fixture(scope="module")
def compiled(ternary: Ternary) -> Iterator[Callable[[str], Engine]]:
    """A function from a form to a compiled engine that runs one row after another."""
    with ExitStack() as open_engines:

        @cache
        def engine_of(form: str) -> Engine:
            engine = load(ternary("bitnet", form, 1).folder, "compiled", "fp32", "batch_size=1")
            return open_engines.enter_context(engine)

        yield engine_of


def cosine(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the least cosine of the angle between two rows of logits."""
    return torch.nn.functional.cosine_similarity(found, expected, dim=-1).min().item()


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().mean() < MEAN_ERROR
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    ("path", "key", "graph"),
    [
        ("bitnet", "bitnet", "eager"),
        ("bitnet_i2s.gguf", "bitnet_i2s", "eager"),
        # the folder's form is compiled below
        pytest.param("bitnet_i2s.gguf", "bitnet_i2s", "compiled", marks=pytest.mark.slow),
    ],
)
def test_golden_checkpoints_give_the_golden_logits(path: str, key: str, graph: str) -> None:
    golden = np.load(GOLDEN / "logits.npz")
    with load(GOLDEN / path, graph) as engine:
        both = engine.logits(torch.from_numpy(golden["tokens"].astype(np.int64)).expand(2, -1))
    for logits in both:
        assert_same(logits, torch.from_numpy(golden[f"{key}.hf_logits"]))


def test_the_packed_folder_and_the_i2_s_file_hold_the_same_weights() -> None:
    engines = [load(GOLDEN / path) for path in ("bitnet", "bitnet_i2s.gguf")]
    folder, file = (dict(engine.runner.builder.decoder.named_buffers()) for engine in engines)
    assert folder.keys() == file.keys()
    differing = {name for name in folder if not torch.equal(folder[name], file[name])}
    assert differing == {"embed_tokens.weight"}  # float16 in the GGUF file


@pytest.mark.parametrize(
    ("name", "form", "seed"),
    [
        pytest.param(name, form, seed, marks=() if seed == at else pytest.mark.slow)
        for at, name in enumerate(("bitnet", "llama3", "qwen3"))
        for form in FORMS
        for seed in range(3)
    ],
)
def test_logits_are_those_of_transformers(name: str, form: str, seed: int, ternary: Ternary) -> None:
    model = ternary(name, form, seed)
    with load(model.folder) as engine:
        assert_same(engine.logits(model.ids), model.logits())


@pytest.mark.slow
@pytest.mark.parametrize("form", COMPILED)
def test_compiled_logits_are_those_of_transformers(
    form: str, ternary: Ternary, compiled: Callable[[str], Engine]
) -> None:
    model = ternary("bitnet", form, 1)
    assert_same(compiled(form).logits(model.ids), model.logits())


def test_without_int8_activations_the_logits_are_others(ternary: Ternary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that compute with float activations compute another model."""
    model = ternary("bitnet", "autobitlinear", 0)
    monkeypatch.setattr("graphcore.nn.linear.quantize_rows", lambda x: Int8Rows(x.float(), torch.ones(1)))
    with load(model.folder) as engine:
        assert (engine.logits(model.ids) - model.logits()).abs().mean() > 2 * MEAN_ERROR


@pytest.mark.parametrize(
    ("form", "graph"),
    [
        *(pytest.param(form, "eager", marks=pytest.mark.thorough) for form in FORMS),
        *(pytest.param(*form.values, "compiled", marks=form.marks) for form in COMPILED),
    ],
)
def test_cached_decode_agrees_with_the_full_forward(
    form: str, graph: str, ternary: Ternary, compiled: Callable[[str], Engine]
) -> None:
    model = ternary("bitnet", form, 1)
    row = model.ids[0].tolist()
    with ExitStack() as open_engine, torch.inference_mode():
        engine = compiled(form) if graph == "compiled" else open_engine.enter_context(load(model.folder))
        steps = [engine.runner.extend([row[:9]], [0])]
        steps += [engine.runner.extend([[token_id]], [at]) for at, token_id in enumerate(row[9:], start=9)]
        forced = engine.logits([row])[0, 8:]
    decoded, expected = torch.cat(steps), model.logits()[0, 8:]
    assert cosine(decoded, forced) > 0.999
    assert cosine(decoded, expected) > 0.999
    assert torch.equal(decoded.argmax(-1), forced.argmax(-1))
    assert torch.equal(decoded.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("form", ["bitlinear", "autobitlinear", "online"])
def test_half_precision_stays_close(form: str, dtype: str, ternary: Ternary) -> None:
    # Sums of 64 codes overflow fp16 where they are not scaled down, and a relu squared soon after.
    model = ternary("bitnet", form, 0)
    with load(model.folder, dtype=dtype) as engine:
        assert cosine(engine.logits(model.ids), model.logits()) > 0.98


def test_random_weights_of_the_model_group_run() -> None:
    shape = "model.random_config."
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    overrides = ["model=bitnet", f"{shape}vocab_size=80", f"{shape}num_hidden_layers=2"]
    overrides += [f"{shape}{name}={size}" for name, size in sizes.items()]
    with Engine.load("random:", dtype="fp32", graph="eager", overrides=overrides) as engine:
        logits = engine.logits([[1, 2, 3]])
        assert logits.isfinite().all()
        assert 0.01 < logits.std() < 10
        up = engine.runner.builder.decoder.layers[0].mlp.up_proj
        assert up.packing is not None
        assert set(up.packing.unpack(up.weight, torch.float32).unique().tolist()) == {-1.0, 0.0, 1.0}


TRUE_SHAPE = {
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["autobitlinear", "bitlinear", "online"])
def test_a_layer_of_the_2b_4t_gives_transformers_logits(form: str, tmp_path: Path) -> None:
    model = save_ternary("bitnet", form, 0, tmp_path, TRUE_SHAPE)
    expected = model.logits()
    with load(tmp_path) as engine, torch.inference_mode():
        logits = engine.logits(model.ids)
        row = model.ids[0].tolist()
        decoded = torch.cat([engine.runner.extend([[token_id]], [at]) for at, token_id in enumerate(row)])
    difference = (logits - expected).abs()
    print(
        f"\n2B-4T layer, {form}: mean error {difference.mean():.1e}, most {difference.max():.1e}, at logits that vary"
    )
    print(f"by {expected.std():.2f}; token by token {(decoded - expected[0]).abs().mean():.1e}")
    assert_same(logits, expected)
    assert cosine(decoded, expected[0]) > 0.999
    assert torch.equal(decoded.argmax(-1), expected[0].argmax(-1))
