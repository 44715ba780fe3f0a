"""What the other tests of this folder stand on: no recipe edits a file, or adds one that it does not name."""

import pytest
from checkout import Checkout, recipe_paths


@pytest.mark.thorough
def test_a_recipe_cannot_edit(checkout: Checkout) -> None:
    with pytest.raises(AssertionError, match="a recipe adds files and edits none"):
        checkout.add("graphcore/tasks/task.py", "")


def test_a_recipe_adds_what_its_paragraph_names_and_nothing_else(checkout: Checkout) -> None:
    with pytest.raises(AssertionError, match="which the recipe did not need"):
        checkout.assert_follows("A task")
    checkout.add("graphcore/tasks/commands/one.py", "")
    checkout.add("conf/task/one.yaml", "")
    checkout.assert_follows("A task")
    checkout.add("graphcore/tasks/two.py", "")
    with pytest.raises(AssertionError, match=r"and not \['graphcore/tasks/two\.py'\]"):
        checkout.assert_follows("A task")


def test_a_recipe_that_is_not_there_is_missed() -> None:
    with pytest.raises(AssertionError, match=r"no recipe that begins with \*\*A dance\.\*\*"):
        recipe_paths("A dance")


def test_what_is_imported_and_run_is_the_copy(checkout: Checkout) -> None:
    checkout.add("graphcore/marker.py", "WORD = 'of the copy'\n")
    assert checkout.python("from graphcore.marker import WORD; print(WORD)") == "of the copy\n"
    assert checkout.run("--version").status == 0
