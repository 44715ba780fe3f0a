"""One peer of compare.py in a process of its own: it loads once, then runs prefill and greedy decode as often as asked.

Run as `python peer_process.py NAME SOURCE THREADS CONTEXT`: says that it is ready with a line of JSON, then answers
each line "prompt_tokens new_tokens depth sequences" on standard input with another. What an engine itself prints goes
to standard error. SOURCE is a model file or folder; for graphcore a JSON list of its settings.
"""

import json
import os
import sys

from instruction_sets import apply_limit
from peer import Peer, find_peers


def main() -> None:
    name, path, threads, context = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    apply_limit()
    engine = find_peers(Peer)[name].load(path, int(threads), int(context))
    print(json.dumps({"weight_bytes": engine.weight_nbytes()}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.timed_run(*map(int, line.split()))), file=answers, flush=True)


if __name__ == "__main__":
    main()
