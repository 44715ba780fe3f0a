"""task=plan with parallel=ring: a row for each rank, from described machines, without any of them."""

import json
import re
from pathlib import Path

import pytest
from support.chat_folders import TINY
from support.task_runs import RunTask
from support.tiny_models import BUILDERS, save_tiny
from test_results_documented import COMMON, documented, written

pytestmark = pytest.mark.thorough

PLAN = ("task=plan", "parallel=ring", "streaming=on", "dtype=fp32", "context_length=64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 12 layers of 3.9 MB, with a head of about a quarter of one."""
    made = tmp_path_factory.mktemp("plan_ring")
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 16384}
    BUILDERS["llama3"](num_hidden_layers=12, **sizes).save_pretrained(made)
    return made


def test_every_field_of_a_ring_s_plan_is_documented_and_every_documented_one_is_there(run_task: RunTask) -> None:
    given = "task.ranks=2", "task.disk=1GB", "task.bandwidth=10GB", "task.ram=4GB"
    run = run_task(*PLAN, *given, f"model.checkpoint={TINY / 'llama3'}")
    assert run.status == 0
    assert set(written(run.record)) == documented()[COMMON][1] | documented()["task=plan with parallel=ring"][1]


def test_four_disks_are_nearly_four_times_as_fast_as_one(run_task: RunTask, folder: Path) -> None:
    rates = "task.disk=100MB", "task.bandwidth=10GB", "task.ram=4GB"
    model = f"model.checkpoint={folder}"
    alone = run_task("task=plan", "streaming=on", "dtype=fp32", "context_length=64", *rates, model).record
    speeds = [alone["predicted"]["tokens_per_second"]]
    for ranks in (2, 4):
        run = run_task(*PLAN, *rates, model, f"task.ranks={ranks}", "task.network=10GB", "task.latency=0")
        layers = [rank["layers"] for rank in run.record["ranks"]]
        assert sorted(layer for of_rank in layers for layer in of_rank) == list(range(12))
        assert [rank["has_head"] for rank in run.record["ranks"]] == [True, *[False] * (ranks - 1)]
        speeds.append(run.record["predicted"]["tokens_per_second"])
    assert speeds[1] / speeds[0] == pytest.approx(2, rel=0.1)
    assert speeds[2] / speeds[0] == pytest.approx(4, rel=0.15)


def test_each_rank_may_have_another_machine(run_task: RunTask, folder: Path) -> None:
    lists = "task.disk=[300MB,100MB]", "task.bandwidth=10GB", "task.ram=[4GB,2GB]", "task.ranks=2"
    record = run_task(*PLAN, *lists, f"model.checkpoint={folder}").record
    first, second = record["ranks"]
    assert (len(first["layers"]), len(second["layers"])) == (9, 3)
    assert first["disk_bytes_per_second"] == 3 * second["disk_bytes_per_second"]
    assert first["ram_bytes"] > second["ram_bytes"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            ("streaming=off", "quant.format=q4_0", "task.ram=4GB"),
            "no matrix would be smaller in speculation.draft_format",
        ),
        (("streaming=auto", "task.ram=171MB"), "there is no room for a draft model beside it"),
    ],
)
def test_a_plan_says_why_there_are_no_copies_to_draft_with(
    given: tuple[str, ...], reason: str, run_task: RunTask, folder: Path
) -> None:
    drafts = "speculation=self", "speculation.draft_format=q4_0", "graph=auto"
    run = run_task(*PLAN[:2], *PLAN[3:], *given, *drafts, "task.ranks=2", f"model.checkpoint={folder}")
    assert run.status == 0, run.error
    assert any(
        f"speculation=self drafts nothing: nothing streams, and {reason}" in note for note in run.record["notes"]
    )


@pytest.mark.parametrize("drafts", [(), ("speculation=self", "speculation.draft_format=q8_0", "graph=auto")])
def test_a_small_machine_gets_no_more_caches_and_copies_than_fit(
    run_task: RunTask, folder: Path, drafts: tuple[str, ...]
) -> None:
    lists = "task.disk=[9GB,1GB]", "task.ram=[220MB,4GB]", "task.bandwidth=10GB", "task.ranks=2"
    run = run_task(*PLAN[:-1], "context_length=16384", *lists, *drafts, f"model.checkpoint={folder}")
    assert run.status == 0, run.error
    first, second = run.record["ranks"]
    assert 1 < len(first["layers"]) < 7  # by their disks alone the ranks would have 10 and 2
    assert first["total_bytes"] <= first["budget_bytes"]
    assert len(second["layers"]) == 12 - len(first["layers"])


