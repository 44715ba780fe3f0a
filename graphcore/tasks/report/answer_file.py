"""The file of task.output: JSONL, to which each answer is appended as soon as it is ready.

    {"line": 7, "id": "a", "prompt": "Why is ...", "text": "Because ...", "token_ids": [...], ...}

A line begins with its request, so that a second run finds the answers so far and continues after them. A run that is
killed leaves at most its last line unfinished; the next run removes that line.
"""

import fcntl
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graphcore.engine.output import Generation
from graphcore.errors import ConfigError
from graphcore.tasks.report.output_files import OutputError
from graphcore.tasks.requests.request_lines import KEYS, RequestLine

BEGINNING = b'{"line": '


class AnswerFile:
    """A JSONL file of answers, opened to append those that it lacks.

    Attributes:
        answered: keys of the requests whose answers were in the file when it was opened.
        made: number of answers written since.

    Raises:
        ConfigError: the file holds something else or answers other requests, or another process writes to it.
        OutputError: the file cannot be read or written.
    """

    def __init__(self, path: Path, lines: Sequence[RequestLine]) -> None:
        self.path = path
        self.made = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            try:
                self._check_regular()
                self._lock()
                self.answered = self._read(lines)
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, line: RequestLine, answer: Generation) -> None:
        """Append an answer and flush it to the file.

        Raises:
            OutputError: the disk is full, or was removed.
        """
        timings = answer.timings
        entry = {
            "line": line.number,
            **line.fields,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "prompt_tokens": timings.prompt_tokens,
            "new_tokens": timings.new_tokens,
            "logprobs": answer.logprobs,
        }
        raw = json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        try:
            while raw:
                raw = raw[self._file.write(raw) :]
        except OSError as error:
            raise self._failure(error) from error
        self.made += 1

    def _check_regular(self) -> None:
        """Refuse a device or a pipe, whose earlier answers could not be read."""
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise ConfigError(
                f"task.output={self.path} is no regular file; choose another, or leave it out to have answers printed"
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"task.output={self.path} is being written by another process; wait, or choose another"
            ) from error

    def _failure(self, error: OSError) -> OutputError:
        return OutputError(
            f"task.output={self.path} cannot be written ({error.strerror}); mend that and run the same command again: "
            "it continues after the last answer"
        )

    def _read(self, lines: Sequence[RequestLine]) -> set[str | int]:
        """Remove an unfinished last line and return the keys of the requests that the file answers."""
        self._file.seek(0)
        if not BEGINNING.startswith(self._file.read(len(BEGINNING))):  # some other file, which may be large
            raise self._foreign(1)
        self._file.seek(0)
        *whole, rest = self._file.read().split(b"\n")
        requests = {line.key: line for line in lines}
        answered = {self._key(raw, number, requests) for number, raw in enumerate(whole, start=1)}
        if _is_whole(rest):
            answered.add(self._key(rest, len(whole) + 1, requests))
            self._file.write(b"\n")
        elif rest.startswith(BEGINNING) or BEGINNING.startswith(rest):
            os.ftruncate(self._file.fileno(), self._file.tell() - len(rest))
        else:
            raise self._foreign(len(whole) + 1)
        return answered & requests.keys()

    def _key(self, raw: bytes, number: int, requests: dict[str | int, RequestLine]) -> str | int:
        entry = _entry(raw)
        if entry is None:
            raise self._foreign(number)
        has_id = entry.get("id") is not None
        key = json.dumps(entry["id"]) if has_id else entry["line"]
        line = requests.get(key)
        if line is not None and {name: entry[name] for name in KEYS if name in entry} != line.fields:
            raise ConfigError(
                f"{self.path}:{number} answers another request than {line.where}, which has the same "
                f"{'id' if has_id else 'number'}; choose another task.output"
            )
        return key

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(f"{self.path}:{number}: not a line of answers; choose another task.output, or move the file")


def _entry(raw: bytes) -> dict[str, Any] | None:
    """Return the object of a line that this module wrote; None for any other line."""
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    is_ours = raw.startswith(BEGINNING) and isinstance(entry, dict) and {"line", "text"} <= entry.keys()
    return entry if is_ours else None


def _is_whole(raw: bytes) -> bool:
    """Return whether a line lacks nothing but its line break."""
    return _entry(raw) is not None
