"""Builds the C++ kernels while pip installs, so that running them needs no compiler.

The libraries are written beside the sources, where git ignores them and an editable install finds them. A wheel
contains them and has the tag of its platform. If they cannot be built, pip installs graphcore without them, and the
kernels are built at their first use.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from sysconfig import get_platform
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ZIGLANG = "ziglang==0.17.1"  # the version that the kernels' tests ran with
FOLDER = "graphcore/kernels/cpu/built"


def load_compiler(root: Path) -> ModuleType:
    """Return graphcore/compiler.py as a single module; graphcore itself needs packages that are not installed yet."""
    spec = spec_from_file_location("graphcore_compiler", root / "graphcore" / "compiler.py")
    assert spec is not None, "graphcore/compiler.py is a part of the sources"
    assert spec.loader is not None, "a .py file has a loader"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds a library of the kernels for each kind of processor that the platform may have."""

    def dependencies(self) -> list[str]:
        """Return the package of a compiler if no compiler on the machine works and the package supports the machine."""
        compiler = load_compiler(Path(self.root))
        needs_one = compiler.targets_here() and compiler.find_own_compiler() is None
        return [ZIGLANG] if needs_one else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the libraries and tell hatchling where they are. `version` is "editable" or "standard"."""
        compiler = load_compiler(Path(self.root))
        if not compiler.targets_here():
            return
        chosen = compiler.find_own_compiler() or compiler.find_ziglang()
        if chosen is None:
            self.app.display_warning("graphcore: no C++ compiler works here; its kernels are built at their first use")
            return
        try:
            libraries = self.build(compiler, chosen)
        except (compiler.CompilerError, OSError) as error:
            self.app.display_warning(f"graphcore: {error}; its kernels are built at their first use")
            return
        if version != "editable":
            build_data["force_include"].update({str(path): f"{FOLDER}/{path.name}" for path in libraries})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{get_platform().replace('-', '_').replace('.', '_')}"

    def build(self, compiler: ModuleType, chosen: Any) -> list[Path]:
        """Build the libraries that do not exist yet, and return the paths of all."""
        sources = Path(self.root) / "graphcore" / "kernels" / "cpu" / "native"
        folder = Path(self.root) / FOLDER
        folder.mkdir(exist_ok=True)
        targets = {
            folder / compiler.prebuilt_name(sources, one): chosen.flags_for(one) for one in compiler.targets_here()
        }
        missing = {path: flags for path, flags in targets.items() if not path.exists()}
        if missing:
            # `pip install -v` shows this; without -v pip shows the output of a build that fails, and else a spinner.
            self.app.display_waiting(
                f"graphcore: building the C++ kernels for {len(missing)} kinds of processors, for a minute or more"
            )
            compiler.build_libraries(chosen, sources, missing)
        for path in folder.glob("kernels-*"):
            if path not in targets:
                path.unlink()  # built from older sources
        return list(targets)
