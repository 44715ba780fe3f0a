"""The suite's own plugins: what a file may cost, why tests were skipped, and in which order files run."""

import json
from pathlib import Path

import pytest
from support import budget, sharing

pytestmark = pytest.mark.thorough

pytest_plugins = ["pytester"]
TESTS = Path(__file__).parents[2]
CONFTEST = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from support import budget
from support.budget import ProcessorTime
from support.sharing import in_order

budget.DURATIONS = Path(__file__).parent / "durations.json"

def pytest_addoption(parser):
    parser.addoption("--record-durations", action="store_true")
    parser.addini("unit_budget", "", default="0.05")
    parser.addini("unit_limit", "", default="0.1")

def pytest_configure(config):
    config.option.markexpr = "not thorough"
    config.pluginmanager.register(ProcessorTime(config))

def pytest_collection_modifyitems(config, items):
    items[:] = in_order(items, config.rootpath)
"""
SPEND = "import time\nuntil = time.process_time() + {seconds}\nwhile time.process_time() < until: pass\n"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Three files: one that spends processor time, one that waits, and one that skips."""
    monkeypatch.delenv("CI", raising=False)
    pytester.makeconftest(CONFTEST)
    folder = pytester.mkpydir("tests") / "unit"
    folder.mkdir()
    spend = SPEND.format(seconds=0.2).replace("\n", "\n    ")
    (folder / "test_spends.py").write_text(f"def test_it():\n    {spend}")
    (folder / "test_waits.py").write_text("import time\ndef test_it():\n    time.sleep(0.2)\n")
    skips = "import pytest\n@pytest.mark.parametrize('at', range(3))\ndef test_it(at): pytest.skip('no such device')"
    (folder / "test_skips.py").write_text(skips)
    return pytester


def test_a_run_lists_files_above_their_budget_counts_skipped_tests_and_records_what_runs_first_next_time(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = suite.runpytest_inprocess("-p", "no:cacheprovider", "--record-durations")
    assert found.ret == 0
    lines = [
        "*skipped*",
        "    3  no such device",
        "*above 0.05 s of processor time*",
        "*0.2 s  tests/unit/test_spends.py",
    ]
    found.stdout.fnmatch_lines(lines)
    found.stdout.no_fnmatch_line("* s  tests/unit/test_waits*")
    recorded = json.loads((suite.path / "durations.json").read_text())
    assert list(recorded) == [f"tests/unit/test_{name}.py" for name in ("skips", "spends", "waits")]
    assert recorded["tests/unit/test_spends.py"] > 0.15 > recorded["tests/unit/test_waits.py"]
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(budget, "DURATIONS", suite.path / "durations.json")
    sharing.seconds_of.cache_clear()
    found = suite.runpytest_inprocess("-p", "no:cacheprovider", "-v")
    sharing.seconds_of.cache_clear()
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    found.stdout.fnmatch_lines(["tests/unit/test_spends.py*", "tests/unit/test_waits.py*", "1 of them above 0.1 s*"])


def test_tests_of_one_kind_of_block_run_in_one_worker() -> None:
    matrix = "tests/integration/test_engine_matrix.py"
    units = [sharing.unit_of(f"{matrix}::test_sequences[{name}]") for name in ("a-dense", "b-dense", "a-latent")]
    assert units[0] == units[1] != units[2]
    assert {sharing.unit_of(f"{file}::test_x[a-b]") for file in sharing.TOGETHER} == {sharing.TOGETHER[0]}
