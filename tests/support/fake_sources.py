"""Where a checkpoint's bytes come from: made up, slow or broken on purpose, and a Hub on localhost."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

import torch
from torch import Tensor

from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config_from_json import parse_model_config
from graphcore.arch.registry import architecture_of
from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.checkpoint.streamed_file import ByteSource
from graphcore.nn.decoder import Decoder

# Bytes that a streamed checkpoint is read from, made up, slow or broken on purpose.


def nothing(offset: int, nbytes: int) -> None:
    """Let a read through."""


class FakeSource:
    """A `ByteSource` over bytes in memory.

    Args:
        path: what it claims to be.
        content: [size] uint8.
        on_read: called in the reading thread before each read, with its offset and size; may wait or raise.
        lacking: bytes by which each read falls short.
        is_direct: reads must be aligned.
    """

    def __init__(
        self,
        path: Path,
        content: Tensor,
        on_read: Callable[[int, int], None] = nothing,
        lacking: int = 0,
        is_direct: bool = True,
    ) -> None:
        self.path = path
        self.content = content
        self.size = content.nbytes
        self.alignment = 4096
        self.is_direct = is_direct
        self.why_buffered = "it is none"
        self.on_read = on_read
        self.lacking = lacking
        self.reads: list[tuple[int, int]] = []
        self.checks = 0
        self.change: Exception | None = None
        self.is_closed = False

    def read_into(self, space: Tensor, offset: int, nbytes: int) -> int:
        assert not self.is_closed, "read after it was closed"
        alignment = self.alignment if self.is_direct else 1
        assert offset % alignment == 0, f"offset {offset} is not aligned"
        assert nbytes % alignment == 0, f"{nbytes} bytes are not aligned"
        assert space.data_ptr() % alignment == 0, "memory is not aligned"
        self.reads.append((offset, nbytes))
        self.on_read(offset, nbytes)
        count = min(nbytes, self.size - offset) - self.lacking
        space[:count] = self.content[offset : offset + count]
        return count

    def check_unchanged(self) -> None:
        self.checks += 1
        if self.change is not None:
            raise self.change

    def close(self) -> None:
        self.is_closed = True


class Wrapped:
    """Another `ByteSource`, with something that happens before each of its reads.

    Args:
        on_read: called in the reading thread with the number of the read, from 0; may wait or raise.
        lacking: bytes by which each read falls short.
    """

    def __init__(
        self, inner: ByteSource, on_read: Callable[[int], None] = lambda number: None, lacking: int = 0
    ) -> None:
        self.inner = inner
        self.on_read = on_read
        self.lacking = lacking
        self.count = 0
        self.path, self.size, self.alignment = inner.path, inner.size, inner.alignment
        self.is_direct, self.why_buffered = inner.is_direct, inner.why_buffered

    def read_into(self, space: Tensor, offset: int, nbytes: int) -> int:
        number = self.count
        self.count += 1
        self.on_read(number)
        return self.inner.read_into(space, offset, nbytes) - self.lacking

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()

    def close(self) -> None:
        self.inner.close()


def numbered_bytes(nbytes: int, seed: int = 0) -> Tensor:
    """Return random bytes, uint8 [nbytes]."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# A checkpoint that is a dict of tensors, and a small model of each kind to match with it.

ENCODINGS = {dtype: name for name, dtype in DENSE_DTYPES.items()}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 20, "num_attention_heads": 2}
LLAMA = {**SIZES, "model_type": "llama", "num_key_value_heads": 1, "tie_word_embeddings": False}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12, "vocab_size": 20}


class FakeCheckpoint(Checkpoint):
    """Tensors by name; `packed` says what type and shape the uint8 tensors of those names have."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        layout: str = "hf",
        packed: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    ) -> None:
        self.source = "fake.safetensors"
        self.layout = layout
        self.held = dict(tensors)
        packed = packed or {}
        infos = {}
        for name, tensor in self.held.items():
            encoding, shape = packed.get(name, (ENCODINGS[tensor.dtype], tuple(tensor.shape)))
            infos[name] = TensorInfo(name, shape, encoding, None, 0, tensor.nbytes)
        self.tensors = MappingProxyType(infos)

    def spans(self, name: str) -> tuple[FileSpan, ...]:
        self.find(name)
        return ()

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        self.find(name)
        return self.held[name].clone()


def config_of(raw: dict, **changes: object) -> ModelConfig:
    return parse_model_config({**raw, **changes}, "config.json")


def meta_decoder(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    with torch.device("meta"):
        return Decoder(architecture_of(config).spec(config), dtype)


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of the decoder's weights, by name."""
    groups = meta_decoder(config).groups()
    return {prefix + name: tuple(t.shape) for prefix, module in groups for name, t in module.named_buffers()}


