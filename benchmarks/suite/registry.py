"""The parts of the suite, in the order of their value for a short time on a GPU. Imports nothing heavy."""

from dataclasses import dataclass

LIMIT = 460  # seconds that a part may take: with its start and end under 8 minutes


@dataclass(frozen=True)
class Part:
    """One part of the suite, which runs in a process of its own.

    Attributes:
        run: module and function in this folder; the function takes a `Bench`.
        seconds: estimate on a fresh machine with an H100 and 16 cores, including the start of the process. It was
            measured there for the tests of models and kernels, decode, streaming of an 8B, host and context.
        limit: seconds after which the process is killed.
        needs_gpu: True if a dry run leaves the part out: without a GPU it would show nothing, or nothing new.
    """

    name: str
    run: str
    seconds: int
    title: str
    limit: int = LIMIT
    needs_gpu: bool = False


ALL = (
    Part("machine", "machine:run", 20, "RAM, control group, and how much of it can be locked"),
    Part("ceilings", "ceilings:run", 10, "measured copy and read bandwidth, pinned transfer rates, bf16 GEMM rate"),
    Part("test_models", "correctness:models", 230, "tests: whole models against transformers, eager and resident ones"),
    Part("test_kernels", "correctness:kernels", 190, "tests: each kernel against float64", needs_gpu=True),
    Part("test_budgets", "correctness:budgets", 100, "tests: budgets, locked memory, faults", needs_gpu=True),
    Part("decode_8b_bf16", "decode:llama_bf16", 75, "Llama-3.1-8B bf16: decode, prefill of 2048, batch 8"),
    Part("decode_8b_q4_k", "decode:llama_q4_k", 55, "the same shape in q4_k: decode"),
    Part("decode_gpt_oss", "decode:gpt_oss", 60, "gpt-oss-20b shape, experts in mxfp4: decode"),
    Part("stream_8b", "streaming:llama", 105, "8B bf16, streaming=on and auto, against resident to the bit"),
    Part("decode_bitnet", "decode:bitnet", 45, "BitNet 2B-4T shape, i2_s: decode"),
    Part("decode_8b_q8_0", "decode:llama_q8_0", 45, "the same shape in q8_0: decode"),
    Part(
        "graphs",
        "decode:graphs",
        150,
        "8B: captured kernels against compiled blocks, prompts as CUDA graphs or not",
        needs_gpu=True,
    ),
    Part("ncu", "tools:ncu", 60, "six kernels under ncu: throughput, issue, registers, occupancy", needs_gpu=True),
    Part("fenced_70b_q4_k", "fenced:llama_q4_k", 150, "70B q4_k under 14 GiB of device memory"),
    Part("peers_8b", "peers:llama", 190, "transformers and gpt-fast's loop, compiled, in alternating runs"),
    Part("host", "host:run", 40, "host time per token, capture, second load"),
    Part("context_128k", "context:run", 60, "8B at 128K: bytes, decode at depth, what attention costs"),
    Part("context_128k_q8_0", "context:coded", 60, "the same with keys and values in q8_0"),
    Part("experts", "experts:run", 110, "mapped experts against copied ones"),
    Part(
        "sanitizer",
        "tools:sanitizer",
        40,
        "memcheck and racecheck over a captured step",
        needs_gpu=True,
    ),
    Part("fenced_70b_i2_s", "fenced:llama_i2_s", 120, "70B i2_s under 14 GiB of device memory"),
    Part("overlap", "batch:run", 120, "how busy the link is with work to hide behind: batch of 32, prefill of 2048"),
    Part("start", "start:run", 150, "time to first token of an 8B from the page cache"),
    Part("slowdown_7b_13b", "slowdown:small", 120, "i2_s of 7B and 13B: resident, on, auto"),
    Part("slowdown_30b", "slowdown:middle", 120, "the same of 30B"),
    Part("slowdown_70b", "slowdown:large", 200, "the same of 70B"),
    Part("peers_gpt_oss", "peers:gpt_oss", 180, "transformers on the gpt-oss-20b shape in bf16", needs_gpu=True),
)
PARTS = {part.name: part for part in ALL}

CALL_SECONDS = 300  # of one call, its start and the report included
ENDING = 10  # seconds kept for a part's end and the report
INSTALLING = 10  # seconds for the wheels and the imports of the command itself
CALLS = {
    1: ("ceilings", "test_models"),
    2: ("test_kernels",),
    3: ("decode_8b_bf16", "decode_8b_q4_k", "decode_gpt_oss", "decode_8b_q8_0", "decode_bitnet"),
    4: ("stream_8b", "fenced_70b_q4_k"),
    5: ("peers_8b", "host"),
    6: ("test_budgets", "context_128k", "ncu", "sanitizer"),
}
EXTRA = (  # in no call: run by --parts, or without it
    *(
        "machine",
        "graphs",
        "context_128k_q8_0",
        "experts",
        "fenced_70b_i2_s",
        "overlap",
        "start",
        "slowdown_7b_13b",
        "slowdown_30b",
        "slowdown_70b",
    ),
    "peers_gpt_oss",
)
