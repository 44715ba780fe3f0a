"""Installing says that the kernels are built, before it builds them, and nothing if they are there."""

from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from hatchling.bridge.app import Application

from hatch_build import KernelHook


class FakeCompiler:
    """A compiler of one target, which writes an empty library and what was said before."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.said = capsys, list[str]()

    def targets_here(self) -> list[str]:
        return ["avx2"]

    def prebuilt_name(self, sources: Path, target: str) -> str:
        return f"kernels-{target}"

    def flags_for(self, target: str) -> list[str]:
        return []

    def build_libraries(self, chosen: Any, sources: Path, missing: dict[Path, list[str]]) -> None:
        self.said.append(self._capsys.readouterr().err)
        for path in missing:
            path.touch()


def test_a_build_of_kernels_is_said_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "graphcore/kernels/cpu").mkdir(parents=True)
    compiler = FakeCompiler(capsys)
    parts: tuple[Any, ...] = (str(tmp_path), {}, None, None, str(tmp_path), "wheel", Application())
    for _ in range(2):
        KernelHook(*parts).build(cast("ModuleType", compiler), compiler)
    assert compiler.said == ["graphcore: building the C++ kernels for 1 kinds of processors, for a minute or more\n"]
    assert capsys.readouterr().err == "", "the libraries were there"
