"""SIGTERM and SIGHUP, from containers, schedulers and closed terminals, end a command as Ctrl-C does."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from support.chat_folders import TINY, save_chat_folder
from support.processes import ROOT, Piped, environment, run_program

pytestmark = pytest.mark.thorough

LLAMA = ("graph=eager", "device=cpu", "progress=false", f"model.checkpoint={TINY / 'llama3'}")
ENDLESS = ("max_new_tokens=100000", "context_length=131072", "repetition_detection=false", "hydra.run.dir=run")
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_folder(tmp_path_factory.mktemp("chats") / "model")


def record_in(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def end(process: Piped, *numbers: int) -> str:
    """Send signals one after another and return what the process says until it has ended."""
    for number in numbers:
        process.send_signal(number)
    process.stdout.read()
    return process.read_errors()


@SIGNALS
def test_an_answer_is_kept_as_far_as_it_is(number: int, tmp_path: Path) -> None:
    process = Piped(*LLAMA, *ENDLESS, "prompt_ids=[1,2,3]", cwd=tmp_path)
    assert process.stdout.read(40)  # some tokens have come
    said = end(process, number)
    record = record_in(tmp_path / "run")
    assert process.returncode == 128 + number
    assert (record["status"], record["finish_reason"], record["error"]) == ("interrupted", "interrupted", None)
    assert 10 <= len(record["token_ids"]) < 100000
    assert "graphcore: interrupted" in said
    assert "Traceback" not in said


def test_further_signals_change_nothing(tmp_path: Path) -> None:
    process = Piped(*LLAMA, *ENDLESS, "prompt_ids=[1,2,3]", cwd=tmp_path)
    assert process.stdout.read(40)
    said = end(process, signal.SIGTERM, signal.SIGTERM, signal.SIGTERM)
    record = record_in(tmp_path / "run")
    assert (process.returncode, record["status"]) == (143, "interrupted")
    assert len(record["token_ids"]) >= 10
    assert "Traceback" not in said


def test_answers_of_a_file_are_whole(tmp_path: Path) -> None:
    lines = [{"prompt_ids": [1, at], "max_new_tokens": 4 if at < 3 else 100000} for at in range(1, 5)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = ("task.prompts_jsonl=prompts.jsonl", "task.output=answers.jsonl", "batch_size=2")
    process = Piped(*LLAMA, *ENDLESS, *files, cwd=tmp_path)
    answers = tmp_path / "answers.jsonl"
    while not answers.exists() or answers.read_text().count("\n") < 2:
        time.sleep(0.01)
    end(process, signal.SIGTERM)
    record = record_in(tmp_path / "run")
    assert (process.returncode, record["status"]) == (143, "interrupted")
    assert [json.loads(line)["line"] for line in answers.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(
    "arguments", [("prompt_ids=[1]",), ("prompt_ids=[1]", "streaming=on"), ("task=bench",)], ids=" ".join
)
def test_loading_is_given_up(arguments: tuple[str, ...], tmp_path: Path) -> None:
    weights = ("model=smollm2", "model.checkpoint=random:q4_0", "graph=eager", "device=cpu")
    process = Piped(*weights, "hydra.run.dir=run", *arguments, cwd=tmp_path)
    process.stderr.readline()  # it has begun
    time.sleep(0.2)
    said = end(process, signal.SIGTERM)
    assert (process.returncode, record_in(tmp_path / "run")["status"]) == (143, "interrupted")
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_sweep_ends_its_job_and_writes_its_summary(number: int, tmp_path: Path) -> None:
    sweep = ("-m", "prompt_ids=[1,2]", "max_new_tokens=1,100000,5", "context_length=131072", "hydra.sweep.dir=sweep")
    process = Piped(*LLAMA, *sweep, cwd=tmp_path)
    process.stdout.readline()  # of the first job, which is done
    assert process.stdout.read(20)  # of the second
    (job,) = children_of(process.pid)
    began = time.monotonic()
    said = end(process, number)  # to the sweep alone: it tells its job
    assert time.monotonic() - began < 10, "a container is killed after ten seconds"
    assert process.returncode == 128 + number
    assert [record_in(tmp_path / "sweep" / name)["status"] for name in "01"] == ["ok", "interrupted"]
    assert (tmp_path / "sweep" / "summary.md").exists()
    assert not (tmp_path / "sweep" / "2").exists()
    assert len(record_in(tmp_path / "sweep" / "1")["token_ids"]) > 1
    assert not Path(f"/proc/{job}").exists()
    assert "Traceback" not in said


def test_what_is_ignored_or_handled_stays_so(tmp_path: Path) -> None:
    """As under nohup, and in a program that calls the command line with a handler of its own."""
    code = (
        "import os, signal\n"
        "from graphcore.cli import single_run\n"
        "from graphcore.cli.main import main\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: print('own handler'))\n"
        "write = single_run.write_json\n"
        "def signalled(path, record):\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    write(path, record)\n"
        "single_run.write_json = signalled\n"
        "main()\n"
    )
    arguments = [*LLAMA, "prompt_ids=[1,2,3]", "max_new_tokens=3", "hydra.run.dir=run"]
    done = run_program(arguments, tmp_path, code=code)
    assert (done.returncode, record_in(tmp_path / "run")["status"]) == (0, "ok"), done.stderr
    assert done.stdout.endswith("own handler\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_result_is_written_whole_before_a_signal_ends_the_process(number: int, tmp_path: Path) -> None:
    code = (
        "import os\n"
        "from graphcore.cli import single_run\n"
        "from graphcore.cli.main import main\n"
        "write = single_run.write_json\n"
        "def signalled(path, record):\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    write(path, record)\n"
        "single_run.write_json = signalled\n"
        "main()\n"
    )
    done = run_program([*LLAMA, "prompt_ids=[1]", "max_new_tokens=3", "hydra.run.dir=run"], tmp_path, code=code)
    assert done.returncode == 128 + number
    assert record_in(tmp_path / "run")["status"] == "ok"
    assert len(record_in(tmp_path / "run")["token_ids"]) == 3
    assert "Traceback" not in done.stderr


def test_the_python_interface_installs_no_handler(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from graphcore import Engine\n"
        "with Engine.load(sys.argv[1], device='cpu', graph='eager') as engine:\n"
        "    engine.generate([[1, 2]], max_new_tokens=2)\n"
        "    assert {signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)} == {signal.SIG_DFL}\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    assert run_program([str(TINY / "llama3")], tmp_path, code=code).returncode == -signal.SIGTERM


def test_no_process_of_a_template_is_left(chat_folder: Path, tmp_path: Path) -> None:
    model = (*LLAMA[:3], f"model.checkpoint={chat_folder}")
    process = Piped(*model, *ENDLESS, "prompt=hello", cwd=tmp_path)
    assert process.stdout.read(10)
    workers = children_of(process.pid)
    assert workers, "a chat template runs in a process of its own"
    end(process, signal.SIGTERM)
    assert process.returncode == 143
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_a_chat_in_a_pipe_keeps_its_turns(chat_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "typed").write_text("/set max_new_tokens=3\none\n/set max_new_tokens=null\ntwo\nthree\n")
    code = (
        "import os, sys\n"
        "os.dup2(os.open('typed', os.O_RDONLY), 0)\n"
        "from graphcore.tasks.chat.session import Session\n"
        "from graphcore.cli.main import main\n"
        "printed = []\n"
        "import graphcore.tasks.report.console as console\n"
        "text = console.Console.text\n"
        "def counted(self, piece):\n"
        "    text(self, piece)\n"
        "    printed.append(piece)\n"
        "    if len(printed) == 12:\n"
        "        os.kill(os.getpid(), 15)\n"
        "console.Console.text = counted\n"
        "main()\n"
    )
    model = [*LLAMA[:3], f"model.checkpoint={chat_folder}", "task=chat", "context_length=2048", "hydra.run.dir=run"]
    done = run_program(model, tmp_path, code=code)
    record = record_in(tmp_path / "run")
    assert (done.returncode, record["status"]) == (143, "interrupted"), done.stderr
    assert [(turn["user"], turn["finish_reason"]) for turn in record["turns"]] == [
        ("one", "length"),
        ("two", "interrupted"),
    ]
    assert "Traceback" not in done.stderr


def test_a_signal_before_anything_has_begun_is_one_line(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "import graphcore.cli.main as command\n"
        "command._check_arguments = lambda arguments: os.kill(os.getpid(), 15)\n"
        "command.main()\n"
    )
    done = run_program([*LLAMA, "prompt_ids=[1]"], tmp_path, code=code)
    assert (done.returncode, done.stderr.strip()) == (143, "graphcore: interrupted")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_command_line_is_imported_is_one_line(number: int, tmp_path: Path) -> None:
    (tmp_path / "hydra.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\nraise AssertionError\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, str(ROOT / "run.py"), *LLAMA, "prompt_ids=[1]"]
    variables = {**environment(), "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + number, "graphcore: interrupted\n")


def test_the_installed_command_begins_as_run_py_does() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    assert scripts == {"graphcore": "graphcore.cli.start:start"}
    assert "from graphcore.cli.start import start" in (ROOT / "run.py").read_text("utf-8")
