"""The callback that says how far a stage is: `on_progress(stage, group, done, total)`.

stage            group                     done, total
"wait"           None                      0, 1: another process is fetching the same
"download ..."   None                      bytes; total is 0 until it is known; "download 2 of 4" where there are parts
"join"           None                      bytes of the part that is being copied
"check"          None                      files whose hashes are compared, once for each
"build kernels"  None                      source files that are compiled
"load"           the part that is there    bytes of weights; parts are the embedding, each layer, the head
"compile ..."    None                      number of the graph, 0: how many there will be is not known
"prefill"        see below                 tokens of the longest prompt
"generate"       see below                 new tokens of each sequence; total is max_new_tokens, a run may end before
"pack"           None                      tensors
"measure"        None                      0, 0: the machine's rates, for a plan

While a pass streams its weights, "prefill" and "generate" are also called each time a group is needed, with its number
and the tokens that were done before the pass; after a pass the group is None. Resident models have no such calls.
"""

from collections.abc import Callable

Progress = Callable[[str, int | None, int, int], None]


def ignore_progress(stage: str, group: int | None, done: int, total: int) -> None:
    """Report to nobody."""
