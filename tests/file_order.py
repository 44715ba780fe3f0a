"""The order in which test files run, and those that one worker runs where several share them (shared_files.py)."""

# Files whose fixtures compile the same models: what the first has compiled, the others find in the process.
TOGETHER = (
    "integration/test_model_parity.py",
    "integration/test_decode_equals_forward.py",
    "integration/test_recompilation.py",
    "integration/test_dtypes.py",
    "integration/test_streaming_equality.py",
)
# Files that take longest, beginning with the longest; a new one need not be named.
LONGEST = (
    *TOGETHER,
    "unit/graph/test_lowered_graphs.py",
    "unit/kernels/gpu/test_gpu_compile.py",
    "unit/kernels/gpu/attention/test_split_chunks.py",
    "integration/test_coded_caches.py",
    "integration/test_paged_caches.py",
    "integration/test_streamed_device_experts.py",
    "integration/test_expert_slots_captured.py",
    "unit/graph/test_composed_blocks.py",
    "integration/test_bitnet.py",
    "integration/test_gemma4.py",
    "integration/test_real_models.py",
    "unit/graph/test_builder.py",
    "integration/test_many_requests.py",
    "unit/engine/batching/test_device_joins.py",
    "integration/test_command_line.py",
    "integration/test_termination.py",
    "unit/kernels/gpu/attention/test_split_decode.py",
    "unit/graph/gpu/test_norm_fusion.py",
    "unit/engine/batching/test_device_pages.py",
    "unit/engine/batching/test_device_decoding.py",
    "integration/test_streamed_experts.py",
    "unit/kernels/gpu/experts/test_fetch.py",
    "integration/test_wide_steps.py",
    "integration/test_device_decode.py",
    "unit/kernels/ops/test_attend.py",
    "unit/kernels/ops/test_draw.py",
    "integration/test_shared_pages.py",
    "unit/kernels/gpu/sampling/test_gpu_drawn.py",
    "unit/graph/cpu/test_native_decode.py",
    "unit/kernels/gpu/attention/test_attend_gpu.py",
    "unit/tasks/commands/test_microbench_task.py",
    "integration/test_gpu_suite.py",
    "integration/test_fuzz.py",
)


def file_of(nodeid: str) -> str:
    """Return a test's file below tests/."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def rank_of(nodeid: str) -> int:
    """Return a test's place in the order: that of its file, all others last."""
    file = file_of(nodeid)
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)
