"""An engine as a transformers model gives what transformers' own model of the same checkpoint gives, float32."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from support.tiny_models import ARCHITECTURES, VOCAB, TinyModel, tolerance_of
from torch import Tensor, nn

from graphcore import Engine
from graphcore.device import find_cpp_compiler
from graphcore.errors import ConfigError

pytestmark = pytest.mark.thorough

Tiny = Callable[[str], TinyModel]
GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"
PADDING = 7  # columns before the first row's prompt
SEARCHES = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "num_return_sequences": 2},
}
HARD = ("llama3", "gemma3", "gpt2", "qwen3_5", "lfm2_moe")  # rings of pages, learned positions, recurrent states
QUICK = {  # models whose `generate` is compared in CI: every kind of cache, and a mixture of experts
    "streaming=off": (*HARD, "gemma4", "gpt_oss"),
    "streaming=on": ("qwen3_5",),
}


def load(folder: Path, *overrides: str, graph: str = "eager") -> Engine:
    sizes = ["batch_size=3", "context_length=128", "prefill_chunk=16", *overrides]
    return Engine.load(folder, dtype="fp32", device="cpu", graph=graph, overrides=sizes)


@pytest.fixture(scope="module")
def model(tiny_model: Tiny) -> Iterator[Callable[[str], nn.Module]]:
    """A function from a family's name to an engine's model; engines are closed after the last test."""
    engines: list[Engine] = []

    @cache
    def make(name: str) -> nn.Module:
        engines.append(load(tiny_model(name).folder))
        return engines[-1].as_transformers()

    yield make
    for engine in engines:
        engine.close()


def padded(tiny: TinyModel, length: int = 20) -> dict[str, Tensor]:
    """Two prompts, of which the first is padded at the left."""
    ids, mask = tiny.ids[:, :length].clone(), torch.ones(2, length, dtype=torch.long)
    ids[0, :PADDING], mask[0, :PADDING] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def both(ours: nn.Module, reference: nn.Module, seed: int = 3, **given: object) -> tuple[object, object]:
    """Return what `generate` of both gives, after the same seed."""
    found = []
    for each in (ours, reference):
        torch.manual_seed(seed)
        found.append(each.generate(**{"max_new_tokens": 8, "pad_token_id": 0, **given}))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        pytest.param(name, placement, marks=() if name in quick else pytest.mark.slow)
        for placement, quick in QUICK.items()
        for name in ARCHITECTURES
    ],
)
def test_generate_gives_transformers_tokens(name: str, placement: str, tiny_model: Tiny) -> None:
    tiny = tiny_model(name)
    with load(tiny.folder, placement) as engine:
        ours = engine.as_transformers()
        for search, settings in SEARCHES.items():
            found, expected = both(ours, tiny.reference, **padded(tiny), **settings)
            assert torch.equal(found, expected), search


@pytest.mark.parametrize("search", SEARCHES)
def test_generation_ends_at_the_context_as_an_engines_own_does(search: str, tiny_model: Tiny) -> None:
    """The context counts tokens, not columns, so that columns of padding are on top."""
    tiny, given = tiny_model("llama3"), padded(tiny_model("llama3"))
    aside = {name: nn.functional.pad(value, (2, 0)) for name, value in given.items()}
    with load(tiny.folder, "context_length=32") as engine:
        ours = engine.as_transformers()
        (own,) = engine.generate(tiny.ids[1, :20], max_new_tokens=-1, ignore_eos=True)
        more = 32 - 20 + 1
        assert (len(own.token_ids), own.finish_reason) == (more, "context")
        for batch in (given, aside):
            asked = {**batch, **SEARCHES[search], "pad_token_id": 0, "eos_token_id": None}
            torch.manual_seed(3)
            found = ours.generate(**asked, max_new_tokens=500)
            torch.manual_seed(3)
            assert torch.equal(found, tiny.reference.generate(**asked, max_new_tokens=more))
            assert found.shape[1] == batch["input_ids"].shape[1] + more


def test_drafts_end_at_the_context(tiny_model: Tiny) -> None:
    tiny = tiny_model("llama3")
    ids, given = tiny.ids[:1, :20], {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = tiny.reference.generate(ids, **given, max_new_tokens=13)
    with load(tiny.folder, "context_length=32") as engine:
        ours = engine.as_transformers()
        looked_up = ours.generate(ids, **given, max_new_tokens=500, prompt_lookup_num_tokens=4)
        assert torch.equal(looked_up, expected[:, :30])  # drafts of 4 may come at once, and have to fit as well
        drafted = ours.generate(ids, **given, max_new_tokens=500, assistant_model=tiny_model("gpt2").reference)
        assert torch.equal(drafted, expected)
        assert torch.equal(ours.generate(ids, **given, max_length=500, use_cache=False), expected)
        full = tiny.ids[:1].repeat(1, 2)[:, :32]
        assert ours.generate(full, **given, max_new_tokens=5).shape == (1, 33)


@pytest.mark.skipif(not find_cpp_compiler(), reason="needs built kernels")
def test_generate_runs_on_recorded_decode_steps(tiny_model: Tiny) -> None:
    tiny = tiny_model("llama3")
    with load(tiny.folder, graph="auto") as engine:
        assert engine.stats["graph"] == "captured"
        for settings in SEARCHES.values():
            found, expected = both(engine.as_transformers(), tiny.reference, **padded(tiny), **settings)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "gpt2"])
def test_a_gguf_file_generates_as_transformers_does_from_the_folder(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(3, 27).view(2, 12)
    with load(GOLDEN / f"{name}.gguf", "context_length=64") as engine:
        ours = engine.as_transformers()
        found, expected = both(ours, reference, input_ids=ids, eos_token_id=None, **SEARCHES["sampled"])
        assert torch.equal(found, expected)
        expected_config = AutoConfig.from_pretrained(GOLDEN / name).get_text_config()
        assert type(ours.config) is type(expected_config)
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            assert getattr(ours.config, key) == getattr(expected_config, key)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_generate_returns_scores_logits_and_hidden_states(
    name: str, search: str, tiny_model: Tiny, model: Callable[[str], nn.Module]
) -> None:
    tiny = tiny_model(name)
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    asked |= {"output_hidden_states": True, "max_new_tokens": 4, **SEARCHES[search]}
    found, expected = both(model(name), tiny.reference, **padded(tiny), **asked)
    assert type(found) is type(expected)
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip((*found.scores, *found.logits), (*expected.scores, *expected.logits), strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        assert (ours - theirs)[theirs.isfinite()].abs().max() < tolerance_of(name)
    if search == "beams":
        assert (found.sequences_scores - expected.sequences_scores).abs().max() < tolerance_of(name)
    kept = padded(tiny)["attention_mask"].bool().repeat_interleave(len(found.hidden_states[0][0]) // 2, dim=0)
    for step, (ours, theirs) in enumerate(zip(found.hidden_states, expected.hidden_states, strict=True)):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.shape == other.shape
            columns = kept if step == 0 else torch.ones(mine.shape[:2], dtype=torch.bool)
            assert (mine - other)[columns].abs().max() < 2e-5 * other[columns].abs().max()


def test_logits_processors_and_stopping_criteria_run(tiny_model: Tiny, model: Callable[[str], nn.Module]) -> None:
    from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

    class Even(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, 1::2] = -torch.inf
            return scores

    class AtLength(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 26)

    tiny, ours = tiny_model("llama3"), model("llama3")
    plain, _ = both(ours, tiny.reference, **padded(tiny))
    end = int(plain[0, 24])
    for settings in (
        {"logits_processor": LogitsProcessorList([Even()])},
        {"stopping_criteria": StoppingCriteriaList([AtLength()])},
        {"eos_token_id": end},
        {"eos_token_id": end, "num_beams": 3, "early_stopping": True, "length_penalty": 0.5},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"bad_words_ids": [[end]], "min_new_tokens": 3, "suppress_tokens": [1, 2]},
        {"prefix_allowed_tokens_fn": lambda row, ids: [row, 5, 9]},
        {"guidance_scale": 1.5},
        {"do_sample": True, "min_p": 0.05, "num_beams": 2},
    ):
        found, expected = both(ours, tiny.reference, **padded(tiny), **settings)
        assert torch.equal(found, expected), settings
        assert not torch.equal(found, plain), settings


def test_a_streamer_gets_the_tokens(tiny_model: Tiny, model: Callable[[str], nn.Module]) -> None:
    class Collected:
        def __init__(self) -> None:
            self.parts: list[Tensor] = []
            self.has_ended = False

        def put(self, value: Tensor) -> None:
            self.parts.append(value)

        def end(self) -> None:
            self.has_ended = True

    tiny, streamer = tiny_model("llama3"), Collected()
    found = model("llama3").generate(tiny.ids[:1, :8], max_new_tokens=6, pad_token_id=0, streamer=streamer)
    assert torch.cat([part.flatten() for part in streamer.parts]).tolist() == found[0].tolist()
    assert streamer.has_ended


@pytest.mark.parametrize("name", HARD)
def test_forward_gives_the_logits_of_padded_rows(
    name: str, tiny_model: Tiny, model: Callable[[str], nn.Module]
) -> None:
    """At the left or at the right, in one call and in several, with labels; as evaluation harnesses call it."""
    tiny, ours, length = tiny_model(name), model(name), 30
    ids = tiny.ids[:, :length]
    for sides in ("left", "right"):
        mask = torch.ones_like(ids)
        mask[0, slice(0, PADDING) if sides == "left" else slice(-PADDING, None)] = 0
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        with torch.no_grad():
            expected = tiny.reference(ids, attention_mask=mask, position_ids=positions).logits
        found = ours(input_ids=ids, attention_mask=mask).logits
        assert (found - expected)[mask.bool()].abs().max() < tolerance_of(name)
        assert not found[~mask.bool()].any()
        past, parts = None, []
        for begin, end in ((0, 5), (5, 6), (6, 25), (25, length)):  # the first five columns of a row are padding
            out = ours(ids[:, begin:end], mask[:, :end], positions[:, begin:end], past_key_values=past, use_cache=True)
            past = out.past_key_values
            parts.append(out.logits)
        assert past.get_seq_length() == length
        assert (torch.cat(parts, dim=1) - expected)[mask.bool()].abs().max() < tolerance_of(name)
        last = ours(ids, mask, logits_to_keep=PADDING + 2, use_cache=False)  # of a row padded at the right, two tokens
        assert last.logits.shape == (2, PADDING + 2, VOCAB)
        assert last.past_key_values is None
        assert (last.logits - found[:, -PADDING - 2 :]).abs().max() < tolerance_of(name)
        assert torch.equal(ours(ids[1:]).logits, found[1:])  # without a mask
        chosen = ours(ids, mask, logits_to_keep=torch.tensor([9, 11])).logits
        assert torch.equal(chosen, found[:, [9, 11]])


def test_the_loss_is_transformers(tiny_model: Tiny, model: Callable[[str], nn.Module]) -> None:
    tiny = tiny_model("llama3")
    labels = tiny.ids.clone()
    labels[:, :9] = -100
    with torch.no_grad():
        expected = tiny.reference(tiny.ids, labels=labels).loss
    assert (model("llama3")(tiny.ids, labels=labels).loss - expected).abs() < 1e-5
    loss, logits = model("llama3")(tiny.ids, labels=labels, use_cache=False, return_dict=False)
    assert (loss - expected).abs() < 1e-5
    assert logits.shape == (2, 50, VOCAB)


@pytest.mark.parametrize("name", HARD)
def test_a_cache_goes_on_is_copied_cropped_and_reordered(
    name: str, tiny_model: Tiny, model: Callable[[str], nn.Module]
) -> None:
    tiny, ours = tiny_model(name), model(name)

    def check(past: object, rows: Tensor, more: int) -> None:
        """Rows go on from a cache that holds all but their last tokens."""
        found = ours(rows[:, -more:], past_key_values=past).logits
        assert (found - tiny.logits_of(rows)[:, -more:]).abs().max() < tolerance_of(name)

    ids = tiny.ids
    past = ours(ids[:, :30]).past_key_values
    copied = copy.deepcopy(past)
    check(past, ids[:, :34], 4)
    check(copied, ids[:, :31], 1)  # what the other did has not changed it
    copied.crop(-20)
    assert copied.get_seq_length() == 11
    check(copied, ids[:, :13], 2)
    copied.activate_past_recording()
    for end in (14, 15, 19):
        check(copied, ids[:, :end], end - copied.get_seq_length())
    copied.crop(-2)
    check(copied, ids[:, :20], 3)
    copied.batch_repeat_interleave(2)
    copied.batch_select_indices(torch.tensor([3, 0, 2, 1]))
    copied.reorder_cache(torch.tensor([0, 1, 1, 3]))
    check(copied, torch.cat([ids[:, :20], ids[:, 20:23].flip(0)], dim=1)[[1, 0, 0, 0]], 3)
    copied.reset()
    assert copied.get_seq_length() == 0
    check(copied, ids[:1, :6], 6)


@pytest.mark.parametrize("name", HARD)
def test_generation_goes_on_from_the_cache_of_an_earlier_one(
    name: str, tiny_model: Tiny, model: Callable[[str], nn.Module]
) -> None:
    tiny, ours = tiny_model(name), model(name)
    given = {"pad_token_id": 0, "max_new_tokens": 6}
    first = ours.generate(**padded(tiny), **given, return_dict_in_generate=True)
    turn = torch.cat([first.sequences, tiny.ids[:, :5]], dim=1)
    mask = torch.cat([padded(tiny)["attention_mask"], torch.ones(2, 11, dtype=torch.long)], dim=1)
    asked = {"attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 8}
    expected = tiny.reference.generate(turn, **asked)
    from graphcore.engine.pretrained.causal_model import CACHE  # as this version of transformers calls it

    going_on = {CACHE: first.past_key_values}
    found = ours.generate(turn, **asked, **going_on)
    assert torch.equal(found, expected)
    chunked = ours.generate(turn, **asked, prefill_chunk_size=4)
    assert torch.equal(chunked, expected)
    plain = ours.generate(turn, **asked, use_cache=False)
    assert torch.equal(plain, expected)


@pytest.mark.parametrize("name", HARD)
def test_drafts_are_checked_and_made(name: str, tiny_model: Tiny, model: Callable[[str], nn.Module]) -> None:
    """A draft model of another kind, prompt lookup, and an engine that drafts for transformers' model."""
    tiny, ours = tiny_model(name), model(name)
    ids = torch.cat([tiny.ids[:1, :8], tiny.ids[:1, :8]], dim=1)
    given = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    expected = tiny.reference.generate(ids, **given)
    assert torch.equal(ours.generate(ids, **given, prompt_lookup_num_tokens=4), expected)
    for draft in ("llama3", "gpt2"):
        assert torch.equal(ours.generate(ids, **given, assistant_model=model(draft)), expected)
    other = tiny_model("llama3").reference
    assert torch.equal(ours.generate(ids, **given, assistant_model=other), expected)
    assert torch.equal(other.generate(ids, **given, assistant_model=ours), other.generate(ids, **given))


