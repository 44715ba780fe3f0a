"""Code is built where it is kept, or in a temporary folder of the process if nothing can be built there."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphcore.build_folder import ROOM, build_folder, is_one_word, obstacle, temporary_folder


def test_a_folder_with_room_is_created_and_keeps_the_code(tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "compiled"
    assert build_folder(kept) == (kept, "")
    assert list(kept.iterdir()) == []


def test_a_file_in_the_folders_place_sends_the_code_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    folder, note = build_folder(tmp_path / "file" / "compiled", "THE_KEY")
    assert folder == temporary_folder()
    assert "file/compiled cannot keep built code (Not a directory): a temporary folder has it" in note
    assert "set THE_KEY to" in note


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_and_a_quota_are_noticed_before_anything_is_built(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_file: int, _at: int, nbytes: int) -> None:
        assert nbytes == ROOM
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert obstacle(tmp_path) == os.strerror(number)


def test_a_folder_where_nothing_may_run_is_an_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert obstacle(tmp_path) == "Mounted noexec"


def test_the_temporary_folder_goes_with_its_process_and_not_with_a_forked_one(tmp_path: Path) -> None:
    code = (
        "import os, sys; from graphcore.build_folder import temporary_folder; folder = temporary_folder()\n"
        "child = os.fork()\n"
        "if not child: sys.exit()\n"
        "os.waitpid(child, 0); print(folder, folder.is_dir(), temporary_folder() == folder)"
    )
    spaced = tmp_path / "with a space"  # commands of torch's could not name it
    spaced.mkdir()
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TMPDIR": str(place)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        for place in (tmp_path, spaced)
    ]
    assert [line[1:] for line in said] == [["True", "True"]] * 2
    assert [Path(line[0]).parent == tmp_path for line in said] == [True, False]
    assert [Path(line[0]).exists() for line in said] == [False, False]


@pytest.mark.parametrize(
    ("path", "expected"), [("/a/b-c.d_1", True), ("/a b", False), ("/\u00fc", False), ("/a'b", False)]
)
def test_a_plain_path_is_one_word_for_a_shell(path: str, expected: bool) -> None:
    assert is_one_word(Path(path)) == expected
