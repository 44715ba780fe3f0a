"""A Hugging Face Hub on localhost, as much of it as huggingface_hub asks for when it downloads a repository."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

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
