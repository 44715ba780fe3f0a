"""Shared code of tasks that run a model: load it with progress, and describe what runs."""

from dataclasses import replace

from graphcore.config.byte_sizes import in_words
from graphcore.config.settings import Settings
from graphcore.config.validate import UNLIMITED
from graphcore.engine.engine import Engine
from graphcore.engine.loading.load_model import Check, no_check
from graphcore.engine.loading.runtime_config import WHOLE_CHUNKS, describe_runtime, refuse_graph
from graphcore.engine.program_runner import ProgramRunner
from graphcore.errors import ConfigError
from graphcore.graph.compile import CompileReport
from graphcore.progress import Progress
from graphcore.sampling_params import SamplingParams
from graphcore.tasks.report.startup import cache_state
from graphcore.tasks.task import Context
from graphcore.weights.plan import Plan

CONTINUED_TOKENS = 128


def load_engine(context: Context, check: Check = no_check, on_progress: Progress | None = None) -> Engine:
    """Load the engine that the settings ask for, printing progress.

    Args:
        check: function that may refuse the checkpoint before its weights are read.
        on_progress: callback of the progress; None is the console's.

    Raises:
        GraphcoreError: a setting, the checkpoint or the machine does not allow it.
    """
    settings = context.settings
    refuse_graph(settings)  # before anything is downloaded
    engine = Engine.from_settings(settings, on_progress or context.console.progress, check)
    context.console.expect_groups(moved_nbytes(engine.plan))
    for note in (*engine.notes, *group_note(context, engine.config.model_type), *note_on_toy(context)):
        if settings.task["name"] == "serve" or not note.startswith(WHOLE_CHUNKS):  # others have few prompts to reuse
            context.console.note(note)
    return engine


def moved_nbytes(plan: Plan) -> list[int]:
    """Return the bytes that a pass over the weights moves for each group, by group index; 0 for resident groups."""
    num_groups = plan.groups.num_layer_groups + 1 + max(1, len(plan.groups.head_slices))
    return [plan.groups.nbytes_of(group) if group in plan.groups.streamed else 0 for group in range(num_groups)]


def own_runner(engine: Engine, task: str) -> ProgramRunner:
    """Return the runner of graphcore's own programs.

    Raises:
        ConfigError: the engine runs a transformers model, which has no such programs.
    """
    if not isinstance(engine.runner, ProgramRunner):
        raise without_own_programs(task)
    return engine.runner


def without_own_programs(task: str) -> ConfigError:
    """Return the error of a task that cannot run a transformers model."""
    return ConfigError(
        f"task={task} looks into graphcore's own programs, and model.fallback=transformers has none; use it with "
        "task=generate, chat, bench, perplexity, verify or plan"
    )


def group_note(context: Context, model_type: str) -> tuple[str, ...]:
    """Return a note if the checkpoint's architecture, which is used, is not that of the chosen model group."""
    model = context.settings.model
    usual = model.random_config.get("model_type", model_type)
    if usual == model_type or not context.has_chosen_model:
        return ()
    return (f"model={model.name} stands for {usual}, but the checkpoint is a {model_type} model and runs as one",)


def note_on_toy(context: Context) -> tuple[str, ...]:
    """Return a note on the default model if nobody has chosen it."""
    model = context.settings.model
    if context.has_chosen_model or model.checkpoint != model.published.checkpoint:
        return ()
    return (
        f"{model.name} is a toy of 135M parameters, the default because it needs no hub; graphcore list has models "
        "that answer well, such as graphcore chat smollm3",
    )


def default_params(engine: Engine) -> SamplingParams:
    """Return the sampling parameters of a run's requests that set none, with the run's seed."""
    return replace(engine.default_sampling_params, seed=engine.settings.seed)


def default_max_new_tokens(engine: Engine, is_chat: bool) -> int:
    """Return the most tokens of an answer: as set, else the model's own limit, else as many as the context allows.

    Args:
        is_chat: True if it answers in a chat. A text that is continued has no end, so that its default is a number.
    """
    otherwise = UNLIMITED if is_chat else CONTINUED_TOKENS
    return engine.settings.max_new_tokens or engine.loaded.sampling.max_new_tokens or otherwise


def describe(engine: Engine, load_seconds: float | None = None) -> str:
    """Return one line about what runs: model, device, dtype, graph, sizes, and the load time if it is given."""
    plan, longest = engine.plan, engine.config.max_position_embeddings
    context = f"{engine.choices.context_length}"
    if engine.choices.context_length < longest:
        context += f" of {longest}"
    offloaded = "" if plan.offloaded_kv is None else f"and {in_words(plan.offloaded_kv.nbytes)} in files "
    parts = (
        f"{engine.settings.model.display_name} ({engine.config.model_type}, {engine.config.num_hidden_layers} layers)",
        *describe_runtime(engine.choices, engine.settings),
        f"weights {in_words(plan.weight_nbytes)}",
        f"kv cache {in_words(plan.kv_nbytes)} {offloaded}for {context} tokens",
        *([] if load_seconds is None else [f"loaded in {load_seconds:.1f} s"]),
    )
    return f"[{'; '.join(parts)}]"


def describe_compile(report: CompileReport) -> str:
    """Return a few words about compiling: "3 graphs in 2.1 s from a warm cache"."""
    state = cache_state(report)
    if state == "none":
        return "nothing compiled"
    num_graphs = report.cache_hits + report.cache_misses
    return f"{num_graphs} graphs in {report.seconds:.1f} s from a {state} cache"


def stops_of(settings: Settings) -> list[str]:
    """Return the stop strings; \\n and \\t typed as two characters are a line break and a tab."""
    return [stop.replace("\\n", "\n").replace("\\t", "\t") for stop in settings.stop]
