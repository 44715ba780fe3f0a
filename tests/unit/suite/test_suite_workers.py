"""Tests of a part run in several processes: what each says is kept, and a process that dies is replaced."""

import json
import sys
from pathlib import Path

import pytest
from suite import correctness
from suite.bench import Bench
from suite.correctness import RESULTS, run_tests
from suite.log import Log, read_lines

pytestmark = pytest.mark.thorough

HEAD = "import os, sys, types, pytest\npytestmark = pytest.mark.cuda\n"
# As much of torch as the plugin asks: a device that answers until something breaks it.
DEVICE = """
def synchronize():
    if broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
broken = []
cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # these tests need no plugin but the suite's
    return Bench(tmp_path, Log(tmp_path, "run", False, "test_models"), False)


def verdicts(bench: Bench) -> dict[str, str]:
    lines = (bench.folder / RESULTS).read_text(encoding="utf-8").splitlines()
    said = [json.loads(line) for line in lines]
    return {one["test"].rpartition("::")[2]: one["verdict"] for one in said if one["verdict"] != "BEGAN"}


def write_tests(bench: Bench, name: str, text: str) -> str:
    path = bench.folder / f"test_{name}.py"
    path.write_text(HEAD + text, encoding="utf-8")
    return str(path)


def test_of_a_process_that_dies_the_other_tests_run_in_a_new_one(bench: Bench) -> None:
    dying = "def test_first(): pass\ndef test_dies(): os.abort()\ndef test_after(): pass\ndef test_last(): assert 0\n"
    paths = [write_tests(bench, "dying", dying), write_tests(bench, "other", "def test_other(): pass\n")]
    with pytest.raises(RuntimeError, match=r"2 of 5 tests failed: .*test_dies"):
        run_tests(bench, "captured", paths, workers=2)
    found = verdicts(bench)
    assert found.pop("test_dies") == "DIED"
    assert found.pop("test_last") == "FAILED"
    assert found == dict.fromkeys(("test_first", "test_after", "test_other"), "PASSED")
    row = read_lines(bench.folder)[-1]["measurement"]
    assert (row["values"], row["met"]) == ([3.0], False)
    assert any("assert 0" in line for line in (bench.folder / RESULTS).read_text(encoding="utf-8").splitlines())


def test_an_error_that_sticks_to_the_device_takes_one_test(bench: Bench) -> None:
    text = "def test_breaks():\n    broken.append(1)\n    assert 0\ndef test_after():\n    cuda.synchronize()\n"
    with pytest.raises(RuntimeError, match="1 of 2 tests failed"):
        run_tests(bench, "captured", [write_tests(bench, "sticky", DEVICE + text)], workers=1)
    assert verdicts(bench) == {"test_breaks": "FAILED", "test_after": "PASSED"}


def test_every_test_of_a_file_is_in_one_share(bench: Bench) -> None:
    path = write_tests(bench, "many", "@pytest.mark.parametrize('at', range(7))\ndef test_one(at): pass\n")
    run_tests(bench, "captured", [path], workers=3)
    lines = [json.loads(line) for line in (bench.folder / RESULTS).read_text(encoding="utf-8").splitlines()]
    assert sorted(line["test"].rpartition("::")[2] for line in lines if line["verdict"] == "PASSED") == [
        f"test_one[{at}]" for at in range(7)
    ]
    assert len({line["process"] for line in lines}) == 3


def test_a_dry_run_only_finds_the_tests(tmp_path: Path, bench: Bench) -> None:
    dry = Bench(tmp_path, bench.log, True)
    run_tests(dry, "smoke", [write_tests(bench, "fails", "def test_fails(): assert 0\n")], group_by="name")
    assert not (tmp_path / RESULTS).exists()
    with pytest.raises(RuntimeError, match="pytest ended with status 2"):
        run_tests(dry, "smoke", [write_tests(bench, "broken", "raise ImportError('no such module')\n")])


def test_tests_of_one_model_run_in_one_process_in_the_order_of_their_files(bench: Bench) -> None:
    """A test without a model runs beside others of its function."""
    models = "@pytest.mark.parametrize('name', ['llama', 'gpt', 'gemma'])\n"
    texts = {
        "b": f"{models}def test_b(name): pass\n",
        "a": f"{models}@pytest.mark.parametrize('at', [1, 2])\ndef test_a(name, at): pass\n"
        "@pytest.mark.parametrize('at', [1, 2])\ndef test_alone(at): pass\n",
    }
    run_tests(bench, "models", [write_tests(bench, *each) for each in texts.items()], group_by="name", workers=4)
    lines = [json.loads(line) for line in (bench.folder / RESULTS).read_text(encoding="utf-8").splitlines()]
    ran: dict[int, list[str]] = {}
    for line in lines:
        if line["verdict"] == "PASSED":
            ran.setdefault(line["process"], []).append(line["test"].rpartition("::")[2])
    of_models = [[f"test_b[{name}]", f"test_a[1-{name}]", f"test_a[2-{name}]"] for name in ("gemma", "gpt", "llama")]
    assert sorted(ran.values()) == sorted([*of_models, ["test_alone[1]", "test_alone[2]"]])


def test_a_part_whose_tests_were_all_skipped_is_not_ok(bench: Bench) -> None:
    path = write_tests(bench, "skipped", "def test_skipped(): pytest.skip('no device')\n")
    with pytest.raises(RuntimeError, match="no test passed: 1 were skipped"):
        run_tests(bench, "captured", [path], workers=1)


def test_a_python_without_pytest_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    python = bench.folder / "python"
    python.write_text(f"#!{sys.executable}\nraise SystemExit('No module named pytest')\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(correctness.sys, "executable", str(python))
    with pytest.raises(RuntimeError, match="pytest ended with status 1"):
        correctness.models(bench)


def test_tests_of_a_part_do_not_write_over_the_report_of_who_runs_the_part(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", f"--junitxml={bench.folder / 'report.xml'}")
    run_tests(bench, "captured", [write_tests(bench, "one", "def test_one(): pass\n")], workers=1)
    assert not (bench.folder / "report.xml").exists()
