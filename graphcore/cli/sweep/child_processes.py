"""The jobs of a sweep: each runs in a new process, so that the others continue after one has failed."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hydra.conf import HydraConf
from omegaconf import OmegaConf

import graphcore
from graphcore.cli.quoting import quote
from graphcore.cli.sweep.kept_folder import StartedSweep, sweep_start
from graphcore.cli.sweep.summary import SweepRow, write_summary
from graphcore.tasks.report.output_files import write_json
from graphcore.tasks.report.result_json import FILE_NAME, failed, minimal_record
from graphcore.tasks.termination import ENDING, OF_SIGNALS, Terminated
from graphcore.threads import naming_limit

# The package's own folder comes last on the path, for checkouts that are not installed.
CHILD = "import sys; sys.path.append({root!r}); from graphcore.cli.main import main; main(is_quoted=True)"
JOB_FILE = "job.json"
SECONDS_TO_END = (3.0, 15.0)  # seconds after Ctrl-C until the job is sent a signal, and until it is killed
INTERRUPTING = (signal.SIGINT, *ENDING)


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep that has ended, as its folder's job.json has it.

    Attributes:
        sweep: time of the sweep's start.
        number: place in the sweep, from 0.
        overrides: settings as on the command line.
        status: exit status; a negative one is the signal that killed the job; None while it runs, or if the process
            that ran it was killed, too.
        seconds: run time of the job's process.
    """

    sweep: str
    number: int
    overrides: Sequence[str]
    status: int | None
    seconds: float


def run_child(hydra_config: HydraConf) -> None:
    """Run a job in a process of its own, so that graphs, caches and errors of other jobs do not affect it."""
    output_dir = Path(hydra_config.runtime.output_dir)
    # as a whole, because reading single items would remove the escape of a text's "\${"
    written = OmegaConf.to_container(OmegaConf.create(hydra_config.overrides.task))
    assert isinstance(written, list), "Hydra lists the overrides"
    overrides = tuple(map(str, written))
    code = CHILD.format(root=str(Path(graphcore.__file__).parent.parent))
    command = [sys.executable, "-c", code, *overrides, f"hydra.run.dir={quote(str(output_dir))}"]
    print(f"--- {' '.join(overrides)}", file=sys.stderr, flush=True)
    job = SweepJob(sweep_start(hydra_config), hydra_config.job.num, overrides, None, 0.0)
    (output_dir / FILE_NAME).unlink(missing_ok=True)  # of an earlier sweep in the same folder
    write_json(output_dir / JOB_FILE, asdict(job))
    began = time.perf_counter()
    with naming_limit("the process of a sweep's job"):
        child = subprocess.Popen(command)
    try:
        child.wait()
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, Terminated):  # the signal may have been sent to this process only
            child.send_signal(interrupt.number)
        end_child(child)
        raise
    finally:
        job = replace(job, status=child.returncode, seconds=time.perf_counter() - began)
        write_json(output_dir / JOB_FILE, asdict(job))


def finish_sweep(sweep: StartedSweep) -> int:
    """Write the results of jobs that died, and the summary of all jobs; return the sweep's exit status.

    Raises:
        OutputError: a file cannot be written.
    """
    folder = sweep.folder
    found = {file.parent: job_of(file) for file in folder.rglob(JOB_FILE)}
    own = {place: job for place, job in found.items() if job is not None and job.sweep == sweep.started}
    jobs = dict(sorted(own.items(), key=lambda item: item[1].number))
    rows = [SweepRow.of(job.overrides, job.seconds, completed_record(place, job)) for place, job in jobs.items()]
    if not rows:
        return 1
    write_summary(folder, rows)
    num_failed = sum(row.status != "ok" for row in rows)
    ended = f"{len(rows)} jobs" + (f", {num_failed} not ok" if num_failed else "")
    print(f"sweep: {ended}; {folder}/summary.md", file=sys.stderr, flush=True)
    return int(any(job.status != 0 for job in jobs.values()))  # 0, too, if a job's reader has left


def job_of(file: Path) -> SweepJob | None:
    """Return the job that a job.json describes; None if it is another program's."""
    try:
        return SweepJob(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Wait for a job after Ctrl-C or SIGTERM; interrupt it if it keeps running, and kill it if that is not enough."""
    try:
        child.wait(SECONDS_TO_END[0])
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(SECONDS_TO_END[1])
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def completed_record(folder: Path, job: SweepJob) -> dict[str, object]:
    """Return the record of the job's result.json, which is written now if the job died without one."""
    path = folder / FILE_NAME
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(record, dict), f"{path} holds no object"
        return record
    if job.status is None:
        error = "the process that ran the job was killed, and the job left no result"
        record = {**failed(minimal_record(None, None), error), "seconds": job.seconds, "status": "interrupted"}
        write_json(path, record)
        return record
    ended = f"signal {-job.status}" if job.status < 0 else f"exit status {job.status}"
    error = f"the job's process ended with {ended} and left no result"
    record = {**failed(minimal_record(None, None), error), "seconds": job.seconds}
    if job.status in {status for number in INTERRUPTING for status in (-number, OF_SIGNALS + number)}:
        record.update(status="interrupted", error=None)
    write_json(path, record)
    return record
