"""task=verify passes what is right, fails what is not, and says by how much."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.chat_folders import TINY
from support.files.layered_files import TOKEN_IDS
from support.files.ternary_files import save_ternary
from support.task_runs import RunTask

from graphcore.arch.config.model_config import ModelConfig
from graphcore.config.byte_sizes import both_in_words
from graphcore.engine.program_runner import ProgramRunner
from graphcore.errors import UnsupportedError
from graphcore.tasks.commands import verify
from graphcore.tasks.reference import reference_memory, transformers_model
from graphcore.tasks.reference.comparison import Outputs
from graphcore.tasks.reference.transformers_model import FROM_FOLDER, FROM_OUR_WEIGHTS
from graphcore.weights.conversion import RowConversion

LAYERS = TINY.parent / "llamacpp" / "layers.npz"
SHORT = ("task=verify", "task.tokens=20", "task.new_tokens=6")


@pytest.mark.parametrize(
    ("family", "form", "origin"), [("llama3", "", FROM_FOLDER), ("gemma3", ".gguf", FROM_OUR_WEIGHTS)]
)
def test_a_right_model_is_within_the_tolerance(
    run_task: RunTask, capsys: pytest.CaptureFixture[str], family: str, form: str, origin: str
) -> None:
    run = run_task(f"model.checkpoint={TINY / (family + form)}", "dtype=fp32", *SHORT)
    assert (run.status, run.record["status"], run.record["reference"]) == (0, "ok", origin)
    assert run.record["greedy"] == {"tokens": 6, "agreeing": 6, "largest_margin": 0.0}
    assert run.record["logits"]["max"] < 1e-5  # often 0: on short sequences both sum in one order
    assert len(run.record["layers"]) == run.record["model"]["num_hidden_layers"] + 1
    assert run.record["layers"][0]["max"] == 0.0  # embedding rows are copied, not computed
    assert "verify: ok" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["", ".gguf"])
def test_mxfp4_experts_are_compared_through_our_unpacked_weights(run_task: RunTask, form: str) -> None:
    record = run_task(f"model.checkpoint={TINY / f'gptoss{form}'}", "dtype=fp32", *SHORT).record
    assert (record["status"], record["reference"]) == ("ok", FROM_OUR_WEIGHTS)
    assert record["logits"]["max"] < 1e-5


@pytest.mark.parametrize(
    ("model", "of_experts"),
    [("gpt_oss", {}), ("qwen3_moe", {"moe_intermediate_size": 32, "num_experts": 12, "num_experts_per_tok": 3})],
)
def test_a_random_mixture_of_the_model_group_runs_with_its_layers_cut(
    run_task: RunTask, model: str, of_experts: dict[str, int]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, **of_experts}
    small = [f"model.random_config.{name}={size}" for name, size in sizes.items()]
    run = run_task(
        f"model={model}", "model.checkpoint=random:", "model.num_hidden_layers=2", *small, "dtype=fp32", *SHORT
    )
    assert (run.status, run.record["status"], run.record["reference"]) == (0, "ok", FROM_OUR_WEIGHTS)
    assert (run.record["model"]["num_hidden_layers"], run.record["greedy"]["agreeing"]) == (2, 6)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("path", ["bitnet", "bitnet_i2s.gguf"])
def test_a_ternary_model_is_within_the_tolerance(run_task: RunTask, path: str, dtype: str) -> None:
    run = run_task(f"model.checkpoint={TINY / path}", f"dtype={dtype}", *SHORT)
    assert (run.status, run.record["status"], run.record["reference"]) == (0, "ok", FROM_OUR_WEIGHTS)


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["bitlinear", "online"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_other_ternary_forms_are_within_the_tolerance(run_task: RunTask, tmp_path: Path, form: str, dtype: str) -> None:
    save_ternary("llama3", form, 1, tmp_path)
    assert run_task(f"model.checkpoint={tmp_path}", f"dtype={dtype}", *SHORT).record["status"] == "ok"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_dtypes_are_held_to_transformers_own_error(run_task: RunTask, dtype: str) -> None:
    record = run_task(f"model.checkpoint={TINY / 'qwen3'}", f"dtype={dtype}", *SHORT).record
    theirs = record["logits"]["transformers"]["max"]
    assert record["tolerance"] == pytest.approx(2 * theirs)
    assert 1e-4 < theirs < 0.2
    assert record["status"] == "ok"


def test_a_wrong_epsilon_is_found(run_task: RunTask, monkeypatch: pytest.MonkeyPatch) -> None:
    right = transformers_model.transformers_settings

    def wrong(config: ModelConfig, is_tied: bool) -> dict[str, object]:
        return right(replace(config, norm_eps=100 * config.norm_eps), is_tied)

    monkeypatch.setattr(transformers_model, "transformers_settings", wrong)
    run = run_task(f"model.checkpoint={TINY / 'llama3.gguf'}", "dtype=fp32", *SHORT)
    assert (run.status, run.record["status"]) == (1, "failed")
    assert "the logits differ by" in run.record["error"]


def test_one_wrong_weight_is_found_and_its_layer_is_where_errors_begin(
    run_task: RunTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RowConversion.write

    def wrong(self: RowConversion, *given: object) -> None:
        right(self, *given)  # type: ignore[arg-type]  # as it was called
        if self.weight == "layers.1.mlp.up_proj.weight":
            self.out.mul_(1.01)

    monkeypatch.setattr(RowConversion, "write", wrong)
    record = run_task(f"model.checkpoint={TINY / 'qwen3'}", "dtype=fp32", *SHORT).record
    errors = {layer["name"]: layer["max"] for layer in record["layers"]}
    assert (record["status"], record["first_beyond"]) == ("failed", "layers.1")
    assert "layers.1 is the first layer beyond the tolerance" in record["error"]
    assert errors["layers.0"] < 1e-5 < errors["layers.1"]


def test_values_that_are_not_finite_are_counted_in_the_layer_where_they_begin(
    run_task: RunTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RowConversion.write

    def wrong(self: RowConversion, *given: object) -> None:
        right(self, *given)  # type: ignore[arg-type]  # as it was called
        if self.weight == "layers.1.mlp.down_proj.weight":
            self.out[5].fill_(float("inf"))

    monkeypatch.setattr(RowConversion, "write", wrong)
    run = run_task(f"model.checkpoint={TINY / 'llama3'}", "dtype=fp32", *SHORT)
    counts = [layer["not_finite"] for layer in run.record["layers"]]
    assert (run.status, run.record["first_beyond"], counts[:3]) == (1, "layers.1", [0, 0, 20])
    assert "logits are not finite; layers.1 is the first layer" in run.record["error"]
    assert run.record["greedy"]["tokens"] == 0


def test_a_decode_step_that_is_wrong_is_found_against_the_whole_sequence(
    run_task: RunTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = ProgramRunner.extend

    def late(self: ProgramRunner, rows: list[list[int]], starts: list[int]) -> torch.Tensor:
        return extend(self, rows, [max(0, start - (start > 9)) for start in starts])

    monkeypatch.setattr(ProgramRunner, "extend", late)
    run = run_task(f"model.checkpoint={TINY / 'qwen3'}", "dtype=fp32", *SHORT)
    assert (run.status, run.record["first_beyond"]) == (1, None)
    assert "the cosine of decode steps over the KV cache with the whole sequence is" in run.record["error"]
    assert run.record["cached"]["max"] > 1e-3


def test_a_tolerance_of_ones_own_is_kept(run_task: RunTask) -> None:
    run = run_task(f"model.checkpoint={TINY / 'llama3'}", "dtype=bf16", *SHORT, "task.tolerance=1e-12")
    assert run.status == 1
    assert "allowed are 1e-12 (task.tolerance)" in run.record["error"]


def test_a_prompt_of_ones_own_is_compared(run_task: RunTask) -> None:
    record = run_task(f"model.checkpoint={TINY / 'llama3'}", *SHORT, "prompt_ids=[1,2,3]").record
    assert record["tokens"] == 3


def test_what_does_not_fit_in_host_memory_is_refused(run_task: RunTask, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = load_file(TINY / "llama3" / "model.safetensors")
    largest = 4 * max(tensor.numel() for tensor in stored.values())
    needed = 4 * sum(tensor.numel() for tensor in stored.values()) + largest + reference_memory.TRANSFORMERS_NBYTES
    monkeypatch.setattr(verify, "load_engine", lambda context: pytest.fail("something was loaded"))
    for free, instead in ((needed - 1, "model.num_hidden_layers=1"), (1000, "task=perplexity")):
        monkeypatch.setattr(reference_memory, "free_device_nbytes", lambda device, free=free: free)
        run = run_task(f"model.checkpoint={TINY / 'llama3'}", *SHORT)
        assert run.status == 1
        assert "takes {}, {} are free".format(*both_in_words(needed, free)) in str(run.error)
        assert instead in str(run.error)


def recorded_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Give task=verify what llama.cpp has recorded of the tiny Qwen 3; return the files that it asks for."""
    arrays, files = np.load(LAYERS), list[Path]()
    layers, logits = torch.from_numpy(arrays["qwen3.layers"]), torch.from_numpy(arrays["qwen3.logits"])

    def run(file: Path, token_ids: list[int], threads: int) -> Outputs:
        assert token_ids == TOKEN_IDS
        files.append(file)
        return Outputs(tuple(layers.unbind()), logits)

    monkeypatch.setattr(verify, "has_llama_cpp", lambda: True)
    monkeypatch.setattr(verify, "run_llama_cpp", run)
    return files


