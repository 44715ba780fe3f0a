"""Sweeps: one result per job, one summary, whatever happens to a job."""

import csv
import json
import os
import re
import signal
from pathlib import Path

import pytest
import yaml
from support.chat_folders import TINY, save_chat_folder
from support.processes import Piped, graphcore

from graphcore.cli.sweep.child_processes import finish_sweep
from graphcore.cli.sweep.kept_folder import StartedSweep

pytestmark = pytest.mark.thorough

LLAMA = ("graph=eager", "device=cpu", "progress=false", f"model.checkpoint={TINY / 'llama3'}")
SMALL = ("task=bench", "task.prompt_tokens=4", "task.new_tokens=2", "task.repeats=1")

ENDLESS = ("context_length=131072", "repetition_detection=false")


def sweep_folder(cwd: Path) -> Path:
    (found,) = (cwd / "outputs" / "sweeps").glob("*/*")
    return found


def records(folder: Path) -> list[dict]:
    return [json.loads((job / "result.json").read_text()) for job in sorted(folder.glob("[0-9]*"))]


def summary(folder: Path) -> list[dict[str, str]]:
    with (folder / "summary.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_failed_job_does_not_stop_the_others(tmp_path: Path) -> None:
    done = graphcore(*LLAMA, *SMALL, "-m", "task.depth=0,200000,3", cwd=tmp_path)
    folder = sweep_folder(tmp_path)
    found = records(folder)
    assert done.returncode == 1
    assert [record["status"] for record in found] == ["ok", "failed", "ok"]
    assert "context_length=200004" in found[1]["error"]
    assert [record["settings"]["task"]["depth"] for record in found] == [0, 200000, 3]
    rows = summary(folder)
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert rows[2]["decode tokens/s"] == f"{found[2]['decode']['tokens_per_second']:.2f}"
    assert rows[1]["error"] == found[1]["error"]
    assert (folder / "summary.png").read_bytes().startswith(b"\x89PNG")
    above, _, *table = (folder / "summary.md").read_text().splitlines()
    assert re.match(r"All 3 jobs: graph=eager .* task=bench ", above)
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| task.depth={depth}" for depth in (0, 200000, 3)]
    assert "sweep: 3 jobs, 1 not ok" in done.stderr


@pytest.mark.slow
def test_text_reaches_every_job_unchanged(tmp_path: Path) -> None:
    model = save_chat_folder(tmp_path / "model, one")
    prompt = "Is it 1,2 or 'three'? ${x} \\ !"
    done = graphcore(
        *LLAMA[:3],
        f"model.checkpoint={model}",
        f"prompt={prompt}",
        "stop=a,b",
        "max_new_tokens=1,2",
        "-m",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = records(sweep_folder(tmp_path))
    assert [record["settings"]["max_new_tokens"] for record in found] == [1, 2]
    assert {record["generations"][0]["prompt"] for record in found} == {prompt}
    assert found[0]["settings"]["stop"] == ["a,b"]


def start_sweep(cwd: Path, *arguments: str, has_reader: bool = True) -> Piped:
    return Piped("-m", *LLAMA, *arguments, cwd=cwd, has_reader=has_reader)


def test_ctrl_c_ends_a_sweep_with_a_summary_of_what_ran(tmp_path: Path) -> None:
    process = start_sweep(tmp_path, "prompt_ids=[1,2]", "max_new_tokens=1,100000,5", *ENDLESS)
    process.stdout.readline()  # of the first job, which is done
    assert process.stdout.read(20)  # of the second
    process.send_signal(signal.SIGINT)  # to the sweep alone: it tells its job
    process.stdout.read()
    err = process.read_errors()
    folder = sweep_folder(tmp_path)
    assert process.returncode == 130
    assert [row["status"] for row in summary(folder)] == ["ok", "interrupted"]
    assert [record["status"] for record in records(folder)] == ["ok", "interrupted"]
    assert len(records(folder)[1]["token_ids"]) > 1
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_job_that_is_killed_gets_a_result_that_says_so(tmp_path: Path) -> None:
    process = start_sweep(tmp_path, "prompt_ids=[1,2]", "max_new_tokens=100000,1", *ENDLESS)
    assert process.stdout.read(20)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    process.stdout.read()
    process.read_errors()
    first, second = records(sweep_folder(tmp_path))
    assert process.returncode == 1
    assert (first["status"], second["status"]) == ("failed", "ok")
    assert first["error"] == "the job's process ended with signal 9 and left no result"
    assert [row["status"] for row in summary(sweep_folder(tmp_path))] == ["failed", "ok"]


@pytest.mark.slow
def test_a_sweep_whose_reader_leaves_ends_as_a_single_run_does(tmp_path: Path) -> None:
    process = start_sweep(tmp_path, *SMALL, "seed=1,2", has_reader=False)  # it left before a job printed its table
    err = process.read_errors()
    assert process.returncode == 0
    assert "Traceback" not in err
    assert "error" not in err.lower()
    assert [record["status"] for record in records(sweep_folder(tmp_path))] == ["interrupted", "interrupted"]


def without_seconds(folder: Path) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in summary(folder)]


@pytest.mark.slow
def test_jobs_of_an_earlier_sweep_in_the_same_folder_do_not_count(tmp_path: Path) -> None:
    arguments = (*LLAMA, "task=plan", "-m", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert graphcore(*arguments, "context_length=16,200000,32", cwd=tmp_path).returncode == 1
    (tmp_path / "sweep" / "other").mkdir()
    (tmp_path / "sweep" / "other" / "job.json").write_text('{"of": "another program"}')
    done = graphcore(*arguments, "context_length=16,32", cwd=tmp_path)
    assert (done.returncode, "sweep: 2 jobs;" in done.stderr) == (0, True), done.stderr
    assert [row["status"] for row in summary(tmp_path / "sweep")] == ["ok", "ok"]


def test_a_job_whose_process_was_killed_with_its_parent_is_in_the_summary(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    (folder / "0").mkdir(parents=True)
    job = {"sweep": "now", "number": 0, "overrides": ["task=plan"], "status": None, "seconds": 0.0}
    (folder / "0" / "job.json").write_text(json.dumps(job))
    assert finish_sweep(StartedSweep(folder, "now")) == 1
    assert [row["status"] for row in summary(folder)] == ["interrupted"]


LAUNCHERS = {
    "joblib": ("hydra_joblib_launcher", ("hydra.launcher.n_jobs=2",)),
    "submitit_local": ("hydra_submitit_launcher", ()),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_summary_is_the_same_wherever_jobs_ran(launcher: str, tmp_path: Path) -> None:
    """One job fails, one is refused; jobs run in processes that the launcher has started."""
    plugin, keys = LAUNCHERS[launcher]
    pytest.importorskip(f"hydra_plugins.{plugin}", reason="launchers are an extra: pip install 'graphcore[sweeps]'")
    jobs = ("task=plan", "context_length=16,200000,32", "-m")
    here, there = tmp_path / "here", tmp_path / "there"
    folders = []
    for place, options in ((here, ()), (there, (f"hydra/launcher={launcher}", *keys))):
        place.mkdir()
        done = graphcore(*LLAMA, *jobs, *options, cwd=place)
        assert (done.returncode, "sweep: 3 jobs, 1 not ok" in done.stderr) == (1, True), done.stderr
        folders.append(sweep_folder(place))
    assert [row["status"] for row in summary(folders[0])] == ["ok", "failed", "ok"]
    assert without_seconds(folders[0]) == without_seconds(folders[1])
    texts = [re.sub(r"\d+\.\d\d", "0.00", (folder / "summary.md").read_text()) for folder in folders]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("launcher", "plugin", "key"),
    [
        ("submitit_slurm", "hydra_submitit_launcher", "partition"),
        ("ray", "hydra_ray_launcher", "ray"),
    ],
)
def test_launchers_of_clusters_compose(launcher: str, plugin: str, key: str, tmp_path: Path) -> None:
    pytest.importorskip(f"hydra_plugins.{plugin}", reason=f"{plugin} is not installed")
    done = graphcore("--cfg", "hydra", f"hydra/launcher={launcher}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    composed = yaml.safe_load(done.stdout)["hydra"]
    assert (key in composed["launcher"], "sweep_folder" in composed["callbacks"]) == (True, True)