def test_config_and_generation_config_are_the_checkpoints(tiny_model: Tiny, tmp_path: Path) -> None:
    from transformers import Gemma3Config, GenerationMixin, LlamaConfig, PreTrainedModel

    shutil.copytree(tiny_model("llama3").folder, tmp_path / "llama3")
    settings = tmp_path / "llama3" / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [5, 7], "pad_token_id": 0, "temperature": 0.3, "do_sample": True}))
    with load(tmp_path / "llama3", "model.num_hidden_layers=2") as engine:
        ours = engine.as_transformers()
        assert isinstance(ours, PreTrainedModel)
        assert isinstance(ours, GenerationMixin)
        assert isinstance(ours.config, LlamaConfig)
        assert ours.config.num_hidden_layers == 2
        assert (ours.device, ours.dtype) == (torch.device("cpu"), torch.float32)
        assert ours.generation_config.eos_token_id == [5, 7]
        assert ours.generation_config.temperature == 0.3
        assert not ours.training
        ours.tie_weights()  # what harnesses call
    with load(tiny_model("gemma3_nested").folder) as engine:
        nested = engine.as_transformers()
        assert isinstance(nested.config, Gemma3Config)
        ids = tiny_model("llama3").ids[:, :9]
        found, expected = both(nested, tiny_model("gemma3_nested").reference, input_ids=ids)
        assert torch.equal(found, expected)


