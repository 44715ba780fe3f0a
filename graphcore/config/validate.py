"""Checks ranges and combinations that types cannot express. Messages are one line: key, value, what is allowed.

Streaming settings that depend on the device are checked by the plan.
"""

import math
import os
import re
from collections.abc import Sequence
from operator import attrgetter

from graphcore.config.byte_sizes import parse_nbytes
from graphcore.config.dtype_names import DTYPES, KV_ALIASES, KV_DTYPES, real_kv_name
from graphcore.config.settings import KEPT, Settings, SpeculationSettings, StreamingSettings
from graphcore.config.user_path import user_folder
from graphcore.encodings import PACKABLE
from graphcore.errors import ConfigError
from graphcore.registry import nearest
from graphcore.sampling_params import NEUTRAL, check_sampling, check_truncation

THREADS_PER_CPU = 4
UNLIMITED = -1  # max_new_tokens: as many as the context allows
LONGEST_WAIT = 86400  # seconds for another rank: a day
MOST_PREFETCH = 8  # groups; each needs a slot of its own, and far fewer keep a link busy
NEUTRAL_STREAMING = {  # defaults of keys that say how weights move; a budget applies to resident weights, too
    "layer_group_size": "auto",
    "kv_memory_budget": "auto",
    "host_memory_budget": "auto",
    "pinned_memory": True,
    "prefetch": "auto",
    "mode": "async",
    "source": "auto",
    "expert_cache": "auto",
}

QUANT_FORMATS = ("stored", *PACKABLE)
RING_TASKS = ("generate", "chat", "bench", "serve", "perplexity", "plan")  # of rank 0, and the plan
CACHE_KEYS = ("cache.save", "cache.load")
DEVICE = re.compile(r"auto|cpu|cuda(:(\d|[1-9]\d))?")
PROMPT_KEYS = ("prompt", "prompt_file", "prompt_ids", "system", "stop", *CACHE_KEYS)  # of tasks that answer prompts


def validate_settings(settings: Settings) -> None:
    """Check that every value is in range and that no two contradict each other.

    Raises:
        ConfigError: a value is out of range or contradicts another; the first one is reported.
    """
    _check_choices(settings)
    check_device_name(settings.device)
    kv_names(settings.kv_dtype)
    _check_sizes(settings)
    _check_adapter(settings)
    _check_parallel(settings)
    _check_artefacts(settings)
    typed = settings.sampling.typed
    check_sampling({**NEUTRAL, **typed})
    if "temperature" in typed:  # else it is the model's, which is checked when the model is opened
        check_truncation({**NEUTRAL, **typed})
    _check_prompts(settings)
    _ = settings.cache_folder  # raises where it cannot be one
    check_streaming(settings)
    if settings.trace and not settings.outputs:
        raise ConfigError(
            "trace=true writes into the run's folder, and outputs=false makes none; leave one of them out"
        )


def check_device_name(name: str) -> None:
    """Check that a device's name is one that graphcore can run on; whether this machine has it, torch says later.

    Raises:
        ConfigError: it is none.
    """
    if not DEVICE.fullmatch(name):
        likely = nearest(name, ("auto", "cpu", "cuda"))
        raise ConfigError(f"device={name} is not supported{likely}; use auto, cpu, cuda or cuda:N", is_unknown=True)


