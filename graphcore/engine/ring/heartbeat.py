"""The heartbeat of an idle ring: a machine that has vanished is noticed although nobody asks for anything.

rank 0, every BEAT seconds without a message   beat -->  every other rank answers, within a limit
another rank                                   waits for the next message, within a limit
"""

import time
import weakref
from contextlib import suppress
from functools import partial

from graphcore.engine.queue import RequestQueue
from graphcore.engine.ring.lead import LeadBatching
from graphcore.errors import GraphcoreError
from graphcore.threads import start_thread

BEAT = 10.0  # seconds without a message after which rank 0 asks the others whether they are there


BEATS = 4  # in the time that another rank waits for a message, at least


def begin_heartbeat(queue: RequestQueue, seconds: float) -> None:
    """Send a heartbeat while a queue is idle, in a thread that ends when the queue is closed, fails or is freed."""
    start_thread(partial(_beat_for, weakref.ref(queue), seconds), "graphcore-heartbeat")


def _beat_for(owner: "weakref.ref[RequestQueue]", seconds: float) -> None:
    while True:
        time.sleep(seconds)
        queue = owner()
        if queue is None or queue.is_closed or queue.failure is not None:
            return
        batching = queue.batching
        if isinstance(batching, LeadBatching) and batching.idle_seconds() >= seconds:
            with suppress(GraphcoreError):  # kept as the queue's failure, or the queue was closed meanwhile
                queue.run_alone("heartbeat", batching.beat, lends=False)
            queue.notice_failure()
        del queue, batching
