"""Limits of the kernels that memory planning also needs.

This module imports nothing, so that planning loads neither kernels nor Triton.
"""

MOST_TOKENS = 8  # tokens of one launch of a product; a packed matrix is unpacked for more of them
DELTA_CHUNK = 64  # largest number of tokens of a delta rule's chunk, whose updates are solved together
CHUNK_KEYS = 32  # keys that a prompt's chunk on a CPU attends at once (PAIR_KEYS, cpu/native/bf16_pairs.h)
CHUNK_ROWS = 16  # (token, head) rows that a thread attends at once in a prompt on a CPU (ROW_TILE, cpu/native/chunk.h)
# Attention of decode steps, split over the keys (gpu/attention/splits.py).
SPLIT_PROGRAMS = 2  # Triton programs that run on a multiprocessor at once; further ones are queued
SPLIT_ROUNDS = 4  # most rounds of concurrent programs in one launch
# Attention of prompts (gpu/attention/prefill.py): (token, head) rows that a multiprocessor attends at once, at most.
PREFILL_ROWS = 128
WIDE_HEAD = 256  # features; a tile of the rows of wider heads would not fit in registers
WIDE_HEAD_ROWS = 32  # rows at once if heads are wider than WIDE_HEAD
