"""speculation=auto: which kind is chosen follows from what streams, from the rates and from the budget."""

from pathlib import Path

import pytest
from support.packed_matrices import native_kernels
from support.tiny_models import TinyModel, save_tiny

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.plan_speculation import Planned, plan_with_speculation
from graphcore.engine.loading.prepare_model import prepare_model
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.errors import ConfigError
from graphcore.planning.draft_prediction import ACCEPTANCE
from graphcore.planning.prediction import Rates
from graphcore.weights.plan import Plan, Tier

SLOW_DISK = Rates(link=1e5, memory=1e9)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A llama whose rows are long enough for all formats."""
    return save_tiny("llama3", tmp_path_factory.mktemp("llama"))


def planned(folder: Path, rates: Rates | None, *overrides: str) -> tuple[Planned, str]:
    """Return the plan with speculation=auto at some rates, and the last note."""
    native_kernels()
    sizes = ("context_length=64", "prefill_chunk=16", "batching.max_sequences=1")
    settings = compose_settings(["device=cpu", "dtype=fp32", "speculation=auto", *sizes, *overrides])
    settings.model.checkpoint = str(folder)
    model = open_model(settings.model, 0, folder, lambda stage, done, total: None)

    def measure(_parts: PreparedDecoder, _plan: Plan, _tier: Tier) -> Rates | None:
        return rates

    found = plan_with_speculation(settings, prepare_model(settings, model), measure)
    notes = [note for note in found[0].notes if note.startswith("speculation=auto")]
    return found, notes[-1]


def test_what_is_resident_is_looked_up(llama: TinyModel) -> None:
    (parts, plan, _), note = planned(llama.folder, SLOW_DISK, "streaming=off")
    assert (parts.runtime.speculation, parts.runtime.draft_tokens, parts.draft) == ("lookup", 15, None)
    assert plan.draft_nbytes == 0
    assert note.endswith("lookup, because nothing streams")


def test_a_slow_disk_gets_the_draft_model_that_promises_most(llama: TinyModel) -> None:
    (parts, plan, _), note = planned(llama.folder, SLOW_DISK, "streaming=on")
    assert (parts.runtime.speculation, parts.runtime.draft_tokens) == ("self", 31)
    assert parts.draft is not None
    assert parts.runtime.draft_format == "q4_k"  # drafting takes hardly any time, so the share that is accepted counts
    assert plan.draft_nbytes > 0
    assert "self, a draft model of" in note
    assert parts.runtime.draft_format in note


def test_auto_takes_a_format_that_is_asked_for_and_refuses_one_that_it_cannot_predict(llama: TinyModel) -> None:
    asked = "speculation.draft_format="
    (parts, _, _), note = planned(llama.folder, SLOW_DISK, "streaming=on", f"{asked}q2_k")
    assert parts.runtime.draft_format == "q2_k"
    assert "copies in q2_k" in note
    with pytest.raises(ConfigError, match=r"draft_format=q5_0 does not work with speculation=auto, .* q4_0, "):
        planned(llama.folder, SLOW_DISK, "streaming=on", f"{asked}q5_0")


def test_a_format_that_promises_a_little_more_is_taken(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """All formats are packed fast, so none has an advantage."""
    for best, worse in (("q4_k", "q4_0"), ("q4_0", "q4_k")):
        monkeypatch.setitem(ACCEPTANCE, worse, 0.85)
        monkeypatch.setitem(ACCEPTANCE, best, 0.86)
        (parts, _, _), note = planned(llama.folder, SLOW_DISK, "streaming=on")
        assert parts.runtime.draft_format == best
        assert f"copies in {best}" in note


def test_where_drafts_are_seldom_accepted_nothing_is_copied(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for draft_format in ACCEPTANCE:
        monkeypatch.setitem(ACCEPTANCE, draft_format, 0.1)
    (parts, plan, _), note = planned(llama.folder, SLOW_DISK, "streaming=on")
    assert (parts.runtime.speculation, parts.draft, plan.draft_nbytes) == ("lookup", None, 0)
    assert note.startswith("speculation=auto: lookup (predicted ")


def test_a_budget_without_room_for_copies_and_unknown_rates_leave_lookup(llama: TinyModel) -> None:
    (_, plan, _), _ = planned(llama.folder, None, "streaming=on")
    smallest = plan.peak_nbytes - plan.groups.slots_nbytes // 2
    for rates, budget, said in ((None, "1GB", "no rates are known"), (SLOW_DISK, str(smallest), "no draft model fits")):
        (parts, plan, _), note = planned(llama.folder, rates, "streaming=on", f"streaming.memory_budget={budget}")
        assert (parts.runtime.speculation, plan.draft_nbytes) == ("lookup", 0)
        assert said in note


def test_streamed_experts_switch_drafts_off(tmp_path: Path) -> None:
    mixture = save_tiny("qwen3_moe", tmp_path)
    (parts, plan, _), note = planned(mixture.folder, SLOW_DISK, "streaming=on")
    assert plan.experts is not None
    assert (parts.runtime.speculation, parts.runtime.draft_tokens) == ("off", 0)
    assert "because experts stream" in note


def test_steps_of_one_token_switch_drafts_off_and_say_so(llama: TinyModel) -> None:
    (parts, _, _), note = planned(llama.folder, SLOW_DISK, "streaming=on", "graph=eager")
    assert (parts.runtime.speculation, parts.runtime.draft_tokens) == ("off", 0)
    assert "they run eager on cpu" in note


def test_notes_of_plans_that_were_not_chosen_are_not_told(llama: TinyModel) -> None:
    (parts, _, _), _ = planned(llama.folder, SLOW_DISK, "streaming=on")
    assert len(parts.notes) == len({*parts.notes})
    assert sum("speculation" in note for note in parts.notes) == 1
