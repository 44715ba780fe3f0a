"""From settings to everything that an engine has: model, parts, what runs and moves it, and its plan."""

from typing import TYPE_CHECKING, TypeAlias

import torch

from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.config.settings import Settings
from graphcore.device import return_freed_memory, use_threads
from graphcore.engine.assembly import Assembly, prepare
from graphcore.engine.building import Running, build_running
from graphcore.engine.model import Model, open_model
from graphcore.engine.planning import plan_run
from graphcore.errors import PlanError
from graphcore.processors import refuse_forked
from graphcore.progress import Progress
from graphcore.weights.plan import Plan

if TYPE_CHECKING:
    from graphcore.engine.transformers_model import TransformersModel, TransformersParts

AnyModel: TypeAlias = "Model | TransformersModel"
AnyParts: TypeAlias = "Assembly | TransformersParts"


def load(settings: Settings, on_progress: Progress) -> tuple[AnyModel, AnyParts, Running, Plan]:
    """Return the model that the settings ask for, its parts, what runs it, and the plan that it keeps to.

    Raises:
        GraphcoreError: a setting, the checkpoint or the machine stands in the way; the message says what to do.
    """
    use_threads(settings.threads)
    refuse_forked(torch.get_num_threads())
    try:
        model, parts, running, plan = _load(settings, on_progress)
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().partition("\n")[0]
        raise PlanError(
            f"the device has less memory than the plan counted on ({reason}); end what else uses it, or set a smaller "
            "streaming.memory_budget"
        ) from error
    return_freed_memory()
    return model, parts, running, plan


def _load(settings: Settings, on_progress: Progress) -> tuple[AnyModel, AnyParts, Running, Plan]:
    if settings.model.fallback is None:
        return load_own(settings, on_progress)
    from graphcore.engine.transformers_model import load_transformers  # optional, a dozen modules

    return load_transformers(settings, on_progress)


def load_own(settings: Settings, on_progress: Progress) -> tuple[Model, Assembly, Running, Plan]:
    """Return the same of a model of one of graphcore's own architectures."""
    model = open_model(settings.model, settings.seed, settings.cache_folder, on_progress)
    if model.tokenizer is not None and settings.chat != "off" and settings.prompt_ids is None:
        model.tokenizer.prepare_chat()
    parts = prepare(settings, model, on_progress=on_progress)
    with torch.inference_mode():
        parts, plan, tier = plan_run(settings, model, parts)
        running = build_running(settings, model, parts, plan, tier, on_progress)
    if isinstance(model.checkpoint, GGUFCheckpoint):
        model.checkpoint.forget_arrays()  # the tokenizer has what it needs of them
    return model, parts, running, plan
