"""Extensions are found by being there; unknown names are told with the nearest and all known ones."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from graphcore.errors import CheckpointError, ConfigError
from graphcore.registry import collect, lookup, nearest

TABLE = {"llama": 1, "qwen3": 2, "gemma3": 3}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package of extensions that are fractions: b has one, a two and a number that is none."""
    folder = tmp_path / "extension_fractions"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "b.py").write_text("from fractions import Fraction\nHALF = Fraction(1, 2)\n")
    (folder / "a.py").write_text(
        "from fractions import Fraction\nTHIRD = Fraction(1, 3)\nFIFTH = Fraction(1, 5)\nOTHER = 7\n"
        "from extension_fractions.b import HALF\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import extension_fractions

    yield extension_fractions
    for name in [name for name in sys.modules if name.startswith("extension_fractions")]:
        del sys.modules[name]


def test_collect_finds_every_instance_once_in_order_of_module_names(package: ModuleType) -> None:
    from fractions import Fraction

    assert collect(package, Fraction) == (Fraction(1, 3), Fraction(1, 5), Fraction(1, 2))


def test_collect_refuses_a_module_that_adds_nothing(package: ModuleType) -> None:
    with pytest.raises(AssertionError, match=r"extension_fractions\.b defines no int"):
        collect(package, int)


def test_lookup_returns_what_is_there() -> None:
    assert lookup("model", "qwen3", TABLE) == 2


def test_lookup_of_an_unknown_name_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(ConfigError) as caught:
        lookup("model", "qwen", TABLE)
    assert str(caught.value) == "unknown model 'qwen' (did you mean 'qwen3'?); known: gemma3, llama, qwen3"


def test_lookup_suggests_nothing_where_nothing_is_near() -> None:
    with pytest.raises(ConfigError, match=r"^unknown model 'zzz'; known: gemma3"):
        lookup("model", "zzz", TABLE)


def test_lookup_raises_the_error_that_its_caller_wants() -> None:
    with pytest.raises(CheckpointError):
        lookup("model", "zzz", TABLE, CheckpointError)


def test_nearest_of_nothing_is_nothing() -> None:
    assert nearest("llama", []) == ""
    assert nearest("lama", ["llama"]) == " (did you mean 'llama'?)"
    assert nearest("LLAMA", ["llama"]) == " (did you mean 'llama'?)"
