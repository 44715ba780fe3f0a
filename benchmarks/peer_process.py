"""One peer of compare.py in a process of its own: it loads once, then runs prefill and greedy decode as often as asked.

Run as `python peer_process.py NAME SOURCE THREADS CONTEXT`: says that it is ready with a line of JSON, then answers
each line "prompt_tokens new_tokens" on standard input with another. What an engine itself prints goes to standard
error. SOURCE is a model file or folder; for graphcore a JSON list of its settings.
"""

import json
import os
import sys
import time

from peer import Peer, PeerEngine, find_peers, prompt_ids


def timed_run(engine: PeerEngine, prompt_tokens: int, new_tokens: int) -> dict[str, object]:
    """Return tokens per second of a prefill and of a decode after it, and the tokens."""
    prompt = prompt_ids(prompt_tokens)
    began = time.perf_counter()
    token_id = engine.prefill(prompt)
    middle = time.perf_counter()
    chosen = engine.decode(token_id, new_tokens)
    ended = time.perf_counter()
    return {
        "prefill": prompt_tokens / (middle - began),
        "decode": new_tokens / (ended - middle),
        "tokens": chosen[:16],
    }


def main() -> None:
    name, path, threads, context = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    engine = find_peers(Peer)[name].load(path, int(threads), int(context))
    print(json.dumps({"weight_bytes": engine.weight_nbytes()}), file=answers, flush=True)
    for line in sys.stdin:
        prompt_tokens, new_tokens = map(int, line.split())
        print(json.dumps(timed_run(engine, prompt_tokens, new_tokens)), file=answers, flush=True)


if __name__ == "__main__":
    main()