def stored_tensors(config: ModelConfig, prefix: str = "model.", seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random tensors under Hugging Face's names for a family that stores each weight as it is."""
    generator = torch.Generator().manual_seed(seed)
    names = {name: name if name == "lm_head.weight" else prefix + name for name in shapes_of(config)}
    return {names[name]: torch.randn(shape, generator=generator) for name, shape in shapes_of(config).items()}


def stored_gpt2(prefix: str = "", layers: int = 2, dim: int = 16) -> dict[str, torch.Tensor]:
    """Return random tensors under GPT-2's names and shapes, as transformers' GPT2Model holds them."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (20, dim), "wpe.weight": (12, dim)}
    for leaf in ("weight", "bias"):
        shapes[f"ln_f.{leaf}"] = (dim,)
        shapes.update({f"h.{i}.{norm}.{leaf}": (dim,) for i in range(layers) for norm in ("ln_1", "ln_2")})
    for module, inputs, outputs in (
        ("attn.c_attn", dim, 3 * dim),
        ("attn.c_proj", dim, dim),
        ("mlp.c_fc", dim, 4 * dim),
        ("mlp.c_proj", 4 * dim, dim),
    ):
        shapes.update({f"h.{i}.{module}.weight": (inputs, outputs) for i in range(layers)})
        shapes.update({f"h.{i}.{module}.bias": (outputs,) for i in range(layers)})
    generator = torch.Generator().manual_seed(0)
    return {prefix + name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


# A Hugging Face Hub on localhost, as much of it as huggingface_hub asks for when it downloads a repository.

LARGE = (".safetensors", ".gguf")  # what is kept by its sha256, as the Hub does with files beyond git
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Repositories by name, each {path: bytes}, or a refusal as (status, X-Error-Code)."""

    def __init__(self, repositories: dict[str, dict[str, bytes] | tuple[int, str]]) -> None:
        self.repositories = repositories
        self.downloaded: list[str] = []
        self.requests: list[str] = []
        self.nbytes = 0  # of files, in all answers
        self.commits = {"main": COMMIT}
        self.is_closed = False
        self.gives_ranges = True
        self.damaged: set[str] = set()
        self.tokens: set[str | None] = set()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.is_closed = True
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        parts = [unquote(part) for part in path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        words = 1 if parts[0] in self.repositories else 2  # the oldest names have no organisation
        repo, rest = "/".join(parts[:words]), parts[words:]
        files = self.repositories.get(repo, (401, "RepoNotFound"))
        if isinstance(files, tuple):
            return files[0], {"X-Error-Code": files[1], "X-Error-Message": "refused"}, b"{}"
        commit = self.commits.get(rest[1], rest[1])
        if commit not in self.commits.values():
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if rest[0] == "revision":
            siblings = [{"rfilename": name} for name in files]
            return 200, {}, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()
        if rest[0] == "tree":
            tree = [{"type": "file", "path": name, "size": len(raw), "oid": "1"} for name, raw in files.items()]
            return 200, {}, json.dumps(tree).encode()
        name = "/".join(rest[2:])
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        if method == "GET":
            self.downloaded.append(name)
        hashed = hashlib.sha256 if name.endswith(LARGE) else hashlib.sha1
        etag = hashed(files[name]).hexdigest()
        if name in self.damaged:
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, b"!" + files[name][1:]
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, files[name]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if hub.is_closed:  # a connection from before
                    self.close_connection = True
                    return
                hub.tokens.add(self.headers.get("Authorization"))
                hub.requests.append(f"{self.command} {self.path}")
                status, headers, body = hub.answer(self.command, urlsplit(self.path).path)
                span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                if span is not None and status == 200 and hub.gives_ranges:
                    begin, end = int(span[1]), min(int(span[2] or len(body)) + 1, len(body))
                    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(body)}"
                    status, body = 206, body[begin:end]
                if "resolve" in self.path and self.command == "GET":
                    hub.nbytes += len(body)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler


@contextmanager
def hub_of(monkeypatch, repositories, cache):
    """A fake Hub with these repositories, in the place of the real one, and the library's cache in a folder."""
    from huggingface_hub import constants

    fake = FakeHub(repositories)
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    yield fake
    fake.close()


def share_weights(cache, entry, content):
    """A repository's weights as huggingface_hub 2 stores what comes by Xet: in one place for all repositories.

    Source: huggingface_hub, utils/_shared_blobs.py.
    """
    xet = hashlib.sha256(b"xet" + content).hexdigest()  # any hash but the sha256 of the content
    store = cache / "blobs" / xet[:2] / xet
    store.parent.mkdir(parents=True, exist_ok=True)
    (cache / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
    store.write_bytes(content)
    blob = cache / entry / "blobs" / hashlib.sha256(content).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.symlink_to(f"../../blobs/{xet[:2]}/{xet}")
    with store.with_name(f"{xet}.refs").open("a") as manifest:
        manifest.write(f"{entry}/blobs/{blob.name}\n")
    snapshot = cache / entry / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes(b"{}")
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")
    (cache / entry / "refs").mkdir()
    (cache / entry / "refs" / "main").write_text(COMMIT)
    return snapshot / "model.safetensors"
