"""A rank that follows rank 0 leaves no folder, however the command line says that it is one."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from graphcore.cli.main import main

EXPERIMENT = "# @package _global_\ndefaults:\n  - override /parallel: ring\n"
PLAN = ("task=plan", "task.ranks=2", "task.ram=8GiB", "model=qwen3", "model.checkpoint=random:")


def run(rank: str, spelling: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run a command as a rank, and return what is in the folder then."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RANK", rank)
    (folder / "own" / "experiment").mkdir(parents=True)
    (folder / "own" / "experiment" / "of_ring.yaml").write_text(EXPERIMENT)
    with pytest.raises(SystemExit) as ended:
        main([*spelling, *PLAN, "model.num_hidden_layers=4"])
    assert ended.value.code == 0
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "spelling",
    [
        ("parallel=ring",),
        ("parallel='ring'",),
        ("++parallel.kind=ring",),
        ("parallel.kind=ring", "hydra.job.name=mine"),  # goes through hydra.main
        ("--config-dir=own", "experiment=of_ring"),
    ],
    ids=" ".join,
)
def test_a_rank_that_follows_makes_no_folder(
    spelling: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("1", spelling, tmp_path, monkeypatch) == ["own"]


def test_rank_0_makes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("0", ["parallel=ring"], tmp_path, monkeypatch) == ["outputs", "own"]