def _check_choices(settings: Settings) -> None:
    choices: tuple[tuple[str, str | None, tuple[str | None, ...]], ...] = (
        ("chat", settings.chat, ("auto", "on", "off")),
        ("special_tokens", settings.special_tokens, ("auto", "parse", "text")),
        ("dependent_launches", settings.dependent_launches, ("auto", "on", "off")),
        ("dtype.name", settings.dtype.name, DTYPES),
        ("graph.kind", settings.graph.kind, ("auto", "captured", "compiled", "eager")),
        ("graph.blocks", settings.graph.blocks, ("auto", "kernels", "compiled")),
        ("graph.prefill", settings.graph.prefill, ("auto", "captured", "compiled", "eager")),
        ("model.fallback", settings.model.fallback, (None, "transformers")),
        ("model.attention", settings.model.attention, ("auto", "eager", "sdpa", "flash_attention_2")),
        ("speculation.kind", settings.speculation.kind, ("off", "auto", "lookup", "self")),
        ("speculation.draft_format", settings.speculation.draft_format, (None, *PACKABLE)),
        ("parallel.kind", settings.parallel.kind, ("off", "ring")),
        ("parallel.transport", settings.parallel.transport, ("auto", "gloo", "nccl")),
        ("quant.format", settings.quant.format, QUANT_FORMATS),
        ("quant.activations", settings.quant.activations, ("auto", "float", "int8")),
    )
    for key, value, allowed in choices:
        if value not in allowed:
            raise unknown_choice(key, value, [word or "null" for word in allowed])
    kind = settings.graph.kind
    for key, value in (("blocks", settings.graph.blocks), ("prefill", settings.graph.prefill)):
        if value not in ("auto", kind) and kind in ("compiled", "eager"):
            raise ConfigError(
                f"graph.{key}={value} contradicts graph={kind}, whose blocks are {kind}; leave it out, or use "
                "graph=captured"
            )
    if settings.model.attention != "auto" and settings.model.fallback is None:
        raise ConfigError(
            f"model.attention={settings.model.attention} has no effect on graphcore's own architectures; leave it out, "
            "or add model.fallback=transformers"
        )


def unknown_choice(key: str, value: str | None, allowed: Sequence[str]) -> ConfigError:
    """Return an error that lists the values that a key can have, with the nearest one."""
    likely = nearest(str(value), allowed)
    return ConfigError(f"{key}={value} is not one of {', '.join(allowed)}{likely}", is_unknown=True)


def kv_names(setting: str) -> tuple[str, str]:
    """Return the names of the KV cache's types for keys and for values; a single name stands for both.

    Raises:
        ConfigError: there are more than two names, or one is unknown.
    """
    names = [real_kv_name(part.strip()) for part in setting.split(",")]
    unknown = [name for name in names if name not in KV_DTYPES]
    if len(names) > len(("keys", "values")) or unknown:
        likely = nearest(unknown[0], (*KV_DTYPES, *KV_ALIASES)) if unknown else ""
        aliases = ", ".join(f"{alias} ({name})" for alias, name in KV_ALIASES.items())
        raise ConfigError(
            f"kv_dtype={setting} is not one of {', '.join(KV_DTYPES)}, {aliases}, nor two of them for keys and values, "
            f"as in q8_0,q4_0{likely}",
            is_unknown=True,
        )
    return names[0], names[-1]


def _check_sizes(settings: Settings) -> None:
    at_least(1, "", settings, ("batch_size", "context_length", "threads"))
    if settings.max_new_tokens != UNLIMITED:
        at_least(1, "", settings, ("max_new_tokens",))
    at_least(1, "batching.", settings.batching, ("max_sequences", "max_tokens_per_step", "max_waiting", "cache_tokens"))
    at_least(0, "batching.", settings.batching, ("snapshots",))
    _check_speculation(settings.speculation)
    at_least(2, "", settings, ("prefill_chunk",))
    at_least(1, "model.", settings.model, ("num_hidden_layers",))
    check_seed(settings.seed)
    most_threads = THREADS_PER_CPU * (os.cpu_count() or 1)
    if settings.threads is not None and settings.threads > most_threads:
        raise ConfigError(
            f"threads={settings.threads} is too many for {os.cpu_count()} processors; use {most_threads} at most"
        )


def _check_speculation(speculation: SpeculationSettings) -> None:
    at_least(1, "speculation.", speculation, ("num_speculative_tokens",))
    drafted, draft_format = speculation.num_speculative_tokens, speculation.draft_format
    if drafted is not None and drafted > MOST_DRAFT_TOKENS:
        raise ConfigError(
            f"speculation.num_speculative_tokens={drafted} must be at most {MOST_DRAFT_TOKENS}: each takes memory for "
            "a row of the decode programs, and so many are never accepted"
        )
    if drafted is not None and speculation.kind == "off":
        raise ConfigError(
            f"speculation.num_speculative_tokens={drafted} has no effect with speculation=off; leave it out, or add "
            "speculation=lookup"
        )
    if draft_format is not None and speculation.kind not in ("self", "auto"):
        raise ConfigError(
            f"speculation.draft_format={draft_format} has no effect with speculation={speculation.kind}, which has no "
            "draft model; leave it out, or add speculation=self"
        )