def test_all_ranks_have_the_context_that_fits_on_each(run_task: RunTask, folder: Path) -> None:
    given = (
        "graph=auto",
        "task.ranks=2",
        "task.disk=1GB",
        "batching.max_sequences=16",
        f"model.checkpoint={folder}",
        "prefill_chunk=16",
    )
    long = run_task(*PLAN[:-1], *given, "task.ram=4GB", "parallel.split=[11,1]").record
    short = run_task(*PLAN[:-1], *given, "task.ram=[4GB,170MB]", "parallel.split=[11,1]").record
    assert 512 <= short["context_length"] < long["context_length"]
    (note,) = (note for note in short["notes"] if note.startswith("context_length="))
    assert note == (
        f"context_length={short['context_length']}, because the KV cache of {long['context_length']} tokens does not "
        "fit on all ranks"
    )
    first, shorter = long["ranks"][0], short["ranks"][0]
    assert first["layers"] == shorter["layers"]
    assert shorter["total_bytes"] < 0.8 * first["total_bytes"]


def test_resident_layers_follow_the_rates_of_memory_as_far_as_they_fit(run_task: RunTask, folder: Path) -> None:
    given = "task.ranks=2", "task.bandwidth=[30GB,10GB]", f"model.checkpoint={folder}", "dtype=fp32"
    for ram, expected in (("4GB", [9, 3]), ("[160MB,4GB]", [6, 6])):
        run = run_task("task=plan", "parallel=ring", "streaming=off", "context_length=64", *given, f"task.ram={ram}")
        assert [len(rank["layers"]) for rank in run.record["ranks"]] == expected


def test_what_stays_in_memory_has_neighbouring_layers_and_few_hand_overs(run_task: RunTask, folder: Path) -> None:
    given = "task.ranks=2", "task.bandwidth=10GB", "task.ram=4GB", f"model.checkpoint={folder}"
    run = run_task("task=plan", "parallel=ring", "streaming=auto", "dtype=fp32", *given)
    assert run.record["ranks"][0]["layers"] == list(range(len(run.record["ranks"][0]["layers"])))
    assert run.record["hand_overs"] == 2
    assert run.record["predicted"]["hand_over_seconds"] > 2 * 0.0002


def test_a_split_is_a_proportion_of_the_layers(run_task: RunTask, folder: Path) -> None:
    given = "task.ranks=3", "parallel.split=[2,1,1]", f"model.checkpoint={folder}", "task.ram=4GB"
    run = run_task(*PLAN, *given)
    assert [len(rank["layers"]) for rank in run.record["ranks"]] == [6, 3, 3]
    assert run.record["predicted"]["tokens_per_second"] is None
    assert "tokens/s are left out: give task.bandwidth and task.disk" in run.record["notes"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), r"task.ranks=None: a plan with parallel=ring is for a number of ranks of 2 or more"),
        (("task.ranks=2", "task.disk=[1GB]"), "task.disk has 1 values, and task.ranks=2; give one for each rank"),
        (("task.ranks=20",), "12 layers cannot be split among 20 ranks; start 12 ranks at most"),
        (("task.ranks=2", "task.latency=-1"), "task.latency=-1.* must be a number of seconds"),
        (("task.ranks=2", "task.latency=inf"), "task.latency=inf must be a number of seconds"),
        (("task.ranks=2", "task.latency=nan"), "task.latency=nan must be a number of seconds"),
        (("task.ranks=2", "task.network=0"), "task.network=0 must be more than 0 bytes per second; write it as 3GB"),
        (
            ("task.ranks=2", "task.link=1GB"),
            "task.link has no effect with parallel=ring; leave it out: rings are planned",
        ),
        (("task.ranks=2", "task.device_memory=1GB"), "task.device_memory has no effect with parallel=ring; leave it"),
        (("task.ranks=2", "parallel.transport=nccl"), "parallel.transport=nccl has no effect with task=plan: it plans"),
        (("task.ranks=2", "task.ram=[4GB,136MB]"), "rank 1 of 2: streaming=on needs"),
        (("task.ranks=2", "parallel.split=[1,1,1]"), r"parallel.split=\[1.*\] is for 3 ranks, and there are 2"),
    ],
)
def test_what_cannot_be_planned_says_why(run_task: RunTask, folder: Path, given: tuple[str, ...], said: str) -> None:
    run = run_task(*PLAN, *given, f"model.checkpoint={folder}")
    assert run.status == 1
    assert re.search(said, json.dumps(run.record["error"]).replace('\\"', '"')), run.record["error"]


