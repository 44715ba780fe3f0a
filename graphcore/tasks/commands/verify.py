"""task=verify: run the checkpoint here and in transformers, and compare layer by layer.

ours:          the engine as configured (dtype, graph, device)
expected:      transformers, float32, CPU
transformers:  transformers in the engine's dtype, if not float32; its error shows what rounding to that dtype costs
llama.cpp:     the same GGUF file in llama.cpp on the CPU, if llama-cpp-python is installed

The engine is also compared with itself: "cached" is the error of decode steps over the KV cache against the whole
sequence in one call.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from omegaconf import MISSING
from torch import Tensor

from graphcore.config.settings import Settings
from graphcore.config.validate import CACHE_KEYS, at_least, refuse_unused_settings
from graphcore.engine.engine import Engine
from graphcore.errors import ConfigError, GraphError, UnsupportedError
from graphcore.tasks.reference.comparison import (
    PACKED_COSINE,
    Outputs,
    allowed,
    cached_record,
    compare,
    compare_llama_cpp,
    greedy_record,
    verdict,
)
from graphcore.tasks.reference.llama_cpp_model import has_llama_cpp, run_llama_cpp
from graphcore.tasks.reference.reference_memory import open_reference
from graphcore.tasks.reference.transformers_model import Reference
from graphcore.tasks.report.run_record import ran_record
from graphcore.tasks.requests.generation_requests import check_prompts
from graphcore.tasks.requests.prompts import Prompt, encode_prompts, read_prompts
from graphcore.tasks.task import Context, Record, Task
from graphcore.tasks.task_engine import describe, load_engine

COLUMNS = ["", "max error", "mean error", "largest reference value", "cosine", "lowest cosine"]


@dataclass
class VerifySettings:
    """The keys of conf/task/verify.yaml."""

    name: str = MISSING
    tokens: int = MISSING
    new_tokens: int = MISSING
    tolerance: float | None = MISSING
    cosine: float | None = MISSING


@dataclass(frozen=True)
class Ours:
    """graphcore's results that are compared.

    Attributes:
        token_ids: the compared sequence.
        outputs: outputs of the whole sequence in one call.
        decoded: [T, V] logits of the same tokens in decode steps, one after another.
        new_ids: greedy tokens after it; empty if their logits were not finite.
        file: GGUF file that llama.cpp can read too, without adapters; else None.
        is_float32: True if all tensors of that file are in float32.
    """

    token_ids: list[int]
    outputs: Outputs
    decoded: Tensor
    new_ids: list[int]
    dtype: torch.dtype
    file: Path | None
    is_float32: bool
    record: Record


def run(context: Context, task: VerifySettings) -> Record:
    """Compare the engine with transformers; the status is "failed" if the errors exceed the tolerance."""
    prompts = read_prompts(context.settings)
    _check(context.settings, task, prompts)
    load = open_reference(context)  # refuses a model that will not fit, before anything is loaded
    ours = run_ours(context, task, prompts)
    context.console.progress("transformers in float32", None, 0, 0)
    reference = load()
    whole = reference.run(ours.token_ids + ours.new_ids[:-1])
    tokens = len(ours.token_ids)
    expected = Outputs(tuple(layer[:tokens] for layer in whole.layers), whole.logits[:tokens])
    theirs = None
    if ours.dtype is not torch.float32:
        context.console.progress(f"transformers in {ours.record['dtype']}", None, 0, 0)
        theirs = run_cast(context, reference, load, ours)
    errors = compare(ours.outputs, expected, theirs)
    tolerance = allowed(task.tolerance, task.cosine, ours.dtype, errors)
    compared = {
        **errors,
        "cached": cached_record(ours.decoded, ours.outputs.logits),
        "greedy": greedy_record(whole.logits[tokens - 1 :], ours.new_ids),
        "llama_cpp": run_peer(context, ours, tolerance.cosine, task.cosine is not None),
    }
    record = {
        **ours.record,
        "reference": reference.origin,
        **compared,
        "tolerance": tolerance.value,
        "tolerance_reason": tolerance.reason,
        "cosine_tolerance": tolerance.cosine,
        **verdict(compared, tolerance),
    }
    show(context, record)
    return record


def _check(settings: Settings, task: VerifySettings, prompts: list[Prompt]) -> None:
    """Check the task's keys.

    Raises:
        ConfigError: a key is out of range, or another setting has no effect.
    """
    at_least(1, "task.", task, ("tokens", "new_tokens"))
    refuse_unused_settings(settings, "verify", ("stop", *CACHE_KEYS) if prompts else ("stop", "system", *CACHE_KEYS))
    if task.tolerance is not None and not task.tolerance > 0:
        raise ConfigError(f"task.tolerance={task.tolerance} must be above 0")
    if task.cosine is not None and not -1 <= task.cosine <= 1:
        raise ConfigError(f"task.cosine={task.cosine} must be between -1 and 1")


def run_ours(context: Context, task: VerifySettings, prompts: list[Prompt]) -> Ours:
    """Load the engine, run it, and free its memory."""
    settings = context.settings
    began = time.perf_counter()
    with load_engine(context, partial(check_prompts, settings, prompts)) as engine:
        load_seconds = time.perf_counter() - began
        context.console.note(describe(engine, load_seconds))
        if prompts:
            prompt = encode_prompts(engine, settings, prompts, context.console.note)[0]
            token_ids, notes = prompt.token_ids, prompt.notes
        else:
            notes = ()
            token_ids = random_ids(engine.config.vocab_size, task.tokens, settings.seed)
        engine.runner.sizes.check_context(len(token_ids) + task.new_tokens)
        outputs = engine_outputs(engine, token_ids)
        new_ids = greedy_ids(engine, token_ids, task.new_tokens)
        decoded = engine.logits([token_ids], by_token=True)
        assert isinstance(decoded, Tensor), "nothing else was asked for"
        record = {**ran_record(engine, notes), "load_seconds": load_seconds, "tokens": len(token_ids)}
        stored = engine.loaded.loader.checkpoint
        is_file = stored.layout == "gguf" and not context.settings.model.adapters
        file = next(iter(stored.files)) if is_file else None
        is_float32 = all(tensor.encoding == "f32" for tensor in stored.tensors.values())
        return Ours(token_ids, outputs, decoded[0], new_ids, engine.choices.dtype, file, is_float32, record)


def greedy_ids(engine: Engine, token_ids: list[int], new_tokens: int) -> list[int]:
    """Return greedy tokens after the sequence; empty if logits are not finite, which the comparison reports."""
    try:
        return list(engine.generate([token_ids], new_tokens, ignore_eos=True, temperature=0)[0].token_ids)
    except GraphError:
        return []


def random_ids(vocab: int, tokens: int, seed: int) -> list[int]:
    """Return random token ids of a seed; for comparing arithmetic they serve as well as a text."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(vocab, (tokens,), generator=generator, dtype=torch.int64, device="cpu").tolist()
    return ids


