"""A hook of mkdocs: gives the site the pages that stand outside docs/, and the settings as conf/ describes them.

Links stand in the files as GitHub resolves them; those that enter or leave docs/ are written anew for the site.
"""

import posixpath
import re
from collections.abc import Sequence
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from graphcore.cli.conf_comments import KeyComment, groups, option_comment, top_level_keys
from graphcore.config.conf_folder import group_options

ROOT = Path(__file__).parents[1]
OUTSIDE = {  # a file of the checkout: its page
    "README.md": "readme.md",  # mkdocs takes a README.md for the index
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "reference/settings.md", content=settings()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return the text with links between docs/ and the rest of the checkout as links between pages."""
    here = page.file.src_uri
    origin = next((source for source, name in OUTSIDE.items() if name == here), f"docs/{here}")

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[1]))
        inside = OUTSIDE.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(inside, posixpath.dirname(here) or '.')}"

    return LINK.sub(link, markdown)


def settings() -> str:
    """Return the reference of settings: what --help says, as one page."""
    chosen, options = groups(), group_options()
    parts = ["# Settings", "Written `group=option` and `key=value`; `graphcore --help` says the same in a terminal."]
    parts += ["## Keys", table("", top_level_keys())]
    for group in chosen:
        parts += [f"## {group.key}", f"{group.sentence}; `{group.key}={group.value}` unless set."]
        for option in options[group.key]:
            comment = option_comment(group.key, option)
            parts += [f"### {group.key}={option}", comment.sentence]
            parts += [table(f"{group.key}.", comment.keys)] if comment.keys else []
    return "\n\n".join(parts) + "\n"


def table(prefix: str, keys: Sequence[KeyComment]) -> str:
    """Return keys with their defaults and sentences as a table of Markdown."""
    rows = [f"| `{prefix}{key.key}` | {code(key.value)} | {escaped(key.sentence)} |" for key in keys]
    return "\n".join(["| key | default | |", "|---|---|---|", *rows])


def code(text: str) -> str:
    """Return a default as code; one that refers to another key is left out, as in --help."""
    return f"`{escaped(text)}`" if text and "$" not in text else ""


def escaped(text: str) -> str:
    """Return the text as the cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
