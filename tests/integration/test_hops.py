"""How far it is from the command to the first product: each call that only hands on is one more to read."""

import re

from support.processes import ROOT, run_program

TINY = ROOT / "tests" / "golden" / "tiny" / "llama3"
MOST_CALLS, MOST_FILES = 18, 12  # 9 calls to the queue of requests, 9 in the thread that computes
STRUCTURE = "import runpy; runpy.run_module('benchmarks.structure', run_name='__main__')"


def test_the_first_product_is_few_calls_from_the_command() -> None:
    asked = (f"model.checkpoint={TINY}", "prompt_ids=[1,2,3]", "device=cpu", "max_new_tokens=1", "outputs=false")
    done = run_program(asked, ROOT, code=STRUCTURE, imported="torch")
    found = re.search(r"to the first product: (\d+) calls, (\d+) files", done.stdout)
    assert found is not None, done.stderr
    calls, files = map(int, found.groups())
    assert 0 < calls <= MOST_CALLS
    assert 0 < files <= MOST_FILES
