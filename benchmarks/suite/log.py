"""What parts measure, as lines of JSON that are on the disk before the next measurement begins."""

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FILE_NAME = "measurements.jsonl"
Line = dict[str, Any]


@dataclass
class Measurement:
    """One row of the report; a later line of the same part and name takes its place.

    Attributes:
        unit: of `values`, such as "tokens/s".
        values: of the repeats.
        gb_per_second: 1e9 bytes/s that the median comes to, where bytes bound it.
        ceiling: name of what was measured in the same process and bounds it.
        ceiling_value: in the unit of the ceiling.
        share: of the ceiling.
        target: in words; empty without one.
        met: whether the target is; None without one.
        profile: what takes the time.
        settings: overrides that the engine was loaded with.
        details: everything else, for report.json.
    """

    name: str
    unit: str
    values: Sequence[float]
    gb_per_second: float | None = None
    ceiling: str = ""
    ceiling_value: float | None = None
    share: float | None = None
    target: str = ""
    met: bool | None = None
    profile: str = ""
    note: str = ""
    settings: Sequence[str] = ()
    details: Line = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def aim(self, text: str, met: bool) -> "Measurement":
        """Set the target, and whether it is met; return the measurement."""
        self.target, self.met = text, met
        return self

    def of_ceiling(self, name: str, value: float, reached: float) -> "Measurement":
        """Set the ceiling and the share of it that was reached; return the measurement."""
        self.ceiling, self.ceiling_value, self.share = name, value, reached / value
        return self


@dataclass(frozen=True)
class Log:
    """The file that lines are added to.

    Attributes:
        run: which run of the suite this is, as all of its lines say.
        is_dry: numbers mean nothing: tiny shapes on the CPU.
    """

    folder: Path
    run: str
    is_dry: bool
    part: str = ""

    def add(self, measurement: Measurement) -> None:
        spread = {
            "median": measurement.median,
            "min": min(measurement.values),
            "max": max(measurement.values),
            "repeats": len(measurement.values),
        }
        self.write({"measurement": {**asdict(measurement), "spread": spread}})

    def write(self, line: Line) -> None:
        """Append one line and wait until it is on the disk: the next measurement may end the process."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        whole = {"run": self.run, "part": self.part, "dry": self.is_dry, "at": now, **line}
        with (self.folder / FILE_NAME).open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_lines(folder: Path) -> list[Line]:
    """Return the lines of a folder; what a killed process left half written is left out."""
    path = folder / FILE_NAME
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines
