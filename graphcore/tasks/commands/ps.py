"""task=ps: list the servers of this user that run on this machine; it needs no torch."""

from dataclasses import dataclass
from datetime import datetime

from omegaconf import MISSING

from graphcore.config.byte_sizes import in_words
from graphcore.config.validate import PROMPT_KEYS, refuse_unused_settings
from graphcore.serving.running_servers import RunningServer, running_servers
from graphcore.tasks.report.text_columns import columns
from graphcore.tasks.task import Context, Record, Task


@dataclass
class PsSettings:
    """The keys of conf/task/ps.yaml."""

    name: str = MISSING


def run(context: Context, _task: PsSettings) -> Record:
    """Print the servers, oldest first."""
    refuse_unused_settings(context.settings, "ps", PROMPT_KEYS)
    found = running_servers()
    rows = [_row(one) for one in found]
    nothing = ["no server of yours runs on this machine; graphcore serve NAME starts one"]
    for line in columns(("MODEL", "ADDRESS", "PID", "SINCE", "MEMORY", "CONTEXT"), rows) if found else nothing:
        context.console.line(line)
    return {"servers": [record_of(one) for one in found]}


def _row(one: RunningServer) -> tuple[str, ...]:
    since = f"{datetime.fromtimestamp(one.since):%Y-%m-%d %H:%M:%S}"
    context = "loading" if one.is_loading else str(one.context_length or "-")
    return one.model, one.url, str(one.pid), since, in_words(one.memory_nbytes), context


def record_of(one: RunningServer) -> Record:
    """Return a server as JSON for result.json."""
    return {
        "model": one.model,
        "url": one.url,
        "pid": one.pid,
        "since": datetime.fromtimestamp(one.since).isoformat(timespec="seconds"),
        "memory_bytes": one.memory_nbytes,
        "loading": one.is_loading,
        "context_length": one.context_length,
    }


PS = Task("ps", PsSettings, run, needs_torch=False)
