"""Tasks on a model that runs through transformers: those that can, and those that say why they cannot."""

from pathlib import Path

import pytest
import torch
from support.fallback_models import NEW_TOKENS, FallbackModel, save_fallback
from support.task_runs import RunTask
from support.tiny_models import add_tokenizer
from test_results_documented import fields_of, written
from torch.nn import functional

from graphcore import Engine
from graphcore.config.byte_sizes import both_in_words
from graphcore.engine.fallback.transformers_loader import TransformersLoader
from graphcore.tasks.measuring.random_batch import RandomBatch
from graphcore.tasks.reference import reference_memory
from graphcore.weights import groups

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FallbackModel:
    return save_fallback("olmo2", tmp_path_factory.mktemp("olmo2"))


def keys(model: FallbackModel) -> list[str]:
    return [f"model.checkpoint={model.folder}", "model.fallback=transformers", "model.attention=eager", "dtype=fp32"]


@pytest.mark.parametrize("streaming", ["off", "on"])
def test_generate_gives_transformers_tokens_and_says_what_ran(
    run_task: RunTask, model: FallbackModel, streaming: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = model.ids[0].tolist()
    run = run_task(*keys(model), f"prompt_ids={ids}", f"max_new_tokens={NEW_TOKENS}", f"streaming={streaming}")
    assert run.record["token_ids"] == model.greedy()[0]
    assert run.record["model"]["model_type"] == "olmo2"
    assert (run.record["graph"]["kind"], run.record["graph"]["compiled"]) == ("eager", 0)
    assert run.record["graph"]["captured"] is None
    (weights,) = run.record["quant"]["weights"]
    assert (weights["format"], weights["tensors"]) == ("float32", len(model.reference.state_dict()))
    assert "olmo2 runs through transformers' own classes, eager" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_encode_the_prompt_is_refused_before_its_modules_are_made(
    run_task: RunTask, model: FallbackModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransformersLoader, "prepare", lambda *_: pytest.fail("modules were made"))
    assert "has no tokenizer" in str(run_task(*keys(model), "prompt=text").error)


def test_plan_counts_the_checkpoints_bytes(run_task: RunTask, model: FallbackModel) -> None:
    record = run_task("task=plan", *keys(model)).record
    names = [group["name"] for group in record["groups"]]
    assert names == ["embed_tokens", "layers.0", "layers.1", "layers.2", "head", "vectors"]
    layer = [weight for name, weight in model.reference.state_dict().items() if name.startswith("model.layers.0.")]
    assert record["groups"][1]["bytes"] == sum(weight.nbytes for weight in layer if weight.dim() > 1)


def test_microbench_needs_graphcores_own_programs(run_task: RunTask, model: FallbackModel) -> None:
    run = run_task("task=microbench", *keys(model))
    assert run.status == 1
    assert "task=microbench looks into graphcore's own programs" in str(run.record["error"])
    assert "use it with task=generate, chat, bench, perplexity, verify or plan" in str(run.record["error"])


BENCH = ("task=bench", "task.prompt_tokens=6", "task.new_tokens=4", "task.repeats=2", "task.depth=9")


@pytest.mark.parametrize("streaming", ["off", "on"])
def test_bench_records_all_fields_and_the_bytes_that_a_step_reads(
    run_task: RunTask, model: FallbackModel, streaming: str
) -> None:
    run = run_task(*BENCH, "task.batch=2", *keys(model), f"streaming={streaming}")
    record = run.record
    assert (run.status, record["prefill"]["tokens"], record["decode"]["tokens"]) == (0, 2 * 6, 2 * 4)
    assert set(written(record)) == fields_of("bench")
    stored = model.reference.state_dict()
    table = stored["model.embed_tokens.weight"]
    others = sum(weight.nbytes for weight in stored.values()) - table.nbytes  # olmo2's head is not tied
    assert record["decode"]["weight_bytes_per_step"] == others + 2 * table[0].nbytes
    assert record["graph"]["kernels_per_token"] > 20
    layers = sum(weight.nbytes for name, weight in stored.items() if weight.dim() > 1 and weight is not table)
    moved = record["streaming"]["bytes_per_token"]
    # Slots are aligned, and on a busy machine a group that is read ahead may still be on its way when the clock stops.
    assert moved is None if streaming == "off" else moved == pytest.approx(layers, rel=0.08), (moved, layers)


@pytest.mark.parametrize("depth", [0, 9])
def test_each_timed_part_is_what_transformers_computes_at_that_depth(model: FallbackModel, depth: int) -> None:
    overrides = ["model.fallback=transformers", "model.attention=eager", "batch_size=2", "prefill_chunk=4"]
    with Engine.load(model.folder, dtype="fp32", device="cpu", graph="eager", overrides=overrides) as engine:
        runner = engine.runner
        work = RandomBatch(engine, 2, depth, 6, 5, seed=0)
        seen, extend = [], runner.extend
        runner.extend = lambda *given: seen.append(extend(*given)) or seen[-1]
        for _ in range(2):  # the second time as the first
            work.fill()
            work.prefill()
            logits = seen[-1]
            work.fill()
            work.decode()
    prompts = [before + prompt for before, prompt in zip(work._before, work._prompts, strict=True)]
    with torch.no_grad():
        expected = model.reference(input_ids=torch.tensor(prompts)).logits[:, -1]
        ids = torch.tensor([row[: depth + 1] for row in prompts])
        made = model.reference.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert (logits - expected).abs().max() < 1e-5
    assert work.tokens == made[:, depth + 1 :].tolist()
    assert (work.num_prefill_passes(), work.num_fill_passes()) == (2, 3 if depth else 0)


def test_bench_of_a_model_whose_prompts_run_one_by_one_takes_one_sequence(run_task: RunTask, tmp_path: Path) -> None:
    lone = save_fallback("lfm2", tmp_path / "lfm2")
    run = run_task(*BENCH, "task.batch=2", *keys(lone))
    assert "task.batch=2, and prompts of lfm2 run one by one; use task.batch=1" in str(run.error)
    assert run_task(*BENCH, *keys(lone)).status == 0


@pytest.mark.parametrize("path", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("name", "streaming", "stride"),
    [("olmo2", "off", 29), ("olmo2", "off", 20), ("olmo2", "on", 29), ("bloom", "off", 29), ("lfm2", "off", 29)],
)
def test_perplexity_is_that_of_transformers(
    run_task: RunTask, tmp_path: Path, name: str, streaming: str, stride: int, path: str
) -> None:
    scored = save_fallback(name, tmp_path / name)
    add_tokenizer(scored.folder)
    text = tmp_path / "text.txt"
    text.write_text("The river had been low all summer.", encoding="utf-8")
    asked = (f"task.text={text}", "task.window=30", f"task.stride={stride}", f"task.path={path}", "prefill_chunk=8")
    run = run_task("task=perplexity", *keys(scored), *asked, f"streaming={streaming}")
    ids = torch.tensor([[ord(character) - 31 for character in text.read_text("utf-8")]])
    windows = (ids[:, :30], ids[:, stride:])  # the second one scores the four tokens that the first has not
    with torch.no_grad():
        logits = [scored.reference(input_ids=window).logits[0, :-1].double() for window in windows]
    losses = [
        functional.cross_entropy(found, ids[0, 1:], reduction="none")
        for found, ids in zip(logits, windows, strict=True)
    ]
    assert run.status == 0, run.error
    assert run.record["tokens"] == 29 + 4
    mean = torch.cat((losses[0], losses[1][-4:])).mean()
    assert run.record["perplexity"] == pytest.approx(mean.exp().item(), rel=1e-5)


VERIFY = ("task=verify", "task.tokens=20", "task.new_tokens=4")


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("olmo2", ("dtype=fp32", "streaming=on")),
        ("olmo2", ("dtype=bf16",)),
        ("granite", ("dtype=fp32",)),  # a tied head, and scales of its own
        ("bloom", ("dtype=fp32",)),
        ("gpt_neox", ("dtype=fp32",)),
        ("lfm2", ("dtype=fp32",)),
    ],
)
def test_verify_compares_with_transformers_own_class(
    run_task: RunTask, tmp_path: Path, name: str, asked: tuple[str, ...]
) -> None:
    saved = save_fallback(name, tmp_path / name)
    run = run_task(*VERIFY, *keys(saved)[:3], "prefill_chunk=8", *asked)
    record = run.record
    assert (run.status, record["reference"], record["first_beyond"]) == (0, "transformers' from_pretrained", None)
    assert len(record["layers"]) == 1 + 3
    assert record["layers"][0]["max"] <= (0.0 if "dtype=fp32" in asked else 0.1)
    assert record["greedy"]["tokens"] == 4
    assert record["cached"]["tokens"] == 20
    if "dtype=fp32" in asked:
        assert record["logits"]["max"] < 1e-5
        assert min(line["cosine"] for line in (*record["layers"], record["logits"], record["cached"])) > 1 - 1e-9
    else:
        assert 0 < record["logits"]["max"] <= record["tolerance"]


