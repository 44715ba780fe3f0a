"""task=verify: run the checkpoint here and in transformers, and compare layer by layer.

ours:          the engine as configured (dtype, graph, device)
expected:      transformers, float32, CPU
transformers:  transformers in the engine's dtype, if that is not float32; its error is that of rounding alone
"""

import time
from dataclasses import dataclass
from functools import partial

import torch
from omegaconf import MISSING
from torch import Tensor

from graphcore.config.byte_sizes import both_in_words
from graphcore.config.settings import Settings
from graphcore.config.validate import at_least
from graphcore.engine.engine import Engine
from graphcore.engine.open_model import Model, open_model
from graphcore.engine.prepare_model import match_model
from graphcore.errors import ConfigError, PlanError
from graphcore.nn.decoder import Decoder
from graphcore.tasks.reference.comparison import allowed, compare, greedy_record, verdict
from graphcore.tasks.reference.transformers_model import Outputs, Reference, load_reference
from graphcore.tasks.requests.generation_requests import check_prompts
from graphcore.tasks.requests.prompts import Prompt, encode_prompts, read_prompts
from graphcore.tasks.results.run_record import ran_record
from graphcore.tasks.task import CACHE_KEYS, Context, Record, Task, refuse_without_effect
from graphcore.tasks.task_engine import describe, load_engine, own_runner, without_own_programs
from graphcore.weights.loader import Loader
from graphcore.weights.planning.machine import free_device_nbytes

TRANSFORMERS_NBYTES = 256 << 20  # transformers' code, and the outputs of a pass


@dataclass
class VerifySettings:
    """The keys of conf/task/verify.yaml."""

    name: str = MISSING
    tokens: int = MISSING
    new_tokens: int = MISSING
    tolerance: float | None = MISSING


@dataclass(frozen=True)
class Ours:
    """graphcore's results that are compared.

    Attributes:
        token_ids: the compared sequence.
        new_ids: greedy tokens after it.
    """

    token_ids: list[int]
    new_ids: list[int]
    outputs: Outputs
    dtype: torch.dtype
    record: Record


def run(context: Context, task: VerifySettings) -> Record:
    """Compare the engine with transformers; the status is "failed" if the errors exceed the tolerance."""
    prompts = read_prompts(context.settings)
    _check(context.settings, task, prompts)
    model, loader = open_reference(context)  # refuses a model that will not fit, before anything is loaded
    ours = run_ours(context, task, prompts)
    context.console.progress("transformers in float32", None, 0, 0)
    reference = load_reference(model, loader)
    whole = reference.run(ours.token_ids + ours.new_ids[:-1])
    tokens = len(ours.token_ids)
    expected = Outputs(tuple(layer[:tokens] for layer in whole.layers), whole.logits[:tokens])
    theirs = None
    if ours.dtype is not torch.float32:
        context.console.progress(f"transformers in {ours.record['dtype']}", None, 0, 0)
        theirs = run_cast(context, reference, ours)
    tolerance = allowed(task.tolerance, ours.dtype, theirs, expected)
    errors = compare(ours.outputs, expected, theirs)
    greedy = greedy_record(whole.logits[tokens - 1 :], ours.new_ids)
    record = {
        **ours.record,
        "reference": reference.origin,
        **errors,
        "greedy": greedy,
        "tolerance": tolerance.value,
        "tolerance_reason": tolerance.reason,
        **verdict(errors["logits"], greedy, tolerance),
    }
    show(context, record)
    return record


def _check(settings: Settings, task: VerifySettings, prompts: list[Prompt]) -> None:
    """Check the task's keys.

    Raises:
        ConfigError: a key is out of range, or another setting has no effect.
    """
    if settings.model.fallback is not None:
        raise without_own_programs("verify")
    at_least(1, "task.", task, ("tokens", "new_tokens"))
    refuse_without_effect(settings, "verify", ("stop", *CACHE_KEYS) if prompts else ("stop", "system", *CACHE_KEYS))
    if task.tolerance is not None and not task.tolerance > 0:
        raise ConfigError(f"task.tolerance={task.tolerance} must be above 0")


