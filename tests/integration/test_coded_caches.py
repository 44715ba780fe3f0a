"""Keys and values in codes, in every architecture: all ways to run agree, and the logits stay near transformers'.

The tiny models' heads are widened to whole blocks. Ways that run the same kernels agree to the bit: pages and one page,
streamed and resident. A captured step computes in its own order, so a number now and then falls on the other side of a
rounding.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from support import tiny_models
from support.streaming import runs_as
from support.tiny_models import TinyModel
from test_decode_equals_forward import PROMPTS, one_by_one, rows_of, together
from test_paged_caches import BATCH, CHUNK, CONTEXT, PAGE, SETTINGS, answers, assert_bits_agree, engine_with_pages
from torch import Tensor, nn

from graphcore import Engine
from graphcore.errors import ConfigError
from graphcore.kernels.ops.kv_formats import KVTypes
from graphcore.kvcache.buffers import KVCache

pytestmark = pytest.mark.thorough

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # of 32 features, in models 64 wide
FORMATS = ("q8_0", "q5_0", "q4_0", "q8_0,q4_0")
# Root mean square of the logits' error over that of the logits. Random weights attend sharply and magnify errors; a
# value that stays mixed, or a key that is mixed when its query is not, gives more than 1.
NEAR = {"q8_0": 4e-2, "q5_0": 0.3, "q4_0": 0.5, "q8_0,q4_0": 0.5}
SAME = {"q8_0": 3e-3, "q5_0": 1e-2, "q4_0": 2e-2, "q8_0,q4_0": 2e-2}  # the same between ways to run


def _gemma3(**changes: object) -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**{**tiny_models.GEMMA_TEXT, **changes}))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": tiny_models.VOCAB, "n_positions": 512, "n_embd": 64, "n_layer": 3, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tiny_models.NO_TOKENS))


def _qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**tiny_models.SIZES, **HEADS, num_hidden_layers=3, **tiny_models.NO_TOKENS))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama3": lambda: tiny_models.BUILDERS["llama3"](head_dim=96),
    "mistral": tiny_models.BUILDERS["mistral"],
    "qwen2": _qwen2,
    "qwen3": tiny_models.BUILDERS["qwen3"],
    "gemma3": lambda: _gemma3(head_dim=64),
    "gemma4": lambda: tiny_models.gemma4(head_dim=32, global_head_dim=64),
    "gpt2": _gpt2,
    "gpt_oss": lambda: tiny_models.gpt_oss(head_dim=32),
    # every expert of every token: random routers are often undecided, and a rounded key then swaps two experts
    "qwen3_moe": lambda: tiny_models.qwen3_moe(num_experts_per_tok=tiny_models.QWEN3_MOE["num_experts"]),
    "qwen3_5": tiny_models.BUILDERS["qwen3_5"],
    "qwen3_next": tiny_models.BUILDERS["qwen3_next"],
    "bitnet": lambda: tiny_models.BUILDERS["bitnet"](**HEADS),
}
QUICK = ("gemma4",)  # rings, shared layers and heads of two sizes: every way by default; the others in one


SOME = ("llama3", "mistral", "gpt_oss", "qwen3_5", "qwen3_moe")  # one of each kind of layer


def every(ways: Iterable[str], one: str, names: Sequence[str] = tuple(BUILDERS)) -> list[object]:
    """Return parameters: each model with each way, of which those of `names` run one by `-m thorough`."""

    def marks(name: str, way: str) -> Sequence[pytest.MarkDecorator]:
        return () if name in QUICK else (pytest.mark.thorough if way == one and name in names else pytest.mark.slow,)

    return [pytest.param(name, way, marks=marks(name, way)) for name in BUILDERS for way in ways]


Wide = Callable[[str], TinyModel]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Wide:
    """A function from a name to a tiny checkpoint whose heads are whole blocks."""
    made: dict[str, TinyModel] = {}

    def make(name: str) -> TinyModel:
        if name not in made:
            torch.manual_seed(0)
            reference, folder = BUILDERS[name](), Path(tmp_path_factory.mktemp(name))
            tiny_models.randomise(reference, 0)
            reference.set_attn_implementation("eager")
            reference.eval()
            reference.save_pretrained(folder)
            made[name] = TinyModel(name, folder, reference)
        return made[name]

    return make


def load(model: TinyModel, graph: str, *overrides: str, dtype: str = "fp32") -> Engine:
    sizes = (f"context_length={CONTEXT}", f"prefill_chunk={CHUNK}", f"batch_size={BATCH}", *overrides)
    engine = Engine.load(model.folder, dtype=dtype, device="cpu", graph=graph, overrides=sizes)
    assert runs_as(engine, graph)  # native decode steps, and prompts eager
    return engine


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference over that of what is expected."""
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
def steps_of(engine: Engine) -> list[Tensor]:
    rows = rows_of(seed=1)
    return [one_by_one(engine, rows[1], 17), *together(engine, rows, PROMPTS)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kv"), every(FORMATS, "q8_0,q4_0"))
def test_native_and_eager_steps_agree_and_stay_near_transformers(name: str, kv: str, wide_model: Wide) -> None:
    model, row = wide_model(name), rows_of(seed=1)[1]
    with torch.inference_mode():
        expected = model.reference(torch.tensor([row])).logits[0, 16:].float()
    found = {}
    for graph in ("auto", "eager"):
        with load(model, graph, f"kv_dtype={kv}") as engine:
            caches = [one for one in engine.runner.builder.caches if isinstance(one, KVCache)]  # type: ignore[attr-defined]
            assert all(one.k.dtype is torch.uint8 for one in caches)
            found[graph] = steps_of(engine)
    assert relative(found["eager"][0], expected) < NEAR[kv]
    for one, other in zip(found["auto"], found["eager"], strict=True):
        assert relative(one, other) < SAME[kv]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), every(SETTINGS, "native, bf16, streamed", SOME))
