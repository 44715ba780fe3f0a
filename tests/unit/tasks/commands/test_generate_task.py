"""task=generate, against transformers' greedy tokens and hand-made prompts."""

import json
import re
from pathlib import Path

import pytest
import torch
from support.chat_folders import TINY, save_chat_folder
from support.processes import graphcore
from support.task_runs import RunTask
from support.tiny_models import add_tokenizer

from graphcore import Engine
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.loading.decoder_loader import DecoderLoader
from graphcore.engine.prompt_encoder import NOTE_ON_BOS
from graphcore.engine.request_handle import RequestHandle

LLAMA = f"model.checkpoint={TINY / 'llama3'}"
IDS = [5, 17, 3, 88, 41]


def greedy_of_transformers(ids: list[int], new_tokens: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY / "llama3", dtype=torch.float32)
    found = model.generate(torch.tensor([ids]), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return found[0, len(ids) :].tolist()


def test_greedy_tokens_are_those_of_transformers(run_task: RunTask, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_task(LLAMA, f"prompt_ids={IDS}", "max_new_tokens=12", "task.logprobs=true")
    expected = greedy_of_transformers(IDS, 12)
    assert (run.status, run.record["status"]) == (0, "ok")
    assert run.record["token_ids"] == expected
    assert run.record["generations"][0]["prompt_ids"] == IDS
    assert run.record["finish_reason"] == "length"
    assert len(run.record["generations"][0]["logprobs"]) == 12
    out, err = capsys.readouterr()
    assert out == " ".join(map(str, expected)) + " \n"
    assert "result: " in err


def test_what_ran_is_recorded(run_task: RunTask) -> None:
    record = run_task(LLAMA, f"prompt_ids={IDS}", "max_new_tokens=2", "dtype=bf16", "context_length=64").record
    assert (record["dtype"], record["kv_dtype"]) == ("bfloat16", "bfloat16")
    no_graphs = {"captured": None, "captured_bytes": None, "capture_seconds": None}
    assert record["graph"] == {"kind": "eager", "blocks": "eager", "prefill": "eager", "compiled": 0, **no_graphs}
    assert (record["context_length"], record["device"], record["threads"]) == (64, "cpu", torch.get_num_threads())
    # 4 pages and one that is nobody's, of 16 positions x 2 layers x keys and values x 2 kv heads x 32 elements x 2
    # bytes, and a table of 4 bytes for each page of a sequence
    assert record["memory"]["kv_bytes"] == (4 + 1) * 16 * 2 * 2 * 2 * 32 * 2 + 4 * 4
    assert record["compile"] == {
        "seconds": pytest.approx(0, abs=5),
        "cache_hits": 0,
        "cache_misses": 0,
        "cache": "none",
    }
    assert record["process_to_first_token_seconds"] > record["first_token_seconds"] > 0
    assert record["seconds"] > record["load_seconds"] > 0
    assert record["settings"]["context_length"] == 64


def test_a_jsonl_file_runs_several_at_once_and_each_answer_is_that_of_its_prompt_alone(
    run_task: RunTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt_ids": ids}) for ids in prompts))
    run = run_task(LLAMA, f"task.prompts_jsonl='{file}'", "batch_size=3", "max_new_tokens=6")
    found = [generation["token_ids"] for generation in run.record["generations"]]
    assert found == [greedy_of_transformers(ids, 6) for ids in prompts]
    assert [generation["timings"]["batch"] for generation in run.record["generations"]][:3] == [3, 3, 3]
    assert capsys.readouterr().out.count("--- ") == 4


def test_a_prompt_that_begins_with_bos_is_noted_once(
    run_task: RunTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_chat_folder(tmp_path / "model", template=None)
    add_tokenizer(folder, adds_bos=True)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|end|>"}')
    (folder / "special_tokens_map.json").write_text("")
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "<|end|>hi"}\n{"prompt": "<|end|>ho"}\n{"prompt": "hi"}')
    for given, noted in (("prompt='<|end|>hi'", 1), ("prompt=hi", 0), (f"task.prompts_jsonl='{lines}'", 1)):
        record = run_task(f"model.checkpoint='{folder}'", given, "max_new_tokens=1").record
        assert record["notes"].count(NOTE_ON_BOS) == capsys.readouterr().err.count(NOTE_ON_BOS) == noted
        assert f"{folder}: special_tokens_map.json is empty" in record["notes"]
        assert all(one["prompt_ids"][:2].count(0) == 1 for one in record["generations"])


def test_text_goes_through_the_chat_template_unless_it_is_off(run_task: RunTask, chat_folder: Path) -> None:
    here = f"model.checkpoint={chat_folder}"
    chat = run_task(here, "prompt=hi", "max_new_tokens=1").record["generations"][0]
    plain = run_task(here, "prompt=hi", "max_new_tokens=1", "chat=off").record["generations"][0]
    assert len(plain["prompt_ids"]) == 2
    # "user:hi" + the end token + a line break + "assistant:"
    assert len(chat["prompt_ids"]) == len("user:hi") + 1 + 1 + len("assistant:")
    assert chat["prompt"] == plain["prompt"] == "hi"


def test_a_checkpoint_without_a_tokenizer_runs_default_ids_and_says_so(
    run_task: RunTask, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_task(LLAMA, "max_new_tokens=1")
    assert run.record["generations"][0]["prompt_ids"] == list(range(1, 9))
    assert "has no tokenizer: running token ids" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_generated(run_task: RunTask, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RequestHandle.event

    def interrupted(self: RequestHandle, at: int) -> object:
        if at == 3:
            raise KeyboardInterrupt
        return whole(self, at)

    monkeypatch.setattr(RequestHandle, "event", interrupted)
    run = run_task(LLAMA, f"prompt_ids={IDS}", "max_new_tokens=50")
    assert (run.status, run.record["status"], run.record["error"]) == (130, "interrupted", None)
    assert run.record["finish_reason"] == "interrupted"
    assert run.record["token_ids"][:3] == greedy_of_transformers(IDS, 3)


def test_ctrl_c_in_the_prompt_does_not_time_it(
    run_task: RunTask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: RequestHandle, at: int) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(RequestHandle, "event", interrupted)
    monkeypatch.setattr(ContinuousBatching, "admit", lambda *_: 0)
    assert run_task(LLAMA, f"prompt_ids={IDS}").status == 130
    assert "prompt tokens not finished; 0 new tokens" in capsys.readouterr().err


def test_ctrl_c_while_loading_leaves_a_result_too(run_task: RunTask, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("graphcore.engine.loading.decoder_loader.open_model", interrupt)
    run = run_task(LLAMA, f"prompt_ids={IDS}")
    assert (run.status, run.record["status"]) == (130, "interrupted")
    assert "text" not in run.record


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("max_new_tokens=0", "max_new_tokens=0 must be at least 1"),
        ("sampling.temperature=-0.5", "sampling.temperature=-0.5 must be 0 (greedy) or more"),
        ("prompt=''", "prompt is empty"),
        ("streaming.prefetch=2", "streaming.prefetch has no effect with streaming=off"),
        ("prompt_ids=[1,2,3,4,5]", "5 tokens do not fit in context_length=4"),
        ("prompt_ids=[96]", "token id 96 is not in the vocabulary of 96 tokens"),
        ("prompt=text", "has no tokenizer; give token ids"),
        ("model.checkpoint=/nowhere/model.gguf", "no such file or folder"),
        ("model.num_hidden_layers=3", "model.num_hidden_layers=3, but"),
        ("chat=on", "chat=on, but"),
        ("system=x", "system=... needs a chat template"),
    ],
)
def test_a_failure_is_one_line_and_a_result_that_says_so(run_task: RunTask, override: str, said: str) -> None:
    needs_text = override.startswith(("chat", "system"))
    run = run_task(LLAMA, "context_length=4", "max_new_tokens=1", "prompt=hi" if needs_text else "seed=0", override)
    assert (run.status, run.record["status"]) == (1, "failed")
    assert said in str(run.error)
    assert "\n" not in str(run.error)
    assert run.record["error"] == f"{type(run.error).__name__}: {run.error}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["prompt=text"], "has no tokenizer; give token ids"),
        (["prompt=text", "system=x"], "system=... needs a chat template"),
        (["prompt=text", "chat=on"], "chat=on, but"),
        (["task=chat"], "task=chat needs text, and"),
        (["task=verify", "prompt=text"], "has no tokenizer; give token ids"),
        (["task=perplexity", f"task.text={__file__}"], "has no tokenizer, and task=perplexity scores text"),
        (["task.prompts_jsonl=lines.jsonl"], "lines.jsonl:2: .*has no tokenizer"),
    ],
)
def test_a_checkpoint_that_cannot_encode_the_prompts_is_refused_before_its_weights_are_read(
    run_task: RunTask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overrides: list[str], said: str
) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt_ids": [1]}\n{"prompt": "text"}\n', encoding="utf-8")
    monkeypatch.setattr(DecoderLoader, "build", lambda *_: pytest.fail("weights were read"))
    named = [override.replace("=lines.jsonl", f"={lines}") for override in overrides]
    assert re.search(said, str(run_task(LLAMA, *named).error))


@pytest.mark.parametrize(
    ("given", "named"), [("int8", "q8_0"), ("int4", "q4_0"), ("int8,int4", "q8_0,q4_0"), ("fp32,int8", "float32,q8_0")]
)
def test_other_names_of_a_cache_are_recorded_as_its_own(run_task: RunTask, given: str, named: str) -> None:
    asked = (LLAMA, f"prompt_ids={IDS}", "max_new_tokens=4", "dtype=fp32")
    records = [run_task(*asked, f"kv_dtype='{one}'").record for one in (given, named.replace("float32", "fp32"))]
    assert [record["kv_dtype"] for record in records] == [named] * 2
    assert records[0]["memory"]["kv_bytes"] == records[1]["memory"]["kv_bytes"]
    assert records[0]["token_ids"] == records[1]["token_ids"]
    assert run_task(LLAMA, "task=plan", f"kv_dtype='{given}'").record["kv_dtype"] == named
    with Engine.load(TINY / "llama3", dtype="fp32", device="cpu", overrides=[f"kv_dtype={given}"]) as engine:
        assert str(engine.choices.kv_dtype).replace("torch.", "") == named


def test_the_checkpoint_wins_over_the_model_group_and_it_is_said(
    run_task: RunTask, capsys: pytest.CaptureFixture[str]
) -> None:
    run_task("model=gemma3", LLAMA, "max_new_tokens=1")
    assert "model=gemma3 stands for gemma3_text, but the checkpoint is a llama model" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize(("override", "is_said"), [("seed=1", False), ("model=smollm2", True), ("model=gemma3", True)])
def test_nothing_is_said_of_a_model_group_that_nobody_chose(tmp_path: Path, override: str, is_said: bool) -> None:
    """The default group stands for a llama; the checkpoint is a Qwen 3."""
    asked = (f"model.checkpoint={TINY / 'qwen3'}", "prompt_ids=[1]", "max_new_tokens=1", "graph=eager", "device=cpu")
    done = graphcore(*asked, override, "outputs=false", cwd=tmp_path)
    assert done.returncode == 0
    assert (" stands for " in done.stderr) == is_said


def test_a_base_model_that_is_asked_says_that_it_has_no_chat_template(
    run_task: RunTask, base_folder: Path, chat_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(folder: Path, *overrides: str) -> bool:
        run_task(f"model.checkpoint={folder}", "max_new_tokens=1", *overrides)
        return f"{folder.name} has no chat template: it continues the prompt" in capsys.readouterr().err

    assert said(base_folder, "prompt=Why?")
    assert not said(base_folder, "prompt=Why?", "chat=off")
    assert not said(base_folder, "prompt_ids=[1,2]")
    assert not said(base_folder)  # the default prompt is an opening, not a question
    assert not said(chat_folder, "prompt=Why?")


def test_a_run_without_a_prompt_says_what_text_it_goes_on_from(
    run_task: RunTask, base_folder: Path, chat_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(folder: Path, *overrides: str) -> bool:
        run = run_task(f"model.checkpoint={folder}", "max_new_tokens=1", *overrides)
        quoted = " ".join(str(run.record["generations"][0]["prompt"]).split())
        return f'no prompt was given: continuing "{quoted}"; choose another' in capsys.readouterr().err

    assert said(base_folder)
    assert said(chat_folder, "chat=off")
    assert not said(chat_folder)  # the default is a question, and the answer can be read without it
    assert not said(base_folder, "prompt=Why?")


def test_a_file_has_more_prompts_than_may_wait(run_task: RunTask, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt_ids": IDS}) + "\n" for _ in range(5)), encoding="utf-8")
    run = run_task(LLAMA, f"task.prompts_jsonl={lines}", "max_new_tokens=3", "batch_size=2", "batching.max_waiting=1")
    assert len(run.record["generations"]) == 5


def test_what_a_prompt_draws_does_not_depend_on_the_batch_size(run_task: RunTask, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt_ids": IDS}) + "\n" for _ in range(3)), encoding="utf-8")
    sampled = (LLAMA, f"task.prompts_jsonl={lines}", "max_new_tokens=8", "dtype=fp32", "sampling.temperature=1.5")
    alone = run_task(*sampled, "batch_size=1").record["generations"]
    together = run_task(*sampled, "batch_size=3").record["generations"]
    drawn = [generation["token_ids"] for generation in alone]
    assert drawn == [generation["token_ids"] for generation in together]
    assert len({tuple(ids) for ids in drawn}) == 3  # and each draws for itself
