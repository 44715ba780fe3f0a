"""Commands at real limits of threads: pids.max of a control group, and RLIMIT_NPROC of a user."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chat_folders import save_chat_folder
from support.processes import ROOT, run_program

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from control_group import ControlGroup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")
IN_GROUP = """
import os, runpy, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
sys.argv = ["run.py", *sys.argv[2:]]
runpy.run_path("run.py", run_name="__main__")
"""
AS_USER = """
import os, resource, sys, threading
from pathlib import Path
from graphcore.errors import ThreadLimitError
from graphcore.streaming.thread_filler import ThreadFiller
from graphcore.streaming.timeline import Timeline
from graphcore.threads import _threads_of_user, start_thread
may_end = threading.Event()
if os.getuid() == 0:
    os.setgid(54321)
    os.setuid(54321)  # root is exempt
used = _threads_of_user(Path("/"))
for most in range(6):
    resource.setrlimit(resource.RLIMIT_NPROC, (used + most, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    try:
        ThreadFiller({}, 4, 0, 0, Timeline()).close()
        print("started")
    except ThreadLimitError as error:
        print(error)
    print([thread.name for thread in threading.enumerate() if "graphcore" in thread.name])
    tasks = lambda: len(os.listdir("/proc/self/task"))
    while tasks() > 1:  # the system counts a thread for a moment after it was joined
        pass
"""


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    """A group of processes whose pids.max can be set."""
    parent = pids_folder()
    if parent is None:
        pytest.skip("no pids controller can be written to; run as root on a machine with control groups")
    made = ControlGroup(parent / f"graphcore-test-{os.getpid()}-{time.monotonic_ns()}")
    made.folder.mkdir()
    try:
        yield made
    finally:
        made.remove()


def pids_folder() -> Path | None:
    """Return the folder in which groups with a limit of processes can be made; None if there is none."""
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, folder, kind, flags, *_ = line.split()
        is_v1 = kind == "cgroup" and "pids" in flags.split(",")
        root = Path(folder)
        if not os.access(root, os.W_OK):
            continue
        if is_v1:
            return root
        if kind == "cgroup2" and "pids" in (root / "cgroup.subtree_control").read_text(encoding="ascii").split():
            return root
    return None


@pytest.mark.thorough
def test_a_command_in_a_group_of_few_threads_is_one_line(group: ControlGroup, tmp_path: Path) -> None:
    """Streaming takes four threads, the engine one, and torch one beside the main thread and the engine's."""
    folder = save_chat_folder(tmp_path / "model")
    asked = [f"model.checkpoint={folder}", "prompt=Hello", "max_new_tokens=2", "graph=eager", "streaming=on"]
    asked += ["threads=2", "outputs=false", "progress=false"]
    ended: list[int] = []
    for most in (1, 2, 4, 6, 24):
        (group.folder / "pids.max").write_text(str(most))
        done = run_program([str(group.folder), *asked], ROOT, code=IN_GROUP)
        ended.append(done.returncode)
        lines = [line for line in done.stderr.splitlines() if line.startswith("graphcore: ")]
        if done.returncode:
            (line,) = lines
            assert line.startswith("graphcore: ThreadLimitError: "), most
            assert f"{group.folder}/pids.max allows {most} processes and threads, and " in line
        assert "Traceback" not in done.stderr, (most, done.stderr)
        assert "libgomp" not in done.stderr, (most, done.stderr)
    assert ended == [1, 1, 1, 1, 0]


def test_threads_beyond_what_a_user_may_have_are_one_line_and_none_is_left(tmp_path: Path) -> None:
    done = run_program([], tmp_path, code=AS_USER)
    assert done.returncode == 0, done.stderr
    said, left = done.stdout.splitlines()[::2], done.stdout.splitlines()[1::2]
    assert left == ["[]"] * 6
    assert said[4:] == ["started"] * 2
    for most, line in enumerate(said[:4]):
        assert line.startswith(f"thread graphcore-fill-{most} of 4 cannot be started: the user's limit (RLIMIT_NPROC) ")
        assert line.endswith("; raise it (ulimit -u), or end others under it")