def test_pages_of_codes_have_the_bits_of_one_page(
    name: str, how: str, wide_model: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_bits_agree(wide_model(name), monkeypatch, PAGE, *SETTINGS[how], "kv_dtype=q8_0,q5_0")


@pytest.mark.parametrize(("name", "graph"), every(("eager", "auto"), "auto", SOME))
def test_streamed_weights_have_the_bits_of_resident_ones(name: str, graph: str, wide_model: Wide) -> None:
    found = []
    for overrides in ((), ("streaming=on",)):
        with load(wide_model(name), graph, "kv_dtype=q4_0", *overrides) as engine:
            found.append(answers(engine))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "name", [pytest.param("mistral", marks=pytest.mark.thorough), pytest.param("gemma4", marks=pytest.mark.slow)]
)
def test_compiled_blocks_attend_codes_in_pages(name: str, wide_model: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    model, row = wide_model(name), rows_of(seed=1)[1]
    alone = ("kv_dtype=q8_0", "batch_size=1")
    with load(model, "eager", *alone) as engine:
        expected = one_by_one(engine, row, 17)
    with engine_with_pages(model, PAGE, monkeypatch, "compiled", "fp32", *alone) as engine:
        assert relative(one_by_one(engine, row, 17), expected) < SAME["q8_0"]


def test_a_sequence_is_put_aside_in_codes(wide_model: Wide) -> None:
    row = rows_of(seed=2)[0]
    with load(wide_model("gemma4"), "eager", "kv_dtype=q5_0") as engine, torch.inference_mode():
        runner = engine.runner
        runner.extend([row[:40]], [0])
        expected = runner.extend([row[40:]], [40])
        runner.extend([row[:40]], [0])
        kept = runner.pages.copy_out(0, 40)
        runner.extend([row[::-1]], [0])
        runner.pages.free(0)
        assert runner.pages.copy_in(0, kept)
        assert torch.equal(runner.extend([row[40:]], [40]), expected)


def test_the_plan_counts_the_codes(wide_model: Wide) -> None:
    with load(wide_model("mistral"), "auto", "kv_dtype=q8_0,q4_0") as engine:
        caches = [one for one in engine.runner.builder.caches if isinstance(one, KVCache)]  # type: ignore[attr-defined]
        held = sum(one.k.nbytes + one.v.nbytes for one in caches) + caches[0].table.nbytes
        assert engine.plan.kv_nbytes == held
        assert engine.choices.kv_dtype == KVTypes("q8_0", "q4_0")
        assert str(engine.choices.kv_dtype) == "q8_0,q4_0"
        assert any("4 billion" in note for note in engine.notes)


def test_heads_that_are_no_whole_blocks_are_refused(tiny_model: Wide) -> None:
    with pytest.raises(ConfigError, match="heads of layer 0 have 24 features; use kv_dtype=auto"):
        load(tiny_model("llama3"), "eager", "kv_dtype=q8_0")


def test_float8_needs_a_gpu(wide_model: Wide) -> None:
    with pytest.raises(ConfigError, match="fp8 is for a GPU, and this is cpu; use kv_dtype=q8_0"):
        load(wide_model("mistral"), "eager", "kv_dtype=fp8")
