"""Hugging Face repositories, through huggingface_hub: its cache layout, its resumed downloads, its HF_TOKEN."""

import contextlib
import glob
import re
from collections.abc import Iterator
from pathlib import Path

from graphcore.checkpoint.quoted import quoted
from graphcore.checkpoint.sources.cached_file import writable
from graphcore.checkpoint.sources.hub_progress import reporting_bars
from graphcore.checkpoint.sources.source import HubSource
from graphcore.errors import CheckpointNotFoundError
from graphcore.progress import Progress

MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
OTHER_FILES = ["*/*", "consolidated*"]  # subfolders and Mistral's second copy hold the same weights again
LONGEST_REASON = 200  # characters of the library's own words in a message

_SHARD = re.compile(r"(.+-)(\d{5})(-of-(\d{5})\.gguf)")


def fetch_hub(source: HubSource, cache_dir: Path, report: Progress) -> Path:
    """Return the repository's local snapshot folder, or its one named file; what is cached needs no network.

    Of a sharded GGUF every shard is fetched, and the path of the named one returned.

    Raises:
        CheckpointNotFoundError: there is no such repository, revision or file, it is gated, or the Hub is out of
            reach and the cache lacks it.
        CheckpointError: the disk is full, or the cache cannot be written.
    """
    with writable(cache_dir), _explained(source):
        cache_dir.mkdir(parents=True, exist_ok=True)
        folder = _download(source, cache_dir, report)
    if source.file is None and not (folder / "config.json").is_file():
        action = f"if it holds GGUF files, name one: hf:{source.repo}/model.gguf"
        raise _failure(source, "has no config.json", action)
    wanted = [] if source.file is None else shards_of(source.file)
    missing = [file for file in wanted if not (folder / file).is_file()]
    if missing:
        raise _failure(source, f"has no file {quoted(missing[0])}", "check the path after the repository")
    return folder / source.file if source.file else folder


def shards_of(file: str) -> list[str]:
    """Return the names of all shards of a GGUF file, in order; a whole file is its own only shard."""
    match = _SHARD.fullmatch(file)
    if match is None:
        return [file]
    prefix, _, suffix, count = match.groups()
    return [f"{prefix}{index:05}{suffix}" for index in range(1, int(count) + 1)]


def _download(source: HubSource, cache_dir: Path, report: Progress) -> Path:
    import huggingface_hub

    # One call for both kinds: it asks for the repository first, so a missing network shows at once, not per file.
    files = None if source.file is None else [glob.escape(file) for file in shards_of(source.file)]
    folder = huggingface_hub.snapshot_download(
        source.repo,
        revision=source.revision,
        cache_dir=cache_dir,
        allow_patterns=files or MODEL_FILES,
        ignore_patterns=None if files else OTHER_FILES,
        tqdm_class=reporting_bars(report),
    )
    return Path(folder)


@contextlib.contextmanager
def _explained(source: HubSource) -> Iterator[None]:
    """Turn the library's errors into one line that says what to do; its order is from special to general."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        action = f"accept its terms on https://huggingface.co/{source.repo}, then set HF_TOKEN"
        raise _failure(source, "is gated", action) from error
    except errors.RepositoryNotFoundError as error:
        raise _failure(source, "is not there, or is private", "check the name, or set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise _failure(source, f"has no revision '{source.revision}'", "check the name after @") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError, TimeoutError) as error:
        action = "check the network (HF_HUB_OFFLINE, HF_ENDPOINT), or give a local path"
        raise _failure(source, "cannot be reached, and the cache does not hold it whole", action) from error
    except (errors.HTTPError, errors.EntryNotFoundError, ValueError, RuntimeError) as error:  # type: ignore[attr-defined]  # of its HTTP library
        raise _failure(source, f"cannot be fetched ({_one_line(error)})", "try again: a download resumes") from error


def _failure(source: HubSource, found: str, action: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"hf:{source.repo} {found}; {action}")


def _one_line(error: BaseException) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= LONGEST_REASON else f"{said[:LONGEST_REASON]}..."
