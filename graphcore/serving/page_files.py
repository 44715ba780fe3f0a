"""Static files of the web page at `/`, served from the package without a build step or external resources.

The headers let the page load its own scripts and styles and ask its own server, and nothing else, so that no answer of
a model can run a script, load a picture or send what it reads to another place.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath

FOLDER = files("graphcore.serving") / "page"
PREFIX = "/page/"  # path of the files on a server, but for the page itself
INDEX = "index.html"
MEDIA_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",  # the icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # text never becomes markup or a script
        "trusted-types 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # browsers ask again, with the ETag: a newer graphcore has newer files
}


@dataclass(frozen=True)
class PageFile:
    """A file of the page.

    Attributes:
        content: its bytes.
        media_type: value of Content-Type.
        etag: value of ETag, which changes with the content.
    """

    content: bytes
    media_type: str
    etag: str


def page_text(name: str) -> str:
    """Return the text of a file of the page, by its path in the folder, such as "engine/lanes.js"."""
    return FOLDER.joinpath(*PurePosixPath(name).parts).read_text(encoding="utf-8")


def is_page_path(path: str) -> bool:
    """Return whether a server's path is that of the page or of one of its files."""
    return path == "/" or path.startswith(PREFIX)


def page_files() -> dict[str, PageFile]:
    """Return every file of the page by its path on a server: "/" is the page itself."""
    found: dict[str, PageFile] = {}
    waiting = [(FOLDER, "")]
    while waiting:
        folder, before = waiting.pop()
        for entry in folder.iterdir():
            if entry.is_dir():
                waiting.append((entry, f"{before}{entry.name}/"))
            elif (kind := MEDIA_TYPES.get(PurePosixPath(entry.name).suffix)) is not None:
                content = entry.read_bytes()
                path = "/" if before + entry.name == INDEX else f"{PREFIX}{before}{entry.name}"
                found[path] = PageFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
