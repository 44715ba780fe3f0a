"""Settings that the documents for newcomers name exist."""

import re
from pathlib import Path

from graphcore.cli.conf_comments import groups, option_comment, top_level_keys
from graphcore.config.conf_folder import group_options

ROOT = Path(__file__).parents[3]
DOCUMENTS = ("README.md", "docs/coming_from.md", "docs/choosing.md", "docs/formats.md", "docs/limits.md")
SETTING = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)?)=(?!=)")
ARE_NONE = {"group", "key", "temperature"}  # what users fill in, and an argument in Python


def test_documents_for_newcomers_name_keys_that_exist() -> None:
    options = group_options()
    known = {*options, *(key.key for key in top_level_keys())}
    for group in groups():
        for option in options[group.key]:
            known |= {f"{group.key}.{key.key}" for key in option_comment(group.key, option).keys}
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        spans = re.findall(r"`[^`\n]+`|^(?:graphcore|python run\.py) .*", text, re.MULTILINE)
        named = {key for span in spans for key in SETTING.findall(span)} - ARE_NONE
        assert named, name
        assert not named - known, f"{name}: {sorted(named - known)}"
