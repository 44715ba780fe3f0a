"""task=pack writes a file, says what is in it, and never harms one that is there."""

import errno
import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from support.chat_folders import TINY, save_chat_folder
from support.task_runs import RunTask, TaskRun
from support.tiny_models import add_tokenizer, save_tiny

from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.export.gguf_file import GGUFFile

LLAMA = f"model.checkpoint={TINY / 'llama3'}"


def run_pack(run_task: RunTask, path: Path, *overrides: str) -> TaskRun:
    return run_task("task=pack", LLAMA, f"task.output={path}", *overrides)


def test_the_record_tells_of_every_tensor(
    run_task: RunTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "model.gguf"
    record = run_pack(run_task, path, "quant=q8_0").record
    stored = GGUFCheckpoint(path).tensors
    assert {one["name"]: (one["format"], tuple(one["shape"]), one["bytes"]) for one in record["tensors"]} == {
        name: (info.encoding, info.shape, info.nbytes) for name, info in stored.items()
    }
    assert all((one["relative_error"] > 0) == (one["format"] == "q8_0") for one in record["tensors"])
    assert record["output"] == {"path": str(path), "bytes": path.stat().st_size}
    assert record["total"]["bytes"] == sum(one["bytes"] for one in record["tensors"])
    assert 8.5 < record["total"]["bits_per_weight"] < 9.0
    assert "q8_0" in capsys.readouterr().out


def test_matrices_that_are_not_as_asked_are_noted_with_the_reason(run_task: RunTask, tmp_path: Path) -> None:
    small, path = tmp_path / "small.gguf", tmp_path / "model.gguf"
    rows = "are no multiple of 256, the block of"
    assert run_pack(run_task, small, "quant=q4_k").record["notes"] == [
        f"quant=q4_k: 1 matrix is q8_0: rows of 64 {rows} q6_k",
        f"quant=q4_k: 10 matrices are q5_0: rows of 64 {rows} q4_k",
        f"quant=q4_k: 2 matrices are q5_0: rows of 128 {rows} q4_k",
        f"quant=q4_k: 2 matrices are q5_0: rows of 96 {rows} q4_k",
    ]
    again = (f"model.checkpoint={small}", "quant=q8_0", "task.overwrite=true")
    kept = run_pack(run_task, path, *again)
    assert kept.record["notes"] == [
        "quant=q8_0: 14 matrices are q5_0: packed already, and kept; task.requantize=true packs again, and loses "
        "precision twice"
    ]
    assert kept.record["output"]["bytes"] == small.stat().st_size
    (note,) = run_pack(run_task, path, *again, "task.requantize=true").record["notes"]
    assert note.startswith("the file's weights take ")


def test_a_model_that_llama_cpp_does_not_load_is_written_for_graphcore_alone(run_task: RunTask, tmp_path: Path) -> None:
    save_tiny("exaone4", tmp_path / "model")
    asked = ("task=pack", f"model.checkpoint={tmp_path / 'model'}", f"task.output={tmp_path / 'packed.gguf'}")
    run = run_task(*asked)
    assert "llama.cpp takes heads of embedding_length / attention.head_count features" in str(run.error)
    assert "write a file that graphcore alone reads with task.for_llama_cpp=false" in str(run.error)
    assert not (tmp_path / "packed.gguf").exists()
    assert run_task(*asked, "task.for_llama_cpp=false").status == 0
    assert (tmp_path / "packed.gguf").exists()


def test_what_is_odd_about_the_tokenizer_is_noted(
    run_task: RunTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_chat_folder(tmp_path / "model")
    add_tokenizer(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    vocab["th"] = vocab.pop("~")
    stored["model"]["merges"] = [["t", "h"]]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    (folder / "special_tokens_map.json").write_text("")
    run = run_task("task=pack", f"model.checkpoint='{folder}'", f"task.output='{tmp_path / 'packed.gguf'}'")
    assert run.error is None
    (note,) = run.record["notes"]
    assert note == f"{folder}: special_tokens_map.json is empty"
    assert note in capsys.readouterr().err


def test_a_file_that_is_there_is_left_alone_unless_told_otherwise(run_task: RunTask, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("mine")
    run = run_pack(run_task, path)
    assert "is there already; choose another name or set task.overwrite=true" in str(run.error)
    assert path.read_text() == "mine"
    assert run_pack(run_task, path, "task.overwrite=true").status == 0
    assert path.read_bytes()[:4] == b"GGUF"


def test_the_model_itself_is_never_replaced(run_task: RunTask, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes((TINY / "qwen3.gguf").read_bytes())
    run = run_task("task=pack", f"model.checkpoint={path}", f"task.output={path}", "task.overwrite=true", "quant=q8_0")
    assert "is the model itself" in str(run.error)
    assert path.read_bytes() == (TINY / "qwen3.gguf").read_bytes()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "task=pack needs task.output"),
        (["task.output={folder}"], "is a folder; name a file in it"),
        (["task.output={folder}/m.gguf", "prompt=a"], "prompt has no effect with task=pack"),
        (
            ["task.output={folder}/m.gguf", "task.requantize=true"],
            "task.requantize=true has no effect with quant=stored",
        ),
        (["task.output={folder}/m.gguf", "streaming=on"], "streaming=on has no effect with task=pack"),
        (["task.output={folder}/m.gguf", "quant.format=iq4_xs"], "quant.format=iq4_xs is not one of stored, q4_0"),
    ],
)
def test_what_cannot_be_done_is_said(run_task: RunTask, tmp_path: Path, overrides: list[str], said: str) -> None:
    run = run_task("task=pack", LLAMA, *(override.format(folder=tmp_path) for override in overrides))
    assert said in str(run.error)
    assert list(tmp_path.glob("*.gguf")) == []


def fail_at_third_tensor(error: BaseException) -> object:
    calls = []

    def write(self: GGUFFile, raw: torch.Tensor) -> None:
        calls.append(raw)
        if len(calls) == 3:
            raise error

    return write


def test_a_full_disk_leaves_no_file_and_says_so(
    run_task: RunTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(GGUFFile, "write", fail_at_third_tensor(full))
    run = run_pack(run_task, tmp_path / "model.gguf")
    assert "model.gguf cannot be written (No space left on device)" in str(run.error)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_interrupted_run_leaves_no_file(run_task: RunTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GGUFFile, "write", fail_at_third_tensor(KeyboardInterrupt()))
    run = run_pack(run_task, tmp_path / "model.gguf")
    assert (run.status, run.record["status"]) == (130, "interrupted")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("source", [TINY / "llama3", TINY / "qwen3.gguf", TINY / "gpt2"])
def test_memory_that_is_too_small_is_noticed_first(
    run_task: RunTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path
) -> None:
    path = tmp_path / "model.gguf"
    asked = (f"model.checkpoint={source}", "quant=q8_0")
    needed = run_pack(run_task, path, *asked).record["memory"]["packing_bytes"]
    largest = max(info.nbytes for info in GGUFCheckpoint(path).tensors.values())
    assert largest < needed < largest + (64 << 20)
    path.unlink()
    monkeypatch.setattr("graphcore.export.pack.free_device_nbytes", lambda device: needed - 1)
    run = run_pack(run_task, path, *asked)
    assert run.status == 1
    assert "packing the largest tensor takes" in str(run.error)
    assert not path.exists()
    monkeypatch.setattr("graphcore.export.pack.free_device_nbytes", lambda device: needed)
    assert run_pack(run_task, path, *asked).status == 0


def test_a_disk_that_is_too_small_is_noticed_first(
    run_task: RunTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("graphcore.export.pack.disk_usage", lambda _: Usage)
    assert "the disk has 1000 bytes free" in str(run_pack(run_task, tmp_path / "model.gguf").error)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_model_that_was_packed_answers_as_one_that_is_packed_at_load(run_task: RunTask, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    run_pack(run_task, path, "quant=q8_0")
    ids = ["prompt_ids=[5,17,3]", "max_new_tokens=12"]
    packed = run_task("task=generate", f"model.checkpoint={path}", *ids).record
    assert run_task("task=generate", LLAMA, *ids, "quant=q8_0").record["token_ids"] == packed["token_ids"]


def test_a_packed_file_states_the_author_s_sampling(run_task: RunTask, tmp_path: Path) -> None:
    """gguf-py reads it, also from a copy of the packed file, and a request that sets none has it."""
    folder, packed, copied = tmp_path / "author", tmp_path / "model.gguf", tmp_path / "copied.gguf"
    shutil.copytree(TINY / "llama3", folder)
    stated = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.125, "repetition_penalty": 1.05}
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **stated}), encoding="utf-8")
    run_task("task=pack", f"model.checkpoint={folder}", f"task.output={packed}", "quant=q8_0")
    run_task("task=pack", f"model.checkpoint={packed}", f"task.output={copied}", "quant=stored")
    for path in (packed, copied):
        fields = gguf.GGUFReader(path).fields.items()
        found = {key: (field.types[0].name, field.contents()) for key, field in fields if "sampling" in key}
        assert found == {
            "general.sampling.temp": ("FLOAT32", pytest.approx(0.6)),
            "general.sampling.top_k": ("INT32", 20),
            "general.sampling.top_p": ("FLOAT32", pytest.approx(0.95)),
            "general.sampling.min_p": ("FLOAT32", 0.125),
            "general.sampling.penalty_repeat": ("FLOAT32", pytest.approx(1.05)),
        }
        sampling = run_task("prompt_ids=[5,17,3]", "max_new_tokens=1", f"model.checkpoint={path}").record["sampling"]
        assert {name: sampling[name] for name in stated} == pytest.approx(stated)
        assert sampling["words"].endswith("(the file's general.sampling)")


def test_a_packed_file_states_the_model_card_s_sampling_where_the_files_say_nothing(
    run_task: RunTask, tmp_path: Path
) -> None:
    """The file alone then answers as the model group did, from a folder and from a GGUF file."""
    plain, answers = tmp_path / "plain.gguf", list[dict[str, object]]()
    run_pack(run_task, plain)
    card = ("model.published.sha256=null", "model.published.sampling={temperature: 0.2, top_p: 0.9}")
    for number, source in enumerate((TINY / "llama3", plain)):
        of_group, packed = (f"model.published.checkpoint={source}", *card), tmp_path / f"{number}.gguf"
        run_task("task=pack", *of_group, f"task.output={packed}", "quant=q8_0")
        for model in (of_group, (f"model.checkpoint={packed}",)):
            answers.append(run_task("prompt_ids=[5,17,3]", "max_new_tokens=1", *model).record["sampling"])
    words = [answer.pop("words") for answer in answers]
    said = "temperature 0.2, top_p 0.9"
    assert words == [f"{said} (the model card)", f"{said} (the file's general.sampling)"] * 2
    assert answers == [answers[0]] * 4
