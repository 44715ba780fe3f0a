"""Attention by the C++ kernels of every instruction set, against a loop over positions in float64.

A chunk is one call. One token is also an instruction of a native program, whose q, k, v and answers are float32.
"""

from functools import partial
from itertools import product as every_pair

import torch
from attend_cases import Implementation, Sequences, Shape, beyond_the_cap
from attend_instruction import attend_as_a_program
from support.cases import in_case

from graphcore.kernels.cpu.attention import sliced_attend

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}
TOKENS = [[1, 1], [1, 1], [1, 0], *[[1, 1]] * 20]  # past a vector's sixteen keys, and round a ring
CHUNKS = [[5, 1], [2, 7], [1, 1], [0, 1], [19, 4], [1, 1]]


def check(shape: Shape, attend: Implementation, passes: list[list[int]]) -> None:
    sequences = Sequences(shape, 2)
    for counts in passes:
        found, expected = sequences.run(attend, counts)
        torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[shape.cache_dtype])


def test_chunks_match_the_loop(library: str) -> None:
    for cap, window, dtype in every_pair([0.0, 2.0], [0, 7], CLOSE):
        with in_case(cap, window, dtype):
            for heads, head_dim, page in ((6, 20, 0), (2, 64, 0), (6, 20, 3), (2, 64, 16)):
                shape = Shape(
                    heads, 2, head_dim, 64, window, dtype, dtype, 0.2, has_sinks=heads == 6, cap=cap, page=page
                )
                check(shape, partial(sliced_attend, library=library), CHUNKS)


def test_an_instruction_matches_the_loop(library: str) -> None:
    for cap, window, cache_dtype in every_pair([0.0, 2.0], [0, 7], CLOSE):
        with in_case(cap, window, cache_dtype):
            for heads, head_dim, page in ((10, 20, 0), (2, 64, 0), (10, 20, 3), (2, 64, 16)):
                settings = {"has_sinks": heads == 10, "cap": cap, "page": page}
                shape = Shape(heads, 2, head_dim, 64, window, torch.float32, cache_dtype, 0.2, **settings)
                check(shape, partial(attend_as_a_program, library=library), TOKENS)


def test_scores_beyond_a_cap_weigh_as_the_cap(library: str) -> None:
    for dtype in CLOSE:
        with in_case(dtype):
            for attend, tokens in ((sliced_attend, 1), (sliced_attend, 40), (attend_as_a_program, 1)):
                found, expected = beyond_the_cap(partial(attend, library=library), tokens, dtype)
                torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[dtype])