@pytest.mark.parametrize(("change", "said"), [(1.05, "the logits differ by"), (float("nan"), "logits are not finite")])
def test_verify_names_the_layer_of_a_wrong_weight(
    run_task: RunTask, model: FallbackModel, monkeypatch: pytest.MonkeyPatch, change: float, said: str
) -> None:
    right = groups.fill_weight

    def wrong(loader: object, name: str, packing: None, view: torch.Tensor, rows: range | None) -> None:
        right(loader, name, packing, view, rows)
        if name == "model.layers.1.mlp.down_proj.weight":
            view[3].mul_(change)

    monkeypatch.setattr(groups, "fill_weight", wrong)
    run = run_task(*VERIFY, *keys(model))
    assert (run.status, run.record["first_beyond"]) == (1, "layers.1")
    assert said in run.record["error"]
    assert "layers.1 is the first layer beyond the tolerance" in run.record["error"]
    assert [layer["not_finite"] > 0 for layer in run.record["layers"][:3]] == [False, False, change != 1.05]


def test_verify_of_a_model_that_does_not_fit_twice_is_refused(
    run_task: RunTask, model: FallbackModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = model.reference.state_dict().values()
    needed = 4 * sum(tensor.numel() for tensor in tensors) + 4 * max(tensor.numel() for tensor in tensors)
    needed += reference_memory.TRANSFORMERS_NBYTES
    monkeypatch.setattr(reference_memory, "free_device_nbytes", lambda device: needed - 1)
    run = run_task(*VERIFY, *keys(model))
    assert "takes {}, {} are free; task=perplexity".format(*both_in_words(needed, needed - 1)) in str(run.error)


def test_packing_knows_graphcores_own_models_only(run_task: RunTask, model: FallbackModel, tmp_path: Path) -> None:
    run = run_task("task=pack", "quant=q8_0", *keys(model)[:2], f"task.output={tmp_path / 'out.gguf'}")
    assert run.status == 1
    assert "model.fallback has no effect with task=pack" in str(run.record["error"])