def _check_parallel(settings: Settings) -> None:
    """Check the settings of several processes, and refuse with them what the ranks of a ring do not do yet."""
    parallel = settings.parallel
    if not 0 < parallel.timeout <= LONGEST_WAIT:
        raise ConfigError(
            f"parallel.timeout={parallel.timeout} must be a number of seconds above 0, at most {LONGEST_WAIT}"
        )
    if parallel.split is not None and not (parallel.split and all(0 < part < math.inf for part in parallel.split)):
        raise ConfigError(f"parallel.split={parallel.split} must be a number above 0 for each rank, such as [3,1]")
    if parallel.kind == "off":
        keys = {"interface": parallel.interface is not None, "open": parallel.open, "split": parallel.split is not None}
        keys["transport"] = parallel.transport != "auto"
        if any(keys.values()):
            given = next(key for key, is_given in keys.items() if is_given)
            raise ConfigError(f"parallel.{given} has no effect with parallel=off; add parallel=ring, or leave it out")
        return
    draft_format = settings.speculation.draft_format
    if settings.speculation.kind == "auto" and draft_format is not None:
        raise ConfigError(
            f"speculation.draft_format={draft_format} has no effect with speculation=auto and parallel=ring, which "
            "drafts without a model; leave it out, or use speculation=self"
        )
    task = settings.task.get("name") if isinstance(settings.task, dict) else None
    refused = {
        f"task={task}": task not in RING_TASKS,
        f"model.fallback={settings.model.fallback}": settings.model.fallback is not None,
        "graph.prefill=captured": settings.graph.prefill == "captured",
        f"graph.artefacts={settings.graph.artefacts}": settings.graph.artefacts is not None,
        "trace=true": settings.trace,
    }
    asked = next((name for name, is_asked in refused.items() if is_asked), None)
    if asked is not None:
        raise ConfigError(f"{asked} does not work with parallel=ring yet; leave one of them out")


def _check_artefacts(settings: Settings) -> None:
    artefacts, kind = settings.graph.artefacts, settings.graph.kind
    if artefacts is None:
        return
    user_folder(artefacts, "graph.artefacts=")
    if kind != "compiled":
        raise ConfigError(
            f"graph.artefacts={artefacts} has compiled blocks, which graph={kind} does not run; add graph=compiled, or "
            "leave it out"
        )


def _check_adapter(settings: Settings) -> None:
    adapter = settings.model.adapter
    texts = adapter if isinstance(adapter, list) else [adapter]
    if adapter is not None and not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(
            f"model.adapter={adapter} is no path, nor a list of paths such as [first,second:0.5]", is_unknown=True
        )
    if adapter is not None and settings.model.fallback is not None:
        raise ConfigError(
            f"model.adapter={adapter} has no effect with model.fallback={settings.model.fallback}; merge the adapter "
            "into the model, or leave model.fallback out"
        )


def check_seed(seed: int) -> None:
    """Reject seeds that are no number of 64 bits, with a sign or without."""
    if not -(1 << 63) <= seed < 1 << 64:
        raise ConfigError(f"seed={seed} must be a number of 64 bits, -2^63 to 2^64 - 1")


def _check_prompts(settings: Settings) -> None:
    given = [key for key in ("prompt", "prompt_file", "prompt_ids") if vars(settings)[key] is not None]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} are both given; use one")
    empty = [key for key in given if not vars(settings)[key]]
    if empty:
        raise ConfigError(f"{empty[0]} is empty; give at least one character or token id")
    if any(type(token_id) is not int for token_id in settings.prompt_ids or ()):
        raise ConfigError(
            f"prompt_ids={settings.prompt_ids} must be one flat list of whole numbers; for several prompts use "
            "task.prompts_jsonl",
            is_unknown=True,
        )
    if settings.prompt_ids is not None and any(token_id < 0 for token_id in settings.prompt_ids):
        raise ConfigError(f"prompt_ids={settings.prompt_ids} holds a negative token id")
    if "" in settings.stop:
        raise ConfigError("stop holds an empty string, which every text contains; remove it")


