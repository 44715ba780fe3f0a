"""How the code is laid out, counted: `python -m benchmarks.structure`, and with words of a command line also hops.

Files and lines come from the sources; imports between packages from their import statements; hops from running a
command, `python -m benchmarks.structure model=smollm2 max_new_tokens=1`: the Python calls of graphcore that are under
way when the first product of matrices begins, and those between a read from a file and the C++ that packs its bytes.
"""

import ast
import statistics
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import graphcore
from graphcore.cli.main import main as run_command

ROOT = Path(graphcore.__file__).parent
SMALL = 60  # lines below which a file with one importer is a paragraph of that importer


def sources() -> dict[str, str]:
    """Return the text of each module by its dotted name."""
    paths = sorted(ROOT.rglob("*.py"))
    return {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path.read_text() for path in paths}


def importers(modules: dict[str, str]) -> dict[str, set[str]]:
    """Return which modules import each module."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, text in modules.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for one in {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & modules.keys():
                    found[one].add(name)
    return found


def package_of(module: str) -> str:
    """Return the package that a module lies in, or the module itself beside the packages."""
    return ".".join(module.split(".")[:2])


def show_layout() -> None:
    """Print counts of files, lines, small files and imports between packages."""
    modules = {name: text for name, text in sources().items() if not name.endswith("__init__")}
    lines = {name: len(text.splitlines()) for name, text in modules.items()}
    users = importers(modules)
    small = [name for name in modules if lines[name] < SMALL and len(users[name]) == 1]
    pairs = Counter(
        (package_of(user), package_of(name))
        for name in modules
        for user in users[name]
        if package_of(user) != package_of(name)
    )
    print(f"files: {len(modules)}, lines: {sum(lines.values())}, median {statistics.median(lines.values()):.0f}")
    print(f"files under {SMALL} lines with one importer: {len(small)}")
    print(f"imports between packages: {sum(pairs.values())} of files, {len(pairs)} pairs of packages")


def frames_of(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """Yield file and function of each call of graphcore's that is under way, the innermost first."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            yield str(path.relative_to(ROOT)), frame.f_code.co_name
        frame = frame.f_back


class Hops:
    """Notes the calls that are under way at the first product, the first packing, and the read before it.

    The product's are those of the engine's thread, after those of the call that put the request into its queue.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.product: list[tuple[str, str]] = []
        self.packing: list[tuple[str, str]] = []
        self.read: list[tuple[str, str]] = []

    def watch(self, frame: FrameType, event: str, called: object) -> None:
        """Look at one call; for `sys.setprofile`."""
        if event == "c_call" and not self.packing and getattr(called, "__name__", "") in ("preadv", "readinto"):
            self.read = list(frames_of(frame))[::-1]
        if event != "call":
            return
        place = (frame.f_code.co_filename.removeprefix(f"{ROOT}/"), frame.f_code.co_name)
        if not self.packing and place[0].startswith("kernels/") and place[1] == "pack_rows":
            self.packing = list(frames_of(frame))[::-1]
        if place == ("engine/queue.py", "submit"):
            self.asked = list(frames_of(frame))[::-1]
        if not self.product and place == ("nn/linear.py", "forward"):
            self.product = [*self.asked, *list(frames_of(frame))[::-1]]

    def show(self) -> None:
        """Print what was seen."""
        _show("from the command to the first product", self.product)
        shared = sum(1 for read, pack in zip(self.read, self.packing, strict=False) if read == pack)
        way = [*self.read[: shared - 2 : -1], *self.packing[shared:]]
        _show("from a file's bytes to the C++ that packs them", way)


def _show(title: str, calls: Sequence[tuple[str, str]]) -> None:
    print(f"{title}: {len(calls)} calls, {len({path for path, _ in calls})} files")
    for path, name in calls:
        print(f"    {path} {name}")


def main() -> None:
    """Count; run the command whose words are given, if any are, and print its hops."""
    show_layout()
    if len(sys.argv) == 1:
        return
    hops = Hops()
    sys.setprofile(hops.watch)
    threading.setprofile(hops.watch)
    try:
        run_command()
    finally:  # a command ends by SystemExit
        sys.setprofile(None)
        threading.setprofile(None)
        hops.show()


if __name__ == "__main__":
    main()
