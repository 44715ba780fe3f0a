"""One peer of streaming_compare.py in a process of its own: load, then tokens one after the other.

Run as `python peer_process.py NAME RUN`, RUN being JSON (see `StreamedRun`): prints a line of JSON when it has loaded
and another when it has run, then ends; with `new_tokens` 0 it only loads, which is how second copies of a model are
written and kernels compiled before anything is timed. What an engine itself prints goes to standard error.
"""

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: peers are beside it

from peer import StreamedRun, StreamingEngine, StreamingPeer, find_peers, prompt_ids  # noqa: E402
from reporting import installed  # noqa: E402


def timed_run(engine: StreamingEngine, asked: StreamedRun) -> dict[str, object]:
    """Return the seconds until the first token and of each one after it, and the tokens."""
    times = [time.perf_counter()]
    tokens = engine.generate(
        prompt_ids(asked.prompt_tokens), asked.new_tokens, lambda: times.append(time.perf_counter())
    )
    seconds = [after - before for before, after in pairwise(times)]
    return {"first_token_seconds": seconds[0], "token_seconds": seconds[1:], "tokens": tokens}


def peak_resident_nbytes() -> int:
    """Return the most memory that this process had resident, mapped file pages included."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    name, text = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    asked = StreamedRun(**json.loads(text))
    began = time.perf_counter()
    engine = find_peers(StreamingPeer)[name].engine(asked)
    versions = {package: installed(package) for package in engine.packages}
    loaded = {"load_seconds": time.perf_counter() - began, "versions": versions}
    print(json.dumps(loaded), file=answers, flush=True)
    if asked.new_tokens:
        run = timed_run(engine, asked)
        print(json.dumps({**run, "peak_resident_bytes": peak_resident_nbytes()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
