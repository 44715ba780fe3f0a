"""A queue without a thread: a test does its work, one pass or job at a time."""

import torch

from graphcore.engine.queue import RequestQueue


class SteppedQueue(RequestQueue):
    """A queue whose work is done by `step`."""

    def _start(self) -> None:
        """Start no thread."""

    @torch.inference_mode()
    def step(self) -> bool:
        """Do the next work as the thread does; return False if there is none."""
        self.end_overdue()
        with self.changes:
            work = self.next_work()
        if work is not None:
            work()
        return work is not None
