"""The command line from outside: what is printed where, exit statuses, and what is left on disk."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chat_folder import TINY, save_chat_folder
from command_process import ROOT, environment, graphcore

LLAMA = ("graph=eager", "device=cpu", "progress=false", f"model.checkpoint={TINY / 'llama3'}")


def result_of(folder: Path) -> dict:
    (path,) = folder.rglob("result.json")
    return json.loads(path.read_text(encoding="utf-8"))


def test_text_reaches_the_model_unchanged_from_another_folder(tmp_path: Path) -> None:
    model = save_chat_folder(tmp_path / "a model, (with=odd) name's")
    prompt = 'What\'s 2+2, really? (a=b) ${oc.env:HOME} [x] {y: z} \\ "q" é語😀\nnext, line!'
    done = graphcore(
        *LLAMA[:3], f"model.checkpoint={model}", f"prompt={prompt}", "stop=,", "max_new_tokens=3", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    record = result_of(tmp_path / "outputs")
    assert record["generations"][0]["prompt"] == prompt
    assert record["settings"]["stop"] == [","]
    assert done.stdout == record["text"] + "\n"
    assert "result: outputs/" in done.stderr or f"result: {tmp_path}" in done.stderr


def test_standard_input_is_a_prompt_and_the_run_folder_can_be_chosen(tmp_path: Path) -> None:
    model = save_chat_folder(tmp_path / "model")
    out = tmp_path / "run, one"
    done = graphcore(
        *LLAMA[:3],
        f"model.checkpoint={model}",
        "prompt=-",
        "chat=off",
        "max_new_tokens=1",
        f"hydra.run.dir={out}",
        cwd=tmp_path,
        stdin="two\nlines",
    )
    assert done.returncode == 0, done.stderr
    assert result_of(out)["generations"][0]["prompt"] == "two\nlines"


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["--cfg", "job", "model=gemma3", "prompt=a, b!"]])
def test_help_and_config_do_not_import_torch(tmp_path: Path, arguments: list[str]) -> None:
    code = (
        "import sys\nfrom graphcore.tasks.main import main\n"
        f"try:\n    main({arguments!r})\n"
        "except SystemExit as ended:\n    print('status', ended.code)\n"
        "print('heavy', sorted({'torch', 'transformers', 'matplotlib'} & sys.modules.keys()))\n"
    )
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    seconds = time.perf_counter() - began
    assert done.stdout.splitlines()[-2:] == ["status 0", "heavy []"]
    assert list(tmp_path.iterdir()) == []
    assert seconds < 10  # it takes 0.4 on an idle machine; importing torch alone takes two


REFUSED_BEFORE_A_RUN = [
    (["promt=hi"], "unknown key 'promt'"),
    (["max_new_tokens=abc"], "max_new_tokens=abc must be a whole number"),
    (["model=foo"], "model=foo is no option of this group"),
    (["streaming=true"], "streaming=true is no option of this group"),
    (["--prompt", "hi"], "unknown option --prompt"),
    (["hello"], "'hello' is no setting"),
    (["-m", "promt=1,2"], "unknown key 'promt'"),
    (["dtype=fp32,foo", "-m"], "dtype=foo is no option of this group"),
    (["hydra.run.dir=/proc/nowhere"], "/proc/nowhere cannot be written"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED_BEFORE_A_RUN, ids=[said for _, said in REFUSED_BEFORE_A_RUN])
def test_a_wrong_command_is_one_line_and_leaves_nothing(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = graphcore(*LLAMA, *arguments, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("graphcore: ")
    assert said in line
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_start_is_one_line_and_a_result_that_says_so(tmp_path: Path) -> None:
    done = graphcore(*LLAMA, "max_new_tokens=0", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "graphcore: ConfigError: max_new_tokens=0 must be at least 1\n"
    record = result_of(tmp_path / "outputs")
    assert (record["status"], record["error"]) == ("failed", "ConfigError: max_new_tokens=0 must be at least 1")
    assert record["settings"]["max_new_tokens"] == 0


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes((TINY / "llama3.gguf").read_bytes()[:3000])
    done = graphcore(*LLAMA[:3], "model.checkpoint=cut.gguf", cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("graphcore: CheckpointError: cut.gguf: tensor 'token_embd.weight'")


def test_debug_shows_the_traceback_and_then_the_line(tmp_path: Path) -> None:
    done = graphcore(*LLAMA, "max_new_tokens=0", "debug=true", cwd=tmp_path)
    assert done.stderr.startswith("Traceback")
    assert done.stderr.splitlines()[-1].startswith("graphcore: ConfigError: ")


def test_a_failed_verification_is_exit_status_one(tmp_path: Path) -> None:
    done = graphcore(
        *LLAMA, "task=verify", "task.tokens=4", "task.new_tokens=2", "task.tolerance=1e-30", "dtype=bf16", cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("graphcore: VerifyError: the logits differ by")
    assert result_of(tmp_path / "outputs")["status"] == "failed"


def test_progress_is_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    done = graphcore("graph=eager", "device=cpu", LLAMA[3], "max_new_tokens=1", cwd=tmp_path)
    assert any(re.fullmatch(r"load (\d+\.\d)/\1 MB, group 4.*", line) for line in done.stderr.splitlines())
    assert "\x1b" not in done.stderr + done.stdout


def test_the_second_run_compiles_from_a_warm_cache_and_says_so(tmp_path: Path) -> None:
    found = []
    for name in ("first", "second"):
        compiled = ("graph=compiled", "model.num_hidden_layers=1", "cache_dir=cache", f"hydra.run.dir={name}")
        done = graphcore(*LLAMA[1:], *compiled, "prompt_ids=[1,2,3]", "max_new_tokens=4", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found.append(result_of(tmp_path / name))
        assert f"from a {found[-1]['compile']['cache']} cache" in done.stderr
    first, second = found
    assert (first["compile"]["cache"], second["compile"]["cache"]) == ("cold", "warm")
    assert first["compile"]["cache_misses"] == second["compile"]["cache_hits"] == first["graph"]["compiled"] == 3
    assert first["token_ids"] == second["token_ids"]


def test_ctrl_c_ends_with_what_was_generated(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "graphcore.tasks.main", *LLAMA, "prompt_ids=[1,2,3]", "max_new_tokens=100000"]
    process = subprocess.Popen(
        [*command, "context_length=131072"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(40)  # some tokens have come
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    record = result_of(tmp_path / "outputs")
    assert process.returncode == 130
    assert (record["status"], record["finish_reason"]) == ("interrupted", "interrupted")
    assert 10 <= len(record["token_ids"]) < 100000
    assert "Traceback" not in err


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "graphcore.tasks.main", *LLAMA, "prompt_ids=[1]", "max_new_tokens=4000"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    err = process.stderr.read()
    process.wait(60)
    assert process.returncode == 1
    assert "Traceback" not in err


def test_run_py_and_the_module_are_the_same_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "promt=hi"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.startswith("graphcore: ConfigError: unknown key 'promt'")) == (1, True)
