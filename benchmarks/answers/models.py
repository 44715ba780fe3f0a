"""Every family with every graph kind, streaming, dtype and kv_dtype, each with an engine of its own."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from answers.cases import Case, Record
from answers.checkpoints import FILES, VOCAB, architectures, checkpoint, families
from answers.records import asked, digest, generation, steady
from graphcore import Engine

STREAMING, DTYPES, KV_DTYPES = ("off", "on", "auto"), ("bf16", "fp32"), ("auto", "q8_0")
GOLDEN = ("llama3", "qwen3", "gemma3", "gpt2", "gptoss", "bitnet")
# Every pair of two values occurs. A family gets two of them with each graph kind that compiles, in turns.
COVERING = (
    ("off", "bf16", "auto"),
    ("on", "fp32", "q8_0"),
    ("auto", "bf16", "q8_0"),
    ("off", "fp32", "q8_0"),
    ("on", "bf16", "auto"),
    ("auto", "fp32", "auto"),
)
SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "seed": 3,
}
SIZES = ("threads=1", "batch_size=2", "context_length=96", "prefill_chunk=16")
BUDGETS = ("450kB", "700kB", "1MB", "1.5MB", "2.2MB", "3MB")  # the first one that suffices lets little stay
SHORT = "context_length=32"  # what a GPT-2 of tests/support/files/gpt_files.py was made for
FORMATS = ("q4_0", "q4_1", "q5_0", "q5_k", "q4_k", "q6_k", "q8_0", "int8", "int4", "mxfp4")


def cases() -> Iterator[Case]:
    """Yield all cases: first what nothing is compiled for."""
    golden = [f"golden_{name}" for name in GOLDEN]
    files = [f"golden_{name}.gguf" for name in (*GOLDEN[:-1], "bitnet_i2s")]
    plain = [*families(), *golden, *files, *FILES]
    for name, graph in product(plain, ("eager", "auto")):
        for streaming, dtype, kv_dtype in product(STREAMING, DTYPES, KV_DTYPES):
            yield case(f"models/{name}/{graph}", name, graph, streaming, dtype, kv_dtype)
    for name, graph in product(("llama_wide.gguf", "golden_gptoss", "qwen3_5"), ("eager", "auto")):
        for quant, activations in product(FORMATS, ("auto", "int8")):
            more = (f"quant={quant}", f"quant.activations={activations}")
            yield case(f"packed/{name}/{graph}", name, graph, "off", "bf16", "auto", *more)
    for at, name in enumerate([*architectures(), "llama_wide.gguf", "gpt2_q4_k.gguf"]):
        for nth, graph in enumerate(("compiled", "captured")):
            for choices in (COVERING[(at + nth) % 6], COVERING[(at + nth + 3) % 6])[: 2 - nth]:
                yield case(f"compiled/{name}/{graph}", name, graph, *choices)


def case(group: str, name: str, graph: str, streaming: str, dtype: str, kv_dtype: str, *more: str) -> Case:
    """Return the case of a model and its settings."""
    ask = partial(answer, name, graph, streaming, dtype, kv_dtype, more)
    said = [word.partition("=")[2] for word in more]
    return Case("/".join((group, streaming, dtype, kv_dtype, *said)), group, ask)


def answer(
    name: str, graph: str, streaming: str, dtype: str, kv_dtype: str, more: tuple[str, ...], folder: Path
) -> Record:
    """Return what a model answers to two prompts, and its logits."""
    path = checkpoint(name, folder)
    overrides = [*SIZES, f"kv_dtype={kv_dtype}", f"cache_dir={folder / 'cache'}", *more]
    overrides += [SHORT] if name.startswith("gpt2_") else []

    def ask(*budget: str) -> Record:
        with Engine.load(path, dtype, "stored", streaming, "cpu", graph, [*overrides, *budget]) as engine:
            return answers_of(engine)

    if streaming != "auto":
        return asked(ask, folder)
    tried: Record = {}
    for budget in BUDGETS:
        found = asked(partial(ask, f"streaming.memory_budget={budget}"), folder)
        tried[budget] = found
        if not str(found.get("error")).startswith("PlanError"):
            break
    return tried


def answers_of(engine: Engine) -> Record:
    """Return what an engine answers to two prompts, one of them longer than a chunk, and its logits."""
    words = Random(1)
    vocab = min(VOCAB, engine.config.vocab_size)
    prompts = [[words.randrange(2, vocab) for _ in range(count)] for count in (21, 3)]
    greedy = engine.generate(prompts, 8, logprobs=True, ignore_eos=True)
    sampled = engine.generate(prompts, 8, ignore_eos=True, **SAMPLED)
    logits = engine.logits(prompts[:1])
    decoded = engine.logits([prompts[0][:6]], by_token=True)
    assert not isinstance(logits, tuple)
    assert not isinstance(decoded, tuple)
    return {
        "greedy": [generation(each) for each in greedy],
        "sampled": [list(each.token_ids) for each in sampled],
        "logits": digest(logits),
        "decoded_logits": digest(decoded),
        "stats": steady(engine.stats),
        "repr": repr(engine).partition(", ")[2],
    }
