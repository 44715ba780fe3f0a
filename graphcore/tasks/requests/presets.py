"""Presets: system messages with a name, each in a file NAME.txt of the user's own folder, ~/.config/graphcore/presets.

system=@brief    the text of presets/brief.txt; in a chat likewise /system @brief
"""

from graphcore.config.user_path import xdg_folder
from graphcore.errors import ConfigError
from graphcore.registry import nearest
from graphcore.tasks.requests.text_input import LONGEST_PROMPT, read_file

MARK = "@"
ENDING = ".txt"


def system_text(written: str, where: str) -> str:
    """Return the system message: the text itself, or for "@NAME" the text of that preset.

    Args:
        where: text before it, for messages, such as "system=" or "/system ".

    Raises:
        ConfigError: there is no such preset, or its file cannot be read or is empty.
    """
    if not written.startswith(MARK):
        return written
    folder, name = xdg_folder("XDG_CONFIG_HOME", ".config") / "presets", written.removeprefix(MARK)
    try:
        known = sorted(file.stem for file in folder.iterdir() if file.suffix == ENDING)
    except OSError:  # no folder, or one that cannot be listed, has no presets
        known = []
    if name not in known:
        names = f"known: {', '.join(known)}" if known else f"there are none; write one into {folder / f'NAME{ENDING}'}"
        raise ConfigError(f"{where}{written}: unknown preset{nearest(name, known)}; {names}")
    file = folder / f"{name}{ENDING}"
    text = read_file(file, str(file), LONGEST_PROMPT).strip()
    if not text:
        raise ConfigError(f"{where}{written}: {file} is empty; write a system message into it")
    return text
