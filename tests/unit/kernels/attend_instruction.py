"""Attention of one token of each sequence by the instruction of a native program, with the arguments of the op."""

import torch
from torch import Tensor

from graphcore.kernels.cpu import instructions
from graphcore.kernels.cpu.attention import cache_number
from graphcore.kernels.cpu.program import NativeProgram


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