def engine_outputs(engine: Engine, token_ids: list[int]) -> Outputs:
    """Return the engine's outputs of one teacher-forced pass."""
    logits, *more = engine.logits([token_ids], output_hidden_states=True)
    assert isinstance(logits, Tensor), "logits come first"
    return Outputs(tuple(layer[0].float() for layer in more[0]), logits[0])


def run_cast(context: Context, reference: Reference, load: Callable[[], Reference], ours: Ours) -> Outputs:
    """Return transformers' outputs in the engine's dtype.

    If any logit is not finite in fp16, the whole pass is repeated in bf16.
    """
    reference.cast(ours.dtype)
    outputs = reference.run(ours.token_ids)
    if ours.dtype is torch.float16 and not outputs.logits.isfinite().all():
        context.console.note("[transformers overflows in float16: its error in bfloat16 is used instead]")
        wider = load()
        wider.cast(torch.bfloat16)
        outputs = wider.run(ours.token_ids)
    return outputs


def run_peer(context: Context, ours: Ours, cosine: float, is_asked: bool) -> Record | None:
    """Return the comparison with llama.cpp.

    None if the checkpoint is not a GGUF file, or (with a note) if llama.cpp is missing or cannot run it.

    Args:
        cosine: lowest allowed cosine against transformers.
        is_asked: True if the user set `cosine`, which then applies to packed files too.
    """
    if ours.file is None:
        return None
    if not has_llama_cpp():
        context.console.note(
            "[llama-cpp-python is not installed, so the file is not compared with llama.cpp; pip install "
            "llama-cpp-python]"
        )
        return None
    context.console.progress("llama.cpp", None, 0, 0)
    try:
        expected = run_llama_cpp(ours.file, ours.token_ids, torch.get_num_threads())
    except UnsupportedError as error:
        context.console.note(f"[{error}; it is not compared]")
        return None
    lowest = cosine if ours.is_float32 or is_asked else min(cosine, PACKED_COSINE)
    return compare_llama_cpp(ours.outputs, expected, lowest)


def show(context: Context, record: Record) -> None:
    """Print the errors as tables, and the figures that do not fit in them."""
    console, greedy, cached, peer = context.console, record["greedy"], record["cached"], record["llama_cpp"]
    has_theirs = record["logits"]["transformers"] is not None
    columns = [*COLUMNS, *([f"transformers {record['dtype']} max", "mean", "cosine"] if has_theirs else [])]
    rows = []
    for line in (*record["layers"], record["logits"]):
        theirs = line["transformers"]
        more = [f"{theirs['max']:.2e}", f"{theirs['mean']:.2e}", f"{theirs['cosine']:.7f}"] if has_theirs else []
        rows.append([*cells(line), *more])
    console.table(f"against {record['reference']}, float32, {record['tokens']} tokens", columns, rows)
    if peer is not None:
        lines = [*peer["layers"], *([] if peer["logits"] is None else [peer["logits"]])]
        console.table(f"against llama.cpp, {record['tokens']} tokens", COLUMNS, [cells(line) for line in lines])
        console.line(f"lowest allowed cosine with llama.cpp: {peer['cosine_tolerance']:.7f}")
    console.line(f"allowed error of the logits: {record['tolerance']:.2e} ({record['tolerance_reason']})")
    console.line(f"lowest allowed cosine: {record['cosine_tolerance']:.7f}")
    console.line(
        f"decode steps over the KV cache against the whole sequence: max error {cached['max']:.2e}, cosine "
        f"{cached['cosine']:.7f}, likeliest tokens that agree: {cached['agreeing']} of {cached['tokens']}"
    )
    console.line(
        f"greedy tokens that agree: {greedy['agreeing']} of {greedy['tokens']} (largest margin against ours: "
        f"{greedy['largest_margin']:.2e})"
    )
    console.line(f"verify: {record['status']}")


def cells(line: Record) -> list[str]:
    """Return a layer's name and errors as the cells of a table."""
    bad = f" ({line['not_finite']} not finite)" if line["not_finite"] else ""
    errors = (f"{line[name]:.2e}" for name in ("max", "mean", "largest"))
    return [line["name"] + bad, *errors, f"{line['cosine']:.7f}", f"{line['lowest_cosine']:.7f}"]


VERIFY = Task("verify", VerifySettings, run)
