"""Entry point of `graphcore` and run.py: signals end the command in one line even while its modules are imported."""

import os
import signal
from types import FrameType

from graphcore.processors import bound_spinning

UNTOUCHED = (signal.SIG_DFL, signal.default_int_handler)


def start(keeps_results: bool = False) -> None:
    """Import the command line and run it.

    Args:
        keeps_results: as for `main`; False for the installed command.

    While modules are imported there is nothing to clean up, so Ctrl-C, SIGTERM and SIGHUP end the process at once.
    Signals that are ignored, such as SIGHUP under nohup, stay ignored.
    """
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    taken = [number for number in ending if signal.getsignal(number) in UNTOUCHED]
    handlers = {number: signal.signal(number, _end_process) for number in taken}
    bound_spinning()
    from graphcore.cli.main import main

    for number, handler in handlers.items():
        signal.signal(number, handler)
    main(keeps_results=keeps_results)


def _end_process(number: int, _frame: FrameType | None) -> None:
    os.write(2, b"graphcore: interrupted\n")
    os._exit(128 + number)
