"""The small models that are asked, made once in the work folder.

The modules of tests/ that make them are found by name: they are not typed, and not installed.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from filelock import FileLock

TESTS = Path(__file__).parents[2] / "tests"
GOLDEN = TESTS / "golden" / "tiny"
VOCAB = 96


def helper(name: str) -> Any:
    """Return a module of tests/."""
    return import_module(name)


def families() -> list[str]:
    """Return the names of families that transformers builds."""
    return list(helper("support.tiny_models").BUILDERS)


def architectures() -> list[str]:
    """Return one name of each architecture."""
    return list(helper("support.tiny_models").ARCHITECTURES)


FILES: dict[str, Callable[[Path], object]] = {
    "llama_wide.gguf": lambda path: _llama_file(path, "llama", "llama"),
    "mistral_wide.gguf": lambda path: _llama_file(path, "mistral", "llama"),
    "qwen3_wide.gguf": lambda path: _llama_file(path, "qwen3", "qwen3"),
    "qwen3_moe.gguf": lambda path: _files(
        "support.files.qwen_moe_files", lambda m: m.write_gguf(path, m.build(), None, False)
    ),
    "qwen3_5.gguf": lambda path: _files(
        "support.files.qwen_delta_files", lambda m: m.write_gguf(path, "qwen3_5", m.build("qwen3_5"))
    ),
    "gpt2_q4_k.gguf": lambda path: _gpt_file(path, "Q4_K"),
    "gpt2_mxfp4.gguf": lambda path: _gpt_file(path, "MXFP4"),
}


def checkpoint(name: str, folder: Path) -> Path:
    """Return a model's folder or file, which is made at its first use.

    Args:
        name: family of tiny_models, of fallback_models behind "fallback_", name in `FILES`, "chat", or what
            tests/golden/tiny has.
        folder: work folder.
    """
    if name.startswith("golden_"):
        return GOLDEN / name.removeprefix("golden_")
    path = folder / "models" / name
    path.parent.mkdir(exist_ok=True)
    with FileLock(folder / f"{name}.lock"):  # another process may be making it
        if not path.exists():
            _make(name, path)
    return path


def _make(name: str, path: Path) -> None:
    if name in FILES:
        FILES[name](path)
    elif name == "chat":
        helper("support.chat_folders").save_chat_folder(path)
    elif name.startswith("fallback_"):
        helper("support.fallback_models").save_fallback(name.removeprefix("fallback_"), path)
    else:
        helper("support.tiny_models").save_tiny(name, path)


def _files(module: str, write: Callable[[Any], object]) -> None:
    write(helper(module))


def _llama_file(path: Path, name: str, architecture: str) -> None:
    files = helper("support.files.llama_files")  # heads of 32, which the coded formats of keys and values need
    files.write_gguf(path, files.build(name, head_dim=32), architecture)


def _gpt_file(path: Path, kind: str) -> None:
    files = helper("support.files.gpt_files")
    matrices = [name for name in files.CONSUMERS if name not in files.OUTSIDE]
    files.small_file(dict.fromkeys(matrices, files.Type[kind])).write(path)
