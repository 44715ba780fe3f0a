"""NFR-002: what manages streaming takes at most a twentieth of a plan, for the shapes of all models of conf/model."""

from dataclasses import replace
from pathlib import Path

import pytest

from graphcore.config.compose import compose_settings
from graphcore.config.conf_folder import group_options
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.plan_run import plan_run
from graphcore.engine.loading.prepare_model import prepare_model
from graphcore.planning.machine import Machine, Memory
from graphcore.weights.plan import Plan

pytestmark = pytest.mark.thorough  # a skeleton of every model

MODELS = sorted(group_options()["model"])


def plan_on(model: str, folder: Path) -> Plan:
    """Return the plan of a model of random weights that streams from files, for a machine with room for everything."""
    overrides = ["task=plan", "device=cpu", "graph=eager", "streaming=on", "context_length=128"]
    settings = compose_settings([f"model={model}", *overrides])
    settings.model.checkpoint = "random:"
    parts = prepare_model(settings, open_model(settings.model, 0, folder, lambda stage, done, total: None))
    plenty = replace(Machine.here(parts.runtime.device), memory=Memory("cpu", 1 << 50, 1 << 50))
    return plan_run(settings, parts, plenty)[1]


@pytest.mark.parametrize("model", MODELS)
def test_read_buffers_take_at_most_a_twentieth_of_the_smallest_plan_and_of_900_mb_with_experts(
    model: str, tmp_path: Path
) -> None:
    """The buffers of the threads that read experts have one size, 31 MB, however small the plan is.

    A folder of GPT-2 is the other exception: its matrices are stored transposed, so that each is read whole.
    """
    plan = plan_on(model, tmp_path)
    least = plan.total_nbytes if plan.experts is None else 900_000_000
    assert 0 < plan.other.buffer_nbytes <= 0.05 * least


def test_buffers_of_large_plans_have_the_size_with_which_disks_reach_their_full_rate(tmp_path: Path) -> None:
    assert plan_on("llama3_8b", tmp_path).other.job_nbytes == 5 << 19
    assert plan_on("smollm2", tmp_path).other.job_nbytes < 1 << 19