def test_a_gguf_file_is_compared_with_llama_cpp(
    run_task: RunTask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = recorded_llama_cpp(monkeypatch)
    run = run_task(f"model.checkpoint={TINY / 'qwen3.gguf'}", f"prompt_ids={TOKEN_IDS}", "dtype=fp32", *SHORT)
    peer = run.record["llama_cpp"]
    assert (run.status, files) == (0, [TINY / "qwen3.gguf"])
    assert [line["name"] for line in peer["layers"]] == ["layers.0", "layers.1"]
    assert max(line["max"] for line in (*peer["layers"], peer["logits"])) < 1e-5
    assert peer["cosine_tolerance"] == 0.99999  # the file is float32
    assert "against llama.cpp, 10 tokens" in capsys.readouterr().out


def test_a_file_whose_layers_are_swapped_is_found_by_llama_cpp_and_by_its_first_layer(
    run_task: RunTask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded_llama_cpp(monkeypatch)
    swapped = tmp_path / "swapped.gguf"
    whole = (TINY / "qwen3.gguf").read_bytes()
    swapped.write_bytes(whole.replace(b"blk.0.", b"blk.X.").replace(b"blk.1.", b"blk.0.").replace(b"blk.X.", b"blk.1."))
    run = run_task(f"model.checkpoint={swapped}", f"prompt_ids={TOKEN_IDS}", "dtype=fp32", *SHORT)
    assert run.status == 1
    assert "the cosine of layers.0 with llama.cpp's is" in run.record["error"]
    assert run.record["logits"]["max"] < 1e-5  # transformers was given the same wrong weights


def test_without_llama_cpp_it_is_said_how_to_install_it(
    run_task: RunTask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "has_llama_cpp", lambda: False)
    run = run_task(f"model.checkpoint={TINY / 'qwen3.gguf'}", "dtype=fp32", *SHORT)
    assert (run.status, run.record["llama_cpp"]) == (0, None)
    assert "pip install llama-cpp-python" in capsys.readouterr().err


def test_a_file_that_llama_cpp_does_not_read_is_compared_with_transformers_alone(
    run_task: RunTask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> Outputs:
        raise UnsupportedError("llama.cpp cannot load it")

    monkeypatch.setattr(verify, "has_llama_cpp", lambda: True)
    monkeypatch.setattr(verify, "run_llama_cpp", refuse)
    run = run_task(f"model.checkpoint={TINY / 'qwen3.gguf'}", "dtype=fp32", *SHORT)
    assert (run.status, run.record["llama_cpp"]) == (0, None)
    assert "[llama.cpp cannot load it; it is not compared]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("task.tokens=0", "task.tokens=0 must be at least 1"),
        ("task.tolerance=0", "task.tolerance=0.0 must be above 0"),
        ("task.cosine=2", "task.cosine=2.0 must be between -1 and 1"),
        ("stop=[a]", "stop has no effect with task=verify"),
        ("context_length=25", "26 tokens do not fit in context_length=25"),
    ],
)
def test_settings_that_make_no_sense_are_refused(run_task: RunTask, override: str, said: str) -> None:
    run = run_task(f"model.checkpoint={TINY / 'llama3'}", *SHORT, override)
    assert said in str(run.error)