def at_least(least: int, prefix: str, settings: object, keys: Sequence[str]) -> None:
    """Check that the named fields, where set, are at least `least`.

    Raises:
        ConfigError: a field is smaller; the message names it with the prefix ("task.").
    """
    for key in keys:
        value = vars(settings)[key]
        if value is not None and value < least:
            raise ConfigError(f"{prefix}{key}={value} must be at least {least}")


MOST_DRAFT_TOKENS = 127
GENERATES_NOTHING = ("export", "microbench", "models", "pack", "perplexity")  # tasks


def refuse_unused_settings(settings: Settings, task: str, keys: tuple[str, ...]) -> None:
    """Check that no setting is given that a task does not use.

    Args:
        keys: keys of the settings that it does not use.

    Raises:
        ConfigError: one of the keys is set.
    """
    given = [key for key in keys if attrgetter(key)(settings) not in (None, [])]
    if given:
        raise ConfigError(f"{given[0]} has no effect with task={task}; leave it out")
    kind = settings.speculation.kind
    if kind != "off" and task in GENERATES_NOTHING:
        raise ConfigError(f"speculation={kind} has no effect with task={task}, which generates no tokens; leave it out")


def check_streaming(settings: Settings) -> None:
    """Check that every streaming key is in range, has an effect, and contradicts no other.

    Raises:
        ConfigError: a key breaks one of these rules; the first one is reported.
    """
    streaming = settings.streaming
    _check_streaming_choices(streaming)
    size = streaming.layer_group_size
    if size != "auto" and (type(size) is not int or size < 1):
        raise ConfigError(
            f"streaming.layer_group_size={size} must be auto or a whole number of layers, at least 1",
            is_unknown=type(size) is not int,
        )
    for key in ("memory_budget", "kv_memory_budget", "host_memory_budget", "expert_cache"):
        nbytes = parse_nbytes(f"streaming.{key}", vars(streaming)[key])
        if nbytes == 0 and key not in ("expert_cache", "kv_memory_budget"):
            raise ConfigError(f"streaming.{key}={vars(streaming)[key]} must be auto or more than 0 bytes")
    _check_prefetch(streaming)
    if streaming.policy == "off":
        _check_nothing_is_asked_of_off(settings)


def _check_streaming_choices(streaming: StreamingSettings) -> None:
    choices = (
        ("policy", streaming.policy, tuple(KEPT)),
        ("mode", streaming.mode, ("async", "sync")),
        ("source", streaming.source, ("auto", "host", "disk")),
    )
    for key, value, allowed in choices:
        if value not in allowed:
            raise unknown_choice(f"streaming.{key}", value, allowed)


def _check_prefetch(streaming: StreamingSettings) -> None:
    prefetch = streaming.prefetch
    if prefetch == "auto":
        return
    if type(prefetch) is not int or not 0 <= prefetch <= MOST_PREFETCH:
        raise ConfigError(
            f"streaming.prefetch={prefetch} must be auto or a whole number from 0 to {MOST_PREFETCH}",
            is_unknown=type(prefetch) is not int,
        )
    if streaming.mode == "sync" and prefetch > 0:
        raise ConfigError(
            f"streaming.prefetch={prefetch} contradicts streaming.mode=sync, which reads nothing ahead; use "
            "streaming.mode=async or leave prefetch out"
        )


def _check_nothing_is_asked_of_off(settings: Settings) -> None:
    asked = [f"streaming.{key}" for key, value in NEUTRAL_STREAMING.items() if vars(settings.streaming)[key] != value]
    asked += ["trace"] if settings.trace else []
    if asked:
        raise ConfigError(f"{asked[0]} has no effect with streaming=off; use streaming=on or auto, or leave it out")