@pytest.mark.parametrize("key", ["ranks=2", "network=1GB", "latency=0"])
def test_keys_of_a_ring_are_refused_without_one(run_task: RunTask, folder: Path, key: str) -> None:
    run = run_task("task=plan", f"task.{key}", f"model.checkpoint={folder}")
    named = f"task.{key.partition('=')[0]}"
    assert run.record["error"] == (
        f"ConfigError: {named} has no effect with parallel=off; add parallel=ring, or leave it out"
    )


def test_a_plan_says_what_it_takes_of_drafts(run_task: RunTask, folder: Path) -> None:
    given = "graph=auto", "task.ranks=2", "task.ram=4GB", "task.disk=1GB", "task.bandwidth=10GB"
    model = f"model.checkpoint={folder}"
    kinds = {kind: run_task(*PLAN, *given, model, f"speculation={kind}").record for kind in ("off", "self", "auto")}
    noted = {kind: [note for note in record["notes"] if "speculation" in note] for kind, record in kinds.items()}
    assert noted["off"] == []
    assert re.fullmatch(
        "speculation=self: memory has .* of copies; speeds are predicted without drafts", noted["self"][0]
    )
    assert noted["auto"] == [
        "speculation=auto: lookup, because a draft model's steps go round the ring one after another"
    ]
    assert all(rank["draft_bytes"] > 0 for rank in kinds["self"]["ranks"])
    assert all(rank["draft_bytes"] == 0 for kind in ("off", "auto") for rank in kinds[kind]["ranks"])
    speeds = {record["predicted"]["tokens_per_second"] for record in kinds.values()}
    assert len(speeds) == 1


def test_a_plan_drafts_nothing_where_experts_stream(run_task: RunTask, tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path / "model")
    given = "graph=auto", "task.ranks=2", "task.ram=4GB", "task.disk=1GB", "task.bandwidth=10GB", "streaming=on"
    sizes = "streaming.expert_cache=0", "dtype=fp32", "context_length=64", f"model.checkpoint={tmp_path / 'model'}"
    run = run_task("task=plan", "parallel=ring", "speculation=auto", *given, *sizes)
    assert "speculation=auto: off, because experts stream: each draft token reads further ones" in run.record["notes"]


def test_a_plan_counts_the_features_of_layers_that_rank_0_sends(run_task: RunTask, tmp_path: Path) -> None:
    save_tiny("gemma4", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    width = config["num_hidden_layers"] * config["hidden_size_per_layer_input"]
    given = "task.ranks=3", "task.disk=1GB", "task.bandwidth=10GB", "task.ram=4GB", "task.network=1MB"
    run = run_task(*PLAN, *given, "task.latency=0", f"model.checkpoint={tmp_path / 'model'}")
    assert run.status == 0, run.error
    sent = 4e-6 * (run.record["hand_overs"] * config["hidden_size"] + 2 * width)
    assert run.record["predicted"]["hand_over_seconds"] == pytest.approx(sent)


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("task.memory=ddr5",),
        ("device=cuda", "task.ram=4GB"),
        ("device=cuda", "task.memory=ddr5"),
        ("task.ram=[null,4GB]", "task.memory=ddr5"),
    ],
    ids=" ".join,
)
def test_what_is_advised_on_a_machine_with_a_gpu_is_taken(
    given: tuple[str, ...], run_task: RunTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    asked = (*PLAN, "device=auto", *given, "task.ranks=2", f"model.checkpoint={TINY / 'llama3'}")
    refused = run_task(*asked)
    assert str(refused.error) == "task=plan parallel=ring plans ranks on CPUs, not on cuda:0; set device=cpu"
    taken = run_task(*(one for one in asked if not one.startswith("device=")), "device=cpu")
    assert (taken.status, len(taken.record["ranks"])) == (0, 2)
