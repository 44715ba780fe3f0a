"""The suite's own plugins: what a file may cost, why tests were skipped, and in which order files run."""

import json
from pathlib import Path

import pytest

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


def test_files_above_their_budget_are_listed_and_fail_in_ci_alone(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = suite.runpytest_inprocess("-p", "no:cacheprovider")
    assert found.ret == 0
    found.stdout.fnmatch_lines(["*above 0.05 s of processor time*", "*0.2 s  tests/unit/test_spends.py", "*passed*"])
    found.stdout.no_fnmatch_line("* s  tests/unit/test_waits*")
    monkeypatch.setenv("CI", "true")
    found = suite.runpytest_inprocess("-p", "no:cacheprovider")
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    found.stdout.fnmatch_lines(["1 of them take more than twice as much*"])
    assert suite.runpytest_inprocess("-p", "no:cacheprovider", "-o", "unit_budget=0.11").ret == 0


def test_skipped_tests_are_counted_by_reason(suite: pytest.Pytester) -> None:
    suite.runpytest_inprocess("-p", "no:cacheprovider").stdout.fnmatch_lines(["*skipped*", "    3  no such device"])


def test_the_longest_files_as_recorded_run_first_and_parts_of_the_matrix_stay_together(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support import budget, sharing

    monkeypatch.setattr(budget, "DURATIONS", suite.path / "durations.json")
    suite.runpytest_inprocess("-p", "no:cacheprovider", "--record-durations")
    recorded = json.loads((suite.path / "durations.json").read_text())
    assert list(recorded) == [f"tests/unit/test_{name}.py" for name in ("skips", "spends", "waits")]
    assert recorded["tests/unit/test_spends.py"] > 0.15 > recorded["tests/unit/test_waits.py"]
    sharing.seconds_of.cache_clear()
    found = suite.runpytest_inprocess("-p", "no:cacheprovider", "--collect-only", "-q")
    assert found.outlines[0].startswith("tests/unit/test_spends.py")
    sharing.seconds_of.cache_clear()
    matrix = "tests/integration/test_engine_matrix.py"
    units = [sharing.unit_of(f"{matrix}::test_sequences[{name}]") for name in ("a-dense", "b-dense", "a-latent")]
    assert units[0] == units[1] != units[2]
    assert {sharing.unit_of(f"{file}::test_x[a-b]") for file in sharing.TOGETHER} == {sharing.TOGETHER[0]}
