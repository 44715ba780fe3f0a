"""huggingface_hub's progress bars, turned into calls: nothing is drawn."""

import threading
from typing import Any

from graphcore.progress import Progress


def reporting_bars(report: Progress) -> type[Any]:
    """Return a tqdm class that draws nothing and calls `report("download", None, bytes done, bytes known of so far)`.

    The library makes one bar per file, or one for all files, from several threads; bars that count files, and the
    second byte counter that some versions keep of the same download, are silent.
    """
    from huggingface_hub.utils.tqdm import tqdm

    lock = threading.Lock()

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.is_reporting = kwargs.get("unit") == "B" and not str(kwargs.get("name")).endswith(".transfer")
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]  # the library's
            self.nbytes_done = int(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            """Count `n` more bytes and report them."""
            if self.is_reporting:
                with lock:
                    self.nbytes_done += int(n or 0)
                    report("download", None, self.nbytes_done, int(self.total or 0))

    return ReportingBar