def test_a_config_that_transformers_does_not_know_is_made_of_what_graphcore_has_read(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    """So is a generation config that is malformed; the files are changed after the engine has read them."""
    shutil.copytree(tiny_model("llama3").folder, tmp_path / "llama3")
    given = {"bos_token_id": 1, "eos_token_id": [9, 4]}
    (tmp_path / "llama3" / "generation_config.json").write_text(json.dumps(given))
    with load(tmp_path / "llama3") as engine:
        (tmp_path / "llama3" / "generation_config.json").write_text('{"eos_token_id": [5, ')
        (tmp_path / "llama3" / "config.json").write_text('{"model_type": "unheard_of"}')
        ours = engine.as_transformers()
        assert (ours.generation_config.bos_token_id, ours.generation_config.eos_token_id) == (1, [4, 9])
        assert ours.config.hidden_size == tiny_model("llama3").reference.config.hidden_size
        assert ours.config.rope_parameters == tiny_model("llama3").reference.config.rope_parameters


def dynamic() -> object:
    from transformers import DynamicCache

    return DynamicCache()


WRONG: dict[str, tuple[Callable[[nn.Module, Tensor], object], str]] = {
    "embeddings": (lambda ours, ids: ours(inputs_embeds=torch.zeros(1, 2, 64)), "inputs_embeds: an engine takes"),
    "attentions": (lambda ours, ids: ours(ids, output_attentions=True), "output_attentions: an engine never has"),
    "another cache": (lambda ours, ids: ours(ids, past_key_values=dynamic()), "past_key_values is a DynamicCache"),
    "a cache in generate": (
        lambda ours, ids: ours.generate(ids, cache=dynamic(), pad_token_id=0),
        r"give what this model returned or made \(model.new_cache\(\)\)",
    ),
    "rows": (
        lambda ours, ids: ours(ids[:1], past_key_values=ours(ids).past_key_values),
        "input_ids has 1 rows and past_key_values 2",
    ),
    "mask of another shape": (
        lambda ours, ids: ours(ids, torch.ones(2, 3), past_key_values=ours(ids).past_key_values),
        r"attention_mask is \[2, 3\], and must be \[2, 8\]",
    ),
    "additive mask": (lambda ours, ids: ours(ids, torch.full((2, 4), -torch.inf)), "0 where a column is padding"),
    "mask of four dimensions": (lambda ours, ids: ours(ids, torch.ones(2, 1, 4, 4)), r"must be \[2, 4\]"),
    "no token": (lambda ours, ids: ours(ids, torch.zeros(2, 4)), "leaves out all new columns"),
    "positions": (lambda ours, ids: ours(ids, position_ids=torch.tensor([[1, 2, 3, 4]])), "position_ids must number"),
    "one row without a batch": (lambda ours, ids: ours(ids[0]), r"must be a tensor \[B, T\] .*, found \[4\]"),
    "no row": (lambda ours, ids: ours(ids[:0]), r"with at least one token, found \[0, 4\]"),
    "no column": (lambda ours, ids: ours(ids[:, :0]), r"with at least one token, found \[2, 0\]"),
    "a list": (lambda ours, ids: ours(ids.tolist()), "input_ids must be a tensor .*, found list"),
    "prompt": (
        lambda ours, ids: ours.generate(ids.repeat(1, 40), num_beams=2, pad_token_id=0),
        "160 tokens do not fit in context_length=128",
    ),
    "context": (lambda ours, ids: ours(ids.repeat(1, 40)), "do not fit in context_length=128"),
    "saving": (lambda ours, ids: ours.save_pretrained("anywhere"), "save_pretrained: this model has no weights"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_an_engine_cannot_do_is_refused_in_one_line(
    wrong: str, tiny_model: Tiny, model: Callable[[str], nn.Module]
) -> None:
    call, said = WRONG[wrong]
    with pytest.raises(ConfigError, match=said) as caught:
        call(model("llama3"), tiny_model("llama3").ids[:, :4])
    assert "\n" not in str(caught.value)


def test_a_fallback_model_and_a_closed_engine_are_refused(tiny_model: Tiny) -> None:
    fallback = load(tiny_model("llama3").folder, "model.fallback=transformers")
    with fallback, pytest.raises(ConfigError, match="transformers' own already"):
        fallback.as_transformers()
    with load(tiny_model("llama3").folder) as engine:
        ours = engine.as_transformers()
    for call in (engine.as_transformers, lambda: ours(tiny_model("llama3").ids)):
        with pytest.raises(ConfigError, match="closed"):
            call()
