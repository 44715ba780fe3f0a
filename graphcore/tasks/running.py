"""What tasks that run a model share: loading it with progress, and saying what runs."""

from graphcore.config.settings import Settings
from graphcore.engine.assembly import describe_choices
from graphcore.engine.engine import Engine
from graphcore.engine.sampler import SamplingParams
from graphcore.tasks.task import Context
from graphcore.weights.plan import gib


def load_engine(context: Context) -> Engine:
    """Return the engine that the settings ask for, saying what happens meanwhile."""
    engine = Engine.from_settings(context.settings, context.console.progress)
    for note in engine.choices.notes:
        context.console.note(note)
    return engine


def describe(engine: Engine, load_seconds: float) -> str:
    """Return one line about what runs: model, device, dtype, graph, sizes."""
    plan = engine.plan
    parts = (
        f"{engine.settings.model.name} ({engine.config.model_type}, {engine.config.num_hidden_layers} layers)",
        *describe_choices(engine.choices, engine.settings),
        f"weights {gib(plan.weight_nbytes)}",
        f"kv cache {gib(plan.kv_nbytes)} for {engine.choices.context} tokens",
        f"loaded in {load_seconds:.1f} s",
    )
    return f"[{'; '.join(parts)}]"


def sampling_of(settings: Settings) -> SamplingParams:
    """Return the sampling parameters that the settings ask for."""
    sampling = settings.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=settings.seed,
    )
