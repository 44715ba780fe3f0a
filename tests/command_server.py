"""A process that has imported graphcore, and forks for every command line that it is asked to run.

Importing torch is most of what a short run takes. Each command still runs in a process of its own, in the folder, with
the environment and over the files that it was given, and ends as the interpreter ends. Argument: a socket's number.
"""

import json
import os
import socket
import sys

import graphcore.engine.engine  # noqa: F401 - brings torch, and what else a run imports
from graphcore.tasks.main import main

REQUEST_NBYTES = 1 << 17  # of a message, at most: arguments and environment


def serve(asking: socket.socket) -> list[str]:
    """Answer each request with the exit status; return in the child, with the arguments, when one is to be run."""
    while True:
        message, files, _, _ = socket.recv_fds(asking, REQUEST_NBYTES, 3)
        if not message:
            sys.exit(0)
        child = os.fork()
        if child == 0:
            request = json.loads(message)
            asking.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["environment"])
            return request["arguments"]
        for file in files:
            os.close(file)
        _, status = os.waitpid(child, 0)
        asking.send(str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    arguments = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = ["graphcore", *arguments]
    main()