def run_ours(context: Context, task: VerifySettings, prompts: list[Prompt]) -> Ours:
    """Load the engine, run it, and free its memory."""
    settings = context.settings
    began = time.perf_counter()
    with load_engine(context, partial(check_prompts, settings, prompts)) as engine:
        load_seconds = time.perf_counter() - began
        context.console.note(describe(engine, load_seconds))
        if prompts:
            token_ids = encode_prompts(engine, settings, prompts, context.console.note)[0].token_ids
        else:
            token_ids = random_ids(engine.config.vocab_size, task.tokens, settings.seed)
        own_runner(engine, "verify").sizes.check_context(len(token_ids) + task.new_tokens)
        outputs = engine_outputs(engine, token_ids)
        new_ids = engine.generate([token_ids], task.new_tokens, ignore_eos=True)[0].token_ids
        record = {**ran_record(engine), "load_seconds": load_seconds, "tokens": len(token_ids)}
        return Ours(token_ids, list(new_ids), outputs, engine.choices.dtype, record)


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


def open_reference(context: Context) -> tuple[Model, Loader]:
    """Return the opened checkpoint and the loader from which transformers' model will be made; no weight is read.

    Raises:
        PlanError: transformers' model would not fit in host memory.
    """
    settings = context.settings
    model = open_model(settings.model, settings.seed, settings.cache_folder, context.console.progress)
    decoder, loader = match_model(model, torch.float32)
    needed, free = reference_nbytes(decoder, loader), free_device_nbytes(torch.device("cpu"))
    if needed > free:
        fewest = reference_nbytes(decoder, loader, num_layers=1)
        instead = "task=perplexity compares with no reference, and streams"
        if fewest <= free:
            each = (needed - fewest) // max(1, len(decoder.layers) - 1)
            most = 1 + (free - fewest) // max(1, each)
            instead = f"compare the first layers only with model.num_hidden_layers={most}"
        takes, has = both_in_words(needed, free)
        raise PlanError(
            f"task=verify runs transformers in float32 on the CPU, which takes {takes}, {has} are free; {instead}"
        )
    return model, loader


def reference_nbytes(decoder: Decoder, loader: Loader, num_layers: int | None = None) -> int:
    """Return the bytes of transformers' model at its peak: its weights, the largest of them twice, and transformers.

    A weight is filled, or cast to another dtype, from a copy.

    Args:
        decoder: float32 decoder on the meta device; a tied head counts once.
        num_layers: number of layers, from the first; None is all.
    """
    layers = decoder.layers[:num_layers]
    tied = decoder.get_buffer("embed_tokens.weight").nbytes if loader.is_tied else 0
    ends = sum(tensor.nbytes for group in (decoder.embed_tokens, decoder.head) for tensor in group.buffers()) - tied
    tensors = [tensor.nbytes for layer in layers for tensor in layer.buffers()]
    largest = max(*tensors, decoder.get_buffer("embed_tokens.weight").nbytes)
    return ends + sum(tensors) + largest + TRANSFORMERS_NBYTES


def run_cast(context: Context, reference: Reference, ours: Ours) -> Outputs:
    """Return transformers' outputs in the engine's dtype; in bf16 where they are not finite in fp16."""
    reference.cast(ours.dtype)
    outputs = reference.run(ours.token_ids)
    if ours.dtype is torch.float16 and not outputs.logits.isfinite().all():
        context.console.note("[transformers overflows in float16: its error in bfloat16 stands in]")
        wider = load_reference(*open_reference(context))
        wider.cast(torch.bfloat16)
        outputs = wider.run(ours.token_ids)
    return outputs


def show(context: Context, record: Record) -> None:
    """Print the errors as a table, and the figures that do not fit in it."""
    has_theirs = record["logits"]["transformers"] is not None
    columns = ["", "max error", "mean error", "largest value"]
    columns += [f"transformers {record['dtype']} max", "mean"] if has_theirs else []
    rows = []
    for line in (*record["layers"], record["logits"]):
        theirs = [line["transformers"]["max"], line["transformers"]["mean"]] if has_theirs else []
        rows.append(
            [line["name"], *(f"{value:.2e}" for value in (line["max"], line["mean"], line["largest"], *theirs))]
        )
    console, greedy = context.console, record["greedy"]
    console.table(f"against {record['reference']}, float32, {record['tokens']} tokens", columns, rows)
    console.line(f"allowed error of the logits: {record['tolerance']:.2e} ({record['tolerance_reason']})")
    console.line(
        f"greedy tokens that agree: {greedy['agreeing']} of {greedy['tokens']} (largest margin against ours: "
        f"{greedy['largest_margin']:.2e})"
    )
    console.line(f"verify: {record['status']}")


VERIFY = Task("verify", VerifySettings, run)
