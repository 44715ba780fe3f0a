"""The headers of a repository's model, read by HTTP ranges before anything is downloaded.

A file of weights becomes a local stand-in: as long as the real one, with the bytes of its header, and a hole for the
rest. Checkpoint readers get names, shapes and offsets from it; nothing may read a tensor, but those of READ_WITH_CONFIG
and DESCRIPTIONS.
"""

import io
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from graphcore.checkpoint.file_bytes import file_identity
from graphcore.checkpoint.file_kind import MAX_SAFETENSORS_HEADER
from graphcore.checkpoint.gguf_header import parse_gguf_header
from graphcore.checkpoint.safetensors_file import read_safetensors_header
from graphcore.checkpoint.sources.hub import hub_errors_explained, request_listing
from graphcore.checkpoint.sources.repository_files import choose_files
from graphcore.checkpoint.sources.source import HubSource
from graphcore.errors import CheckpointError
from graphcore.progress import Progress

BLOCK = 256 * 1024  # bytes of one request; nearly all headers of safetensors files are shorter
CONFIGS = (
    *("config.json", "generation_config.json", "model.safetensors.index.json"),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json"),
)
# Tensors that belong to the config of a GGUF file.
READ_WITH_CONFIG = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
LONGEST_DESCRIPTION = 4096  # bytes; bitsandbytes writes about 200
DESCRIPTIONS = ".quant_state.bitsandbytes__"  # in the names of tensors with the shapes of bitsandbytes' weights

_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")


@dataclass(frozen=True)
class RemoteHeaders:
    """The stand-in of a repository's model.

    Attributes:
        path: local file or folder, to be opened as a checkpoint.
        read_nbytes: bytes that were read of the weights' files.
        nbytes: bytes of the weights' files.
    """

    path: Path
    read_nbytes: int
    nbytes: int


class RangeFile(io.RawIOBase):
    """A file of a repository, read from front to back by ranges, whose bytes also go to a local stand-in.

    Args:
        url: address of the file.
        place: path of the stand-in, which does not exist yet.

    Attributes:
        size: bytes of the file.
        read_nbytes: bytes that were read.
    """

    def __init__(self, url: str, place: Path) -> None:
        super().__init__()
        self.read_nbytes = 0
        self._url, self._position = url, 0
        self._front, self.size = self._request(0, BLOCK)
        place.parent.mkdir(parents=True, exist_ok=True)
        self._local = place.open("xb")
        self._local.truncate(self.size)
        self._keep(0, self._front)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into the buffer, and return their number; 0 at the end."""
        begin, wanted = self._position, min(len(buffer), self.size - self._position)
        found = self._front[begin : begin + wanted] or self.fetch(begin, wanted)
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def fetch(self, begin: int, nbytes: int) -> bytes:
        """Read bytes from anywhere in the file and keep them in the stand-in."""
        found = self._request(begin, nbytes)[0] if nbytes else b""
        self._keep(begin, found)
        return found

    def flush(self) -> None:
        """Write the bytes that were kept to the stand-in's file."""
        if not self._local.closed:
            self._local.flush()

    def close(self) -> None:
        """Close the stand-in."""
        self._local.close()
        super().close()

    def _keep(self, begin: int, found: bytes) -> None:
        self._local.seek(begin)
        self._local.write(found)
        self.read_nbytes += len(found)

    def _request(self, begin: int, nbytes: int) -> tuple[bytes, int]:
        """Return bytes of the file, and its size."""
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, and not marked as exports
            build_hf_headers,
            hf_raise_for_status,
            http_stream_backoff,
        )

        headers = {
            **build_hf_headers(),
            "Range": f"bytes={begin}-{begin + nbytes - 1}",
            "Accept-Encoding": "identity",
        }
        with http_stream_backoff("GET", self._url, headers=headers) as response:
            hf_raise_for_status(response)
            size = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if size is None:  # the whole file follows, which is not read
                raise CheckpointError(f"{self._url}: the server gives no parts of files; download the model first")
            return response.read(), int(size[1])


def fetch_headers(source: HubSource, folder: Path, report: Progress) -> RemoteHeaders:
    """Return the stand-in of a repository's model: its config, and its weights' headers; no weight is read.

    Args:
        source: repository, with an optional revision, and the model in it.
        folder: empty folder for the stand-in.
        report: callback for progress; see `fetch`.

    Raises:
        CheckpointNotFoundError: the repository, revision or model does not exist or is gated, or the Hub cannot be
            reached.
        CheckpointError: the source names several models, a header is damaged, or the server does not support ranges.
    """
    from huggingface_hub import hf_hub_url

    report("headers", None, 0, 0)
    with hub_errors_explained(source):
        listing = request_listing(source)
        files = choose_files(source, listing.names)
        urls = {
            name: hf_hub_url(source.repo, name, revision=listing.commit) for name in (*files.weights, *files.others)
        }
        for name in files.others:
            if Path(name).name in CONFIGS:
                _copy_whole(urls[name], folder / name)
        read, total = 0, 0
        for index, name in enumerate(files.weights):
            report("headers", None, index, len(files.weights))
            with RangeFile(urls[name], folder / name) as remote:
                _read_header(remote, folder / name)
                read, total = read + remote.read_nbytes, total + remote.size
    return RemoteHeaders(folder / files.opened, read, total)


def _copy_whole(url: str, place: Path) -> None:
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, and not marked as exports
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    response = get_session().get(url, headers=build_hf_headers())
    hf_raise_for_status(response)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(response.content)


def _read_descriptions(remote: RangeFile, place: Path) -> None:
    """Read the tensors that describe bitsandbytes' weights of four bits into the stand-in of a safetensors file."""
    remote.flush()
    for name, info in read_safetensors_header(place)[0].items():
        if DESCRIPTIONS in name:
            remote.fetch(info.offset, min(info.nbytes, LONGEST_DESCRIPTION))


def _read_header(remote: RangeFile, place: Path) -> None:
    """Read the header of a file of weights, and what belongs to it, into the stand-in."""
    if place.suffix.lower() != ".gguf":
        length = min(int.from_bytes(remote.read(8), "little"), MAX_SAFETENSORS_HEADER)
        remote.fetch(BLOCK, max(min(8 + length, remote.size) - BLOCK, 0))
        _read_descriptions(remote, place)
        return
    stream = io.BufferedReader(remote, BLOCK)
    header = parse_gguf_header(stream, place, file_identity(place))
    stream.detach()  # otherwise the stream would close the file too
    for tensor in header.tensors:
        if tensor.name in READ_WITH_CONFIG:
            begin = header.data_start + tensor.offset
            nbytes = 4 * prod(tensor.shape)  # float32
            remote.fetch(begin, min(nbytes, remote.size - begin))
