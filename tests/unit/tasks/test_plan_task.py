"""task=plan counts bytes from shapes and reads no weight."""

import pytest
from chat_folder import TINY
from safetensors.torch import load_file
from task_runs import RunTask

from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint

LLAMA = f"model.checkpoint={TINY / 'llama3'}"


def test_the_plan_is_the_checkpoints_bytes(
    run_task: RunTask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: object, name: str) -> None:
        pytest.fail(f"{name} was read")

    stored = load_file(TINY / "llama3" / "model.safetensors")
    monkeypatch.setattr(SafetensorsCheckpoint, "read", refuse)
    record = run_task("task=plan", LLAMA, "dtype=fp32", "context_length=100", "batch_size=2").record
    assert [group["name"] for group in record["groups"]] == ["embed_tokens", "layers.0", "layers.1", "head"]
    layer = sum(4 * tensor.numel() for name, tensor in stored.items() if name.startswith("model.layers.0."))
    assert record["groups"][1]["bytes"] == layer  # every tensor of it is a multiple of 256 bytes
    assert record["groups"][0]["bytes"] == stored["model.embed_tokens.weight"].nbytes
    # 2 sequences x 100 positions x 2 layers x keys and values x 2 kv heads x 32 elements x 4 bytes
    assert record["memory"]["kv_bytes"] == 2 * 100 * 2 * 2 * 2 * 32 * 4
    assert record["memory"]["weight_bytes"] == sum(group["bytes"] for group in record["groups"])
    assert record["memory"]["total_bytes"] == record["memory"]["weight_bytes"] + record["memory"]["kv_bytes"]
    assert record["fits"] is True
    out = capsys.readouterr().out
    assert "layers.0 ... layers.1 (each)" in out
    assert f"{layer:,}" in out


def test_what_cannot_fit_is_shown_and_fails(run_task: RunTask, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_task("task=plan", LLAMA, "context_length=131072", "batch_size=1000000")
    assert (run.status, run.record["status"], run.record["fits"]) == (1, "failed", False)
    assert run.record["error"].startswith("PlanError: streaming=off needs")
    out, err = capsys.readouterr()
    assert "kv cache" in out
    assert err.splitlines()[-1] == f"graphcore: {run.record['error']}"


def test_a_model_too_large_to_make_can_be_planned(run_task: RunTask) -> None:
    record = run_task("task=plan", "model=llama3", "model.checkpoint='random:'", "dtype=bf16").record
    # Llama 3.2 1B: 1,235,814,400 parameters, the tied head among them once; the 33 norms stay float32
    assert record["memory"]["weight_bytes"] == 2 * 1_235_814_400 + 2 * 33 * 2048


def test_a_prompt_has_no_effect(run_task: RunTask) -> None:
    assert "prompt has no effect with task=plan" in str(run_task("task=plan", LLAMA, "prompt=a").error)
