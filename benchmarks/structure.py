"""Counts files, imports and calls of the code; with a command line as arguments it also runs and traces the command.

Files and lines come from the sources, with the files that a review may ask about: long ones, and small ones with one
importer. Imports between packages come from the import statements. From running a command,
`python -m benchmarks.structure model=smollm2 max_new_tokens=1`, come the Python calls of graphcore on the stack when
the first matrix product begins, and those between a read from a file and the C++ that packs its bytes; the files that
load a model; and the classes of engine and KV cache that a request passes through.
"""

import ast
import re
import statistics
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType

import graphcore
from graphcore.cli.main import main as run_command

ROOT = Path(graphcore.__file__).parent
SMALL, LONG = 60, 300  # lines below which a file with one importer, and from which any file, is worth a question
SAMPLING_SETTING = "min_p"  # a setting that stands for the next one
LOADING = ("engine/", "planning/")  # folders whose files are counted on the way to a loaded model
MET = ("graphcore.engine.", "graphcore.kvcache.", "graphcore.sampling_params")  # modules whose classes are counted


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
    long = [name for name in modules if lines[name] >= LONG]
    print(f"files under {SMALL} lines with one importer: {len(small)}", *small, sep="\n    ")
    print(f"files of {LONG} lines and more: {len(long)}", *(f"{name} {lines[name]}" for name in long), sep="\n    ")
    naming = [name for name, text in modules.items() if re.search(rf"\b{SAMPLING_SETTING}\b", text)]
    rewrites = sum(len(re.findall(r"\breplace\((?:self\.)?(?:choices|runtime)\b", text)) for text in modules.values())
    print(f"files that name {SAMPLING_SETTING}: {len(naming)}", *naming, sep="\n    ")
    print(f"rewrites of the runtime configuration: {rewrites}")
    print(f"imports between packages: {sum(pairs.values())} of files, {len(pairs)} pairs of packages")


def frames_of(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """Yield file and function of each call of graphcore's that is under way, the innermost first.

    Comprehensions, which Python 3.12 calls no more, are left out.
    """
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and not frame.f_code.co_name.startswith("<"):
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
        self.loading: set[str] = set()
        self.classes: set[str] = set()

    def watch(self, frame: FrameType, event: str, called: object) -> None:
        """Look at one call; for `sys.setprofile`."""
        if event == "c_call" and not self.packing and getattr(called, "__name__", "") in ("preadv", "readinto"):
            self.read = list(frames_of(frame))[::-1]
        if event != "call":
            return
        place = (frame.f_code.co_filename.removeprefix(f"{ROOT}/"), frame.f_code.co_name)
        if self.asked:
            self._note_class(frame)
        elif place[0].startswith(LOADING) and frame.f_code.co_flags & CO_OPTIMIZED:  # no body of a module or a class
            self.loading.add(place[0])
        if not self.packing and place[0].startswith("kernels/") and place[1] == "pack_rows":
            self.packing = list(frames_of(frame))[::-1]
        if place == ("engine/queue.py", "submit"):
            self.asked = list(frames_of(frame))[::-1]
        if not self.product and place == ("nn/linear.py", "forward"):
            self.product = [*self.asked, *list(frames_of(frame))[::-1]]

    def _note_class(self, frame: FrameType) -> None:
        """Note the class of the object whose method runs, if it is of a module in `MET`."""
        own = type(frame.f_locals.get("self"))
        if own.__module__.startswith(MET):
            self.classes.add(f"{own.__module__}.{own.__qualname__}")

    def show(self) -> None:
        """Print what was seen."""
        print(
            f"files of {' and '.join(LOADING)} that load a model: {len(self.loading)}",
            *sorted(self.loading),
            sep="\n    ",
        )
        print(f"classes that a request meets: {len(self.classes)}", *sorted(self.classes), sep="\n    ")
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
