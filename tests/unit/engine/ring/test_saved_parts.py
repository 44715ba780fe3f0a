"""The parts of a saved cache get their names on all ranks, or on none."""

import os
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest

from graphcore.engine.ring.saved_parts import CacheParts
from graphcore.errors import ConfigError, ParallelError
from graphcore.kvcache.prefix_snapshot import PrefixSnapshots
from graphcore.kvcache.snapshot_file import UnfinishedCache
from graphcore.parallel.process_group import ProcessGroup

FULL = "part: the cache cannot be written there: no space; name another file"


class Ranks:
    """A process group of two ranks, of which rank 1 says what was given, or is lost when it has nothing more to say.

    Attributes:
        said: what this rank has said.
    """

    rank = 0

    def __init__(self, *of_rank_1: str) -> None:
        self._of_rank_1 = [*of_rank_1]
        self.said: list[str] = []

    def all_say(self, said: str) -> list[str]:
        """Return what both say."""
        self.said.append(said)
        if not self._of_rank_1:
            raise ParallelError("rank 1 is lost")
        return [said, self._of_rank_1.pop(0)]


def written(folder: Path, *of_rank_1: str) -> tuple[CacheParts, Ranks]:
    """Return the parts of rank 0, on which job 0 has written the file "new" for the name "part", and its ranks."""
    ranks = Ranks(*of_rank_1)
    parts = CacheParts(cast("ProcessGroup", ranks), cast("PrefixSnapshots", None))
    scratch = TemporaryDirectory(dir=folder, prefix=".saving-")
    (Path(scratch.name) / "cache").write_text("new")
    done: Future[Any] = Future()
    done.set_result(UnfinishedCache(folder / "part", scratch))
    parts._jobs[0] = done
    return parts, ranks


def finish(parts: CacheParts) -> None:
    """Give the file of job 0 its name, and end the job."""
    try:
        parts.do({"step": "finish", "job": 0}, dict)
    finally:
        parts.close()


def contents(folder: Path) -> dict[str, str]:
    """Return what is in a folder: text by name."""
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.fixture(params=["links", "no links"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, of a file system with hard links or without."""
    if request.param == "no links":

        def link(*_arguments: object, **_named: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)
    return tmp_path


@pytest.mark.parametrize("before", [{}, {"part": "old"}])
def test_a_part_keeps_its_name_if_all_ranks_have_theirs(folder: Path, before: dict[str, str]) -> None:
    for name, text in before.items():
        (folder / name).write_text(text)
    finish(written(folder, "")[0])
    assert contents(folder) == {"part": "new"}


@pytest.mark.parametrize("before", [{}, {"part": "old"}])
def test_no_part_keeps_its_name_if_another_rank_cannot_name_its_own(folder: Path, before: dict[str, str]) -> None:
    for name, text in before.items():
        (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=f"^rank 1: {FULL}$"):
        finish(written(folder, FULL, "")[0])
    assert contents(folder) == before


@pytest.mark.parametrize("before", [{}, {"part": "old"}])
def test_a_part_that_cannot_be_named_leaves_what_was_there(
    folder: Path, before: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in before.items():
        (folder / name).write_text(text)
    parts, ranks = written(folder, "", "")
    replace = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "cache":
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(ConfigError, match="part: the cache cannot be written there: No space left on device"):
        finish(parts)
    assert ranks.said[1:] == [""], "nothing is left to undo"
    assert contents(folder) == before


@pytest.mark.parametrize("before", [{}, {"part": "old"}])
@pytest.mark.parametrize("can_be_named", [True, False])
def test_a_part_is_what_it_was_if_a_rank_is_lost_before_all_have_named_theirs(
    folder: Path, before: dict[str, str], can_be_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in before.items():
        (folder / name).write_text(text)
    parts, _ = written(folder)
    if not can_be_named:
        replace = Path.replace
        refused = OSError(28, "No space left on device")

        def refuse(self: Path, target: Path) -> Path:
            if self.name == "cache":
                raise refused
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(ParallelError, match="rank 1 is lost"):
        finish(parts)
    assert contents(folder) == before


def test_what_cannot_be_restored_is_named_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "part").write_text("old")
    parts, ranks = written(folder, FULL, "")
    replace = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if self.suffix == ".before":
            raise OSError(5, "Input/output error")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(ConfigError, match=f"rank 1: {FULL}; on rank 0, .*part is new and cannot be removed: Input/out"):
        finish(parts)
    (old,) = (path for path in folder.iterdir() if path.name != "part")
    assert ranks.said[1].endswith(f"; the file that had its name is {old}")
    assert (old.read_text(), (folder / "part").read_text()) == ("old", "new")
