"""task.output: a JSONL file that gets each answer as a line as soon as it is ready.

    {"line": 7, "id": "a", "prompt": "Why is ...", "text": "Because ...", "token_ids": [...], ...}

A line begins with the request it answers, so that a second run finds what is there and goes on behind it. A run that
is killed leaves at most its last line unfinished; the next run takes that away.
"""

import fcntl
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graphcore.engine.sequence import Generation
from graphcore.errors import ConfigError
from graphcore.tasks.output import OutputError
from graphcore.tasks.request_lines import KEYS, RequestLine

BEGINNING = b'{"line": '


class AnswerFile:
    """The answers that are there, and a place for those that are not.

    Attributes:
        answered: keys of requests whose answers were there.
        made: number of answers written since.

    Raises:
        ConfigError: the file holds something else, answers other requests, or another process writes it.
        OutputError: it cannot be read or written.
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
        """Add an answer; it is in the file when this returns.

        Raises:
            OutputError: the disk is full, or gone.
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
        """Refuse a device or a pipe, in which nothing can be found again."""
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
            "it goes on behind the last answer"
        )

    def _read(self, lines: Sequence[RequestLine]) -> set[str | int]:
        """Return the keys of the requests that the file answers, and leave it with whole lines only."""
        self._file.seek(0)
        if not BEGINNING.startswith(self._file.read(len(BEGINNING))):  # whatever it is, it may be large
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
        key = json.dumps(entry["id"]) if "id" in entry else entry["line"]
        line = requests.get(key)
        if line is not None and {name: entry[name] for name in KEYS if name in entry} != line.fields:
            raise ConfigError(
                f"{self.path}:{number} answers another request than {line.where}, which has the same "
                f"{'id' if 'id' in entry else 'number'}; choose another task.output"
            )
        return key

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(f"{self.path}:{number}: not a line of answers; choose another task.output, or move the file")


def _entry(raw: bytes) -> dict[str, Any] | None:
    """Return a line that this module wrote; None for any other."""
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    is_ours = raw.startswith(BEGINNING) and isinstance(entry, dict) and {"line", "text"} <= entry.keys()
    return entry if is_ours else None


def _is_whole(raw: bytes) -> bool:
    """Return whether only the line break is missing."""
    return _entry(raw) is not None
