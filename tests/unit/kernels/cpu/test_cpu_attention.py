"""Attention by the C++ kernels of every instruction set, against a loop over positions in float64.

A chunk is one call. One token is also an instruction of a native program, whose q, k, v and answers are float32.
"""

from functools import partial

import pytest
import torch
from attend_cases import Implementation, Sequences, Shape, beyond_the_cap
from torch import Tensor

from graphcore.kernels.cpu import instructions
from graphcore.kernels.cpu.attention import cache_number, sliced_attend
from graphcore.kernels.cpu.program import NativeProgram

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}
TOKENS = [[1, 1], [1, 1], [1, 0], *[[1, 1]] * 20]  # past a vector's sixteen keys, and round a ring
CHUNKS = [[5, 1], [2, 7], [1, 1], [0, 1], [19, 4], [1, 1]]


def attend_as_a_program(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    *,
    library: str,
    cap: float = 0.0,
) -> Tensor:
    """Implement `attend` for one token of each sequence: one instruction each."""
    out = torch.zeros_like(query)
    (kv_heads, page), width = k_cache.shape[1:3], query.shape[3]
    for row in counts.nonzero().flatten().tolist():
        program, arguments = NativeProgram(library, 1), instructions.Attend()
        parts = (query[row].float(), key[row].float(), value[row].float(), answer := out[row].float())
        arguments.q, arguments.k, arguments.v, arguments.out = (program.per_row(part.flatten()) for part in parts)
        arguments.sinks, arguments.starts = program.address(sinks), program.address(starts[row], torch.int64)
        arguments.sequences = program.address(torch.tensor([row]), torch.int64)
        arguments.k_cache, arguments.v_cache = (program.address(c, c.dtype) for c in (k_cache, v_cache))
        arguments.table, arguments.page, arguments.num_pages = program.address(table, torch.int32), page, table.shape[1]
        arguments.heads, arguments.kv_heads, arguments.head_dim = query.shape[2], kv_heads, width
        arguments.window, arguments.scale, arguments.cap = window, scale, cap
        arguments.k_format, arguments.v_format = cache_number(k_cache), cache_number(v_cache)
        program.needs_attention(width, page * table.shape[1])
        program.add(arguments)
        program.run()
        out[row] = answer.to(out.dtype)
    return out


def check(shape: Shape, attend: Implementation, passes: list[list[int]]) -> None:
    sequences = Sequences(shape, 2)
    for counts in passes:
        found, expected = sequences.run(attend, counts)
        torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[shape.cache_dtype])


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("dtype", CLOSE)
def test_chunks_match_the_loop(library: str, dtype: torch.dtype, window: int, cap: float) -> None:
    for heads, head_dim, page in ((6, 20, 0), (2, 64, 0), (6, 20, 3), (2, 64, 16)):
        shape = Shape(heads, 2, head_dim, 64, window, dtype, dtype, 0.2, has_sinks=heads == 6, cap=cap, page=page)
        check(shape, partial(sliced_attend, library=library), CHUNKS)


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("cache_dtype", CLOSE)
def test_an_instruction_matches_the_loop(library: str, cache_dtype: torch.dtype, window: int, cap: float) -> None:
    for heads, head_dim, page in ((10, 20, 0), (2, 64, 0), (10, 20, 3), (2, 64, 16)):
        settings = {"has_sinks": heads == 10, "cap": cap, "page": page}
        shape = Shape(heads, 2, head_dim, 64, window, torch.float32, cache_dtype, 0.2, **settings)
        check(shape, partial(attend_as_a_program, library=library), TOKENS)


@pytest.mark.parametrize("dtype", CLOSE)
def test_scores_beyond_a_cap_weigh_as_the_cap(library: str, dtype: torch.dtype) -> None:
    for attend, tokens in ((sliced_attend, 1), (sliced_attend, 40), (attend_as_a_program, 1)):
        found, expected = beyond_the_cap(partial(attend, library=library), tokens, dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[dtype])
