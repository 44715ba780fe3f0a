"""The command line from outside: what is printed where, exit statuses, and what is left on disk."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from support.chat_folders import TINY, save_chat_folder
from support.processes import ROOT, Piped, environment, graphcore, run_program

LLAMA = ("graph=eager", "device=cpu", "progress=false", f"model.checkpoint={TINY / 'llama3'}")


def result_of(folder: Path) -> dict:
    (path,) = folder.rglob("result.json")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.thorough
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
        "import sys\nfrom graphcore.cli.main import main\n"
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


def test_what_a_file_a_name_or_a_port_shows_is_refused_without_torch(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    (tmp_path / "zero.gguf").write_bytes(bytes(100))
    (tmp_path / "short.gguf").write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/model.safetensors").write_bytes((1000).to_bytes(8, "little") + b"{}")
    refused = {
        "model.checkpoint=gone.gguf": "no such file or folder",
        "model.checkpoint=zero.gguf": "is neither safetensors nor GGUF",
        "model.checkpoint=short.gguf": "the number of tensors needs 8 bytes",
        "model.checkpoint=folder": "it is damaged or cut off",
        "device=cuda9": r"did you mean 'cuda'\?",
        f"task=serve task.port={listener.getsockname()[1]}": "cannot listen on 127.0.0.1",
    }
    code = (
        "import sys\nfrom graphcore.cli.main import main\n"
        f"for argument in {list(refused)!r}:\n"
        "    try:\n        main([*argument.split(), 'outputs=false'])\n"
        "    except SystemExit as ended:\n        assert ended.code, argument\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    listener.close()
    assert done.returncode == 0, done.stderr
    for line, message in zip(done.stderr.splitlines(), refused.values(), strict=True):
        assert re.search(message, line), line


REFUSED_BEFORE_A_RUN = [
    (["promt=hi"], "unknown key 'promt'", 2),
    (["max_new_tokens=abc"], "max_new_tokens=abc must be a whole number", 2),
    (["model=foo"], "model=foo is no option of this group", 2),
    (["streaming=true"], "streaming=true is no option of this group", 2),
    (["--prompt", "hi"], "unknown option --prompt", 2),
    (["hello"], "'hello' is no setting", 2),
    (["caht"], "did you mean task=chat?", 2),
    (["--help", "caht"], "--help has no topic 'caht'", 2),
    (["--help", "dtype=foo"], "dtype=foo is no option of this group", 2),
    (["--cfg", "jobs"], "--cfg takes one of job, hydra, all, not jobs", 2),
    (["--cfg"], "--cfg takes one of job, hydra, all, none is given", 2),
    (["--resolve"], "--resolve flag can only be used", 2),
    (["seed=["], "seed=[ cannot be read as a setting", 2),
    (["one text", "another text"], "'one text' and 'another text' are both given as the prompt", 2),
    (["chat", "bench"], "'chat' and 'bench' are both given as the task; choose one", 2),
    (["~prompt"], "~prompt would remove settings that every run needs; leave it out, or write prompt=null", 2),
    (["~outputs"], "~outputs would remove settings that every run needs; leave it out", 2),
    (["-m", "seed=1,2", "~batching"], "~batching would remove settings that every run needs", 2),
    (["-sc", "query=bash"], "-sc query=... is what a shell calls to complete a line", 2),
    (["~foo"], "~foo: there is nothing to remove", 2),
    (["~model"], "~model would remove settings that every run needs", 2),
    (["prompt_ids=1,2,3"], "or write a list as prompt_ids=[1,2,3]", 2),
    (["dtype=fp32,bf16"], "dtype=fp32,bf16 has several values; add -m to run once for each", 2),
    (["model=smollm2 is what?"], "written prompt='model=smollm2 is what?'", 2),
    (["--cfg", "job", "-m"], "--cfg and -m do not go together; leave one of them out", 2),
    ([""], "an argument is empty", 2),
    (["outputs=false", "-m", "seed=1,2"], "outputs=false has no effect with a sweep", 1),
    (["-m", "outputs=true,false"], "outputs=false has no effect with a sweep", 1),
    (["outputs=off", "hydra.run.dir=x"], "hydra.run.dir='x' has no effect with outputs=false", 1),
    (["outputs=false", "hydra.mode=MULTIRUN"], "hydra.mode=MULTIRUN has no effect with outputs=false", 1),
    (["outputs=false", "trace=true", "streaming=on"], "trace=true writes into the run's folder", 1),
    (["outputs=false", "seed=99999999999999999999"], "seed=99999999999999999999 must be a number of 64 bits", 1),
    (["-m", "promt=1,2"], "unknown key 'promt'", 2),
    (["dtype=fp32,foo", "-m"], "dtype=foo is no option of this group", 2),
    (["hydra.run.dir=/proc/nowhere"], "/proc/nowhere cannot be written", 1),
]


@pytest.mark.parametrize(
    ("arguments", "said", "status"), REFUSED_BEFORE_A_RUN, ids=[said for _, said, _ in REFUSED_BEFORE_A_RUN]
)
def test_a_wrong_command_is_one_line_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], said: str, status: int
) -> None:
    done = graphcore(*LLAMA, *arguments, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == status
    assert line.startswith("graphcore: ")
    assert said in line
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_names_of_dtypes_are_recorded_as_conf_has_them(tmp_path: Path) -> None:
    given = ("dtype=torch.bfloat16", "kv_dtype=F16", "prompt_ids=[1]", "max_new_tokens=1")
    done = graphcore(*LLAMA, *given, cwd=tmp_path)
    record = result_of(tmp_path / "outputs")
    assert (done.returncode, record["dtype"], record["kv_dtype"]) == (0, "bfloat16", "float16"), done.stderr
    assert (record["settings"]["dtype"]["name"], record["settings"]["kv_dtype"]) == ("bf16", "fp16")


def test_a_working_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    begin = "import os\nos.mkdir('gone')\nos.chdir('gone')\nos.rmdir('../gone')\n"
    code = f"{begin}from graphcore.cli.main import main\nmain()\n"
    said = "graphcore: ConfigError: the working directory does not exist; change to another\n"
    for arguments in (["prompt_ids=[1]"], ["-m", "prompt_ids=[1]", "seed=1,2"], ["--cfg", "job"]):
        done = run_program([*LLAMA, *arguments], tmp_path, code=code)
        assert (done.returncode, done.stderr) == (1, said)
    assert run_program(["--version"], tmp_path, code=code).returncode == 0


def test_a_run_that_cannot_start_is_one_line_and_a_result_that_says_so(tmp_path: Path) -> None:
    done = graphcore(*LLAMA, "max_new_tokens=0", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "graphcore: ConfigError: max_new_tokens=0 must be at least 1\n"
    record = result_of(tmp_path / "outputs")
    assert (record["status"], record["error"]) == ("failed", "ConfigError: max_new_tokens=0 must be at least 1")
    assert record["settings"]["max_new_tokens"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("argument", "status"),
    [
        ("chat=maybe", 2),  # an option that there is not
        ("streaming.memory_budget=much", 2),  # no size
        ("device=tpu", 2),
        ("task.logprobs=maybe", 2),  # the wrong type, of a key that the task checks
        ("+task.foo=1", 2),
        ("seed=99999999999999999999", 1),  # out of range
        ("chat=on", 1),  # what this checkpoint cannot do
        ("model.checkpoint=/nowhere", 1),
    ],
)
def test_exit_status_two_is_for_what_does_not_exist(tmp_path: Path, argument: str, status: int) -> None:
    given = [one for one in LLAMA if one.partition("=")[0] != argument.partition("=")[0]]
    done = graphcore(*given, argument, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.splitlines()[-1].startswith("graphcore: ")


@pytest.mark.thorough
@pytest.mark.parametrize("more", [(), ("hydra.job.name=mine",)])  # the second goes through hydra.main
def test_without_outputs_a_run_leaves_nothing(tmp_path: Path, more: tuple[str, ...]) -> None:
    done = graphcore(*LLAMA, *more, "outputs=false", "prompt_ids=[1,2]", "max_new_tokens=3", cwd=tmp_path)
    assert (done.returncode, len(done.stdout.split())) == (0, 3), done.stderr
    assert "result:" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_with_outputs_hydra_keeps_what_was_asked(tmp_path: Path) -> None:
    done = graphcore(*LLAMA, "prompt_ids=[1,2]", "max_new_tokens=1", cwd=tmp_path)
    assert done.returncode == 0
    (overrides,) = tmp_path.glob("outputs/*/*/.hydra/overrides.yaml")
    assert "prompt_ids=[1,2]" in overrides.read_text("utf-8")


def test_the_version_is_printed(tmp_path: Path) -> None:
    done = graphcore("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"graphcore {version('graphcore')}\n")
    module = "import runpy, sys; sys.argv[1:] = ['--version']; runpy.run_module('graphcore', run_name='__main__')"
    started = run_program([], tmp_path, code=module)
    assert (started.returncode, started.stdout) == (0, done.stdout), "python -m graphcore"


def test_a_text_without_a_key_is_the_prompt_and_a_tasks_name_the_task(tmp_path: Path) -> None:
    model = save_chat_folder(tmp_path / "model")
    done = graphcore(
        *LLAMA[:3], f"model.checkpoint={model}", "generate", "Is 2+2=4?", "max_new_tokens=1", "chat=off", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    record = result_of(tmp_path / "outputs")
    assert (record["task"], record["generations"][0]["prompt"]) == ("generate", "Is 2+2=4?")


@pytest.mark.thorough
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_for_a_shell_is_printed(tmp_path: Path, shell: str) -> None:
    done = graphcore("-sc", f"install={shell}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "COMP_LINE" in done.stdout


@pytest.mark.thorough
def test_completion_knows_options_and_a_tasks_keys(tmp_path: Path) -> None:
    def completed(line: str) -> list[str]:
        command = [sys.executable, "-m", "graphcore.cli.main", "-sc", "query=bash"]
        asked = {**environment(), "COMP_LINE": line, "COMP_POINT": str(len(line))}
        done = subprocess.run(command, cwd=tmp_path, env=asked, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("graphcore model=gemma3") == ["model=gemma3", "model=gemma3_1b"]
    assert "task.repeats=" in completed("graphcore task=bench task.")


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


@pytest.mark.thorough
def test_a_failed_verification_is_exit_status_one(tmp_path: Path) -> None:
    done = graphcore(
        *LLAMA, "task=verify", "task.tokens=4", "task.new_tokens=2", "task.tolerance=1e-30", "dtype=bf16", cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("graphcore: VerifyError: the logits differ by")
    assert result_of(tmp_path / "outputs")["status"] == "failed"


def test_progress_is_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    done = graphcore("graph=eager", "device=cpu", LLAMA[3], "max_new_tokens=1", cwd=tmp_path)
    assert any(re.fullmatch(r"load (\d+\.\d)/\1 KiB, group 4.*", line) for line in done.stderr.splitlines())
    assert "\x1b" not in done.stderr + done.stdout


@pytest.mark.slow
def test_the_second_run_compiles_from_a_warm_cache_and_says_so(tmp_path: Path) -> None:
    """Whatever its context length."""
    found = []
    for name, context in (("first", 96), ("second", 200)):
        sizes = ("model.num_hidden_layers=1", f"context_length={context}")
        compiled = ("graph=compiled", *sizes, "cache_dir=cache", f"hydra.run.dir={name}")
        done = graphcore(*LLAMA[1:], *compiled, "prompt_ids=[1,2,3]", "max_new_tokens=4", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found.append(result_of(tmp_path / name))
        assert f"from a {found[-1]['compile']['cache']} cache" in done.stderr
    first, second = found
    assert (first["compile"]["cache"], second["compile"]["cache"]) == ("cold", "warm")
    assert first["compile"]["cache_misses"] == second["compile"]["cache_hits"] == first["graph"]["compiled"] == 3
    assert first["token_ids"] == second["token_ids"]


def test_ctrl_c_ends_with_what_was_generated(tmp_path: Path) -> None:
    endless = ("prompt_ids=[1,2,3]", "max_new_tokens=100000", "context_length=131072", "repetition_detection=false")
    process = Piped(*LLAMA, *endless, cwd=tmp_path)
    assert process.stdout.read(40)  # some tokens have come
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    err = process.read_errors()
    record = result_of(tmp_path / "outputs")
    assert process.returncode == 130
    assert (record["status"], record["finish_reason"]) == ("interrupted", "interrupted")
    assert 10 <= len(record["token_ids"]) < 100000
    assert "Traceback" not in err


@pytest.mark.thorough
def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    """In an interpreter of its own, which flushes its streams at its end."""
    command = [sys.executable, "-m", "graphcore.cli.main", *LLAMA, "prompt_ids=[1]", "max_new_tokens=4000"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    err = process.stderr.read()
    process.wait(60)
    assert process.returncode == 0
    assert "error" not in err.lower()
    assert "Traceback" not in err
    assert result_of(tmp_path / "outputs")["status"] == "interrupted"


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "all"], ["plan", "progress=false", LLAMA[3]]])
def test_a_reader_that_takes_nothing_of_a_text_or_a_table_is_no_error(tmp_path: Path, arguments: list[str]) -> None:
    process = Piped(*arguments, cwd=tmp_path, has_reader=False)  # so that writing fails for certain
    assert (process.read_errors(), process.returncode) == ("", 0)


@pytest.mark.thorough
def test_run_py_and_the_module_are_the_same_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "promt=hi"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.startswith("graphcore: ConfigError: unknown key 'promt'")) == (2, True)


def test_a_run_folder_without_room_is_named(tmp_path: Path) -> None:
    """A file that may not grow stands for a full disk: the write fails, not the opening, so no error names the file."""
    program = (
        "import resource, sys; from graphcore.cli.main import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "prompt_ids=[1]", f"cache_dir={tmp_path}", *LLAMA]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 1
    assert "None" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("graphcore: OutputError: ")]
    assert f"{tmp_path / 'outputs'} cannot be written (File too large)" in line


PRINTING = [
    ["--help"],
    ["--version"],
    ["--cfg", "job"],
    ["models", "outputs=false"],
    [*LLAMA, "prompt_ids=[1,2]", "max_new_tokens=2"],
]


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", PRINTING, ids=lambda arguments: " ".join(arguments[-2:]))
def test_an_output_that_takes_nothing_is_one_line(tmp_path: Path, arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = graphcore(*arguments, cwd=tmp_path, stdout=full)
    said = "standard output cannot be written (No space left on device); send it to another place"
    assert done.stderr.splitlines()[-1] == f"graphcore: OutputError: {said}"
    assert "Traceback" not in done.stderr
    assert "outputs" not in done.stderr
    assert done.returncode == 1
    if arguments[0] in LLAMA:
        assert result_of(tmp_path)["error"] == f"OutputError: {said}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "closed", "status", "said"),
    [
        (["--version"], ">&-", 0, ""),
        ([*LLAMA, "prompt_ids=[1,2]", "max_new_tokens=2"], ">&-", 0, "result:"),
        ([*LLAMA, "prompt_ids=[1,2]", "max_new_tokens=2"], "2>&-", 0, ""),
        ([*LLAMA, "prompt=-"], "<&-", 1, "ConfigError: prompt=- (standard input) is empty"),
        (["task=models", "task.remove=x"], "<&-", 1, "ConfigError: task.remove=x is not in the cache"),
    ],
)
def test_a_stream_that_is_closed_is_no_traceback(
    tmp_path: Path, arguments: list[str], closed: str, status: int, said: str
) -> None:
    command = shlex.join([sys.executable, "-m", "graphcore.cli.main", *arguments])
    done = subprocess.run(
        ["sh", "-c", f"{command} {closed}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert said in done.stderr
    if closed == "2>&-":
        assert len(done.stdout.splitlines()) == 1  # nothing about the run is among its results
