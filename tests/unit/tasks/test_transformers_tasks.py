"""Tasks on a model that runs through transformers: those that can, and those that say why they cannot."""

from pathlib import Path

import pytest
from fallback_models import NEW_TOKENS, FallbackModel, save_fallback
from task_runs import RunTask


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


def test_plan_counts_the_checkpoints_bytes(run_task: RunTask, model: FallbackModel) -> None:
    record = run_task("task=plan", *keys(model)).record
    names = [group["name"] for group in record["groups"]]
    assert names == ["embed_tokens", "layers.0", "layers.1", "layers.2", "head", "vectors"]
    layer = [weight for name, weight in model.reference.state_dict().items() if name.startswith("model.layers.0.")]
    assert record["groups"][1]["bytes"] == sum(weight.nbytes for weight in layer if weight.dim() > 1)


@pytest.mark.parametrize("task", ["bench", "microbench", "verify", "perplexity"])
def test_tasks_that_look_into_graphcores_own_programs_are_refused(
    run_task: RunTask, model: FallbackModel, task: str, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 20, encoding="utf-8")
    more = [f"task.text={text}"] if task == "perplexity" else []
    run = run_task(f"task={task}", *keys(model), *more)
    assert run.status == 1
    said = "has no tokenizer" if task == "perplexity" else f"task={task} looks into graphcore's own programs"
    assert said in str(run.record["error"])


def test_packing_knows_graphcores_own_models_only(run_task: RunTask, model: FallbackModel, tmp_path: Path) -> None:
    run = run_task("task=pack", "quant=q8_0", *keys(model)[:2], f"task.output={tmp_path / 'out.gguf'}")
    assert run.status == 1
    assert "model.fallback has no effect with task=pack" in str(run.record["error"])
