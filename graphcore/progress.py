"""The callback that reports the progress of a stage: `on_progress(stage, group, done, total)`.

stage            group                     done, total
"wait"           None                      0, 1: another process is fetching the same
"download ..."   None                      bytes; total is 0 until known; "download 2 of 4" if there are parts
"join"           None                      bytes of the part that is being copied
"check"          None                      files whose hashes are compared, counted once each
"build kernels"  None                      source files that are compiled
"load"           number of the part        bytes of weights; parts are the embedding, each layer, the head
"draft"          number of the part        bytes of the draft model's copies of matrices
"compile ..."    None                      number of the graph, 0: the total is not known
"prefill"        see below                 tokens of a prompt that is being read
"generate"       see below                 new tokens of the request that may have most; total is its max_new_tokens,
                                           and it may end before
"pack"           None                      tensors
"headers"        None                      files of weights whose headers are read, for a plan
"measure"        None                      0, 0: the machine's rates, for a plan

While a pass streams its weights, "prefill" and "generate" are also called each time a group is needed, with its number
and the tokens done before the pass; after a pass the group is None. Resident models make no such calls.
"""

from collections.abc import Callable

Progress = Callable[[str, int | None, int, int], None]


def ignore_progress(stage: str, group: int | None, done: int, total: int) -> None:
    """Ignore the progress."""
