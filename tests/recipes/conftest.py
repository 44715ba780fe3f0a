"""The fixture of recipes: a fresh copy of a contributor's checkout."""

from pathlib import Path

import pytest
from checkout import Checkout, copy_checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A fresh copy of this checkout, to add files to."""
    return copy_checkout(tmp_path)
