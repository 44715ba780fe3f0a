"""Headers of files that only some ranks have: each rank needs the files of its own layers, and knows all tensors."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphcore.checkpoint.absent_files import Elsewhere, absent_files, headers_here
from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.sources.fetch import fetch
from graphcore.checkpoint.sources.source import LocalSource, parse_source
from graphcore.config.settings import Settings
from graphcore.errors import CheckpointNotFoundError
from graphcore.parallel.process_group import ProcessGroup


def headers_elsewhere(settings: Settings, ranks: ProcessGroup) -> Elsewhere:
    """Return the tensors of the checkpoint's files that are not on this rank, from ranks that have them.

    Raises:
        CheckpointNotFoundError: no rank has a file.
        CheckpointError: a file is damaged.
    """
    path = _local_path(settings)
    absent = [] if path is None else absent_files(path)
    wanted = sorted({name for names in ranks.all_say(absent) for name in names})
    if not wanted:
        return {}
    here = {} if path is None else headers_here(path, wanted)
    found: dict[str, list[dict[str, Any]]] = {}
    for said in ranks.all_say({name: [_plain(info) for info in infos] for name, infos in here.items()}):
        found = {**said, **found}
    nowhere = [name for name in absent if name not in found]
    if nowhere:
        raise CheckpointNotFoundError(
            f"{path}: {nowhere[0]} is missing on every rank ({len(nowhere)} such files); put it on the machine that is "
            "to have its layers, or fetch the checkpoint again"
        )
    return {name: [_info(plain) for plain in found[name]] for name in absent}


def _local_path(settings: Settings) -> Path | None:
    source = parse_source(settings.model.checkpoint)
    return fetch(source, settings.cache_folder) if isinstance(source, LocalSource) else None


def _plain(info: TensorInfo) -> dict[str, Any]:
    return {**asdict(info), "file": None}


def _info(plain: dict[str, Any]) -> TensorInfo:
    return TensorInfo(**{**plain, "shape": tuple(plain["shape"])})
