"""parallel=ring: two and four processes answer as one does, to the bit; and what happens if one is lost or differs."""

import functools
import gc
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ring_ranks import (
    FAULTS,
    OTHER_FAULTS,
    SIZES,
    Case,
    answers_of,
    free_ports,
    load,
    loaded_answer,
    run_cases,
    run_ranks,
)
from safetensors.torch import save_file
from support.files import llama_files
from support.files.adapter_files import drawn, packed_file, write_peft
from support.tiny_models import BUILDERS, add_tokenizer, save_tiny

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.errors import ConfigError
from graphcore.parallel.process_group import INTERFACE

pytestmark = pytest.mark.thorough

RUN = Path(__file__).parents[2] / "run.py"
SELF = ("speculation=self", "speculation.draft_format=q4_0")
LOOKUP = "speculation=lookup"
EQUAL = "parallel.split=[1,1]"  # so that no rates are measured
RING: Mapping[str, tuple[int, str, tuple[str, ...], str]] = {  # ranks, model, settings, what is asked
    "dense, streamed, drafts": (2, "llama3", ("streaming=on", "dtype=bf16", LOOKUP, EQUAL), ""),
    "windows, in groups of layers, draft model, pages run out": (
        *(2, "gemma3"),
        ("streaming=on", "streaming.layer_group_size=2", "dtype=fp32", "batching.cache_tokens=128", EQUAL, *SELF),
        "",
    ),
    "recurrent, draft model": (2, "qwen3_5", ("streaming=on", "dtype=fp32", EQUAL, *SELF), "batch drafts"),
    "convolutions, nothing streams, drafts": (
        *(2, "lfm2_moe", ("streaming=auto", "dtype=fp32", LOOKUP)),
        "batch drafts",
    ),
    "mixture": (2, "qwen3_moe", ("streaming=on", "streaming.expert_cache=0", "dtype=fp32", EQUAL), "batch"),
    "larger, some layers stream, draft model": (
        *(2, "large", ("streaming=auto", "streaming.memory_budget=30MB", "dtype=fp32", EQUAL, *SELF)),
        "batch drafts",
    ),
    "one rank streams, the other not": (
        *(2, "large"),
        (
            *("streaming=auto", "dtype=fp32", "parallel.split=[1,1]"),
            *("rank0 streaming.memory_budget=23MB", "rank1 streaming.memory_budget=1GB"),
        ),
        "batch",
    ),
    "features of layers, lent caches, native decode steps, draft model": (
        *(2, "gemma4", ("streaming=on", "dtype=bf16", *SELF)),
        "batch drafts",
    ),
    "latent": (2, "deepseek_v2", ("streaming=on", "dtype=fp32", "kv_dtype=q8_0", EQUAL), "batch"),
    "two adapters, dense, streamed": (
        *(2, "llama3"),
        (
            *("streaming=on", "dtype=bf16", EQUAL, "alone model.adapter=[FOLDER/tone:0.5,FOLDER/support]"),
            "rank0 model.adapter=[FOLDER/tone:0.5,FOLDER/support]",
            "rank1 model.adapter=[FOLDER/tone:0.5,FOLDER/other_path]",
        ),
        "batch",
    ),
    "an adapter beside packed matrices, draft model": (
        *(2, "packed.gguf", ("streaming=on", "dtype=fp32", "model.adapter=FOLDER/packed_support", EQUAL, *SELF)),
        "batch drafts",
    ),
    "shards of other ranks are missing": (2, "shards_RANK", ("streaming=on", "dtype=fp32"), "batch"),
    "parts of GGUF are missing": (
        *(2, "parts_RANK/m-00001-of-00003.gguf", ("streaming=off", "dtype=fp32")),
        "batch",
    ),
    "four ranks, windows, streamed, draft model": (
        *(4, "gemma3", ("streaming=on", "dtype=fp32", *SELF)),
        "batch drafts",
    ),
    "four ranks, recurrent, pages run out": (
        *(4, "qwen3_next", ("streaming=off", "dtype=fp32", "batching.cache_tokens=160")),
        "batch other_calls",
    ),
}
SLOW = {  # beside those of their kinds that run in CI
    "mixture",
    "latent",
    "an adapter beside packed matrices, draft model",
    "four ranks, recurrent, pages run out",
}


def of_ring(name: str) -> object:
    """Return the parameter of a test about a case of RING."""
    return pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())


NOTHING_TO_COPY = ("streaming=off", "dtype=fp32", "quant.format=q4_0", *SELF)

COMPILED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "dense, streamed": ("llama3", ("streaming=on", "dtype=bf16", "graph=compiled")),
    "windows, in groups of layers": (
        "gemma3",
        ("streaming=on", "streaming.layer_group_size=2", "dtype=fp32", "graph=compiled"),
    ),
    "recurrent, mixture": ("qwen3_next", ("streaming=on", "dtype=fp32", "graph=compiled")),
    "a format that no kernel multiplies": (
        "large",
        ("streaming=off", "dtype=bf16", "quant.format=tq1_0", "model.num_hidden_layers=3"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of all cases."""
    made = tmp_path_factory.mktemp("ring")
    for model in {model for _, model, _, _ in RING.values()} & {*BUILDERS}:
        save_tiny(model, made / model)
    torch.manual_seed(0)
    BUILDERS["llama3"](hidden_size=256, intermediate_size=1024, num_hidden_layers=12).save_pretrained(made / "large")
    save_shards(made)
    save_gguf_parts(made)
    save_adapters(made)
    return made


def save_adapters(made: Path) -> None:
    """Save a model with packed matrices, an adapter of it, and two of a dense model."""
    models = BUILDERS["llama3"](), BUILDERS["llama3"](), packed_file(made / "packed.gguf", "llama")
    for seed, (name, model) in enumerate(zip(("tone", "support", "packed_support"), models, strict=True)):
        shapes = {path: (*one.weight.shape,) for path, one in model.named_modules() if path.endswith("_proj")}
        write_peft(made / name, drawn(shapes, seed=seed))
    shutil.copytree(made / "support", made / "other_path")


SHARDS = {"a": ("model.embed", "model.norm", "lm_head", "model.layers.0."), "b": ("model.layers.1.", "model.layers.3.")}


def save_shards(made: Path) -> None:
    """Save a model of 6 layers as three shards, and for each of two ranks those that it has."""
    model = BUILDERS["llama3"](num_hidden_layers=6)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    shard_of = {name: next((shard for shard, of in SHARDS.items() if name.startswith(of)), "c") for name in tensors}
    for rank, shards in {"all": "abc", "0": "ac", "1": "b"}.items():
        folder = made / f"shards_{rank}"
        model.config.save_pretrained(folder)
        index = {"metadata": {}, "weight_map": {name: f"{shard}.safetensors" for name, shard in shard_of.items()}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for shard in shards:
            held = {name: tensor for name, tensor in tensors.items() if shard_of[name] == shard}
            save_file(held, folder / f"{shard}.safetensors", metadata={"format": "pt"})


def save_gguf_parts(made: Path) -> None:
    """Save a model as three parts of a split GGUF file, of which rank 0 lacks the second."""
    for rank in ("all", "0", "1"):
        (made / f"parts_{rank}").mkdir()
        model = llama_files.build("llama", num_hidden_layers=6)
        llama_files.write_gguf(made / f"parts_{rank}" / "m.gguf", model, "llama", most_tensors=19)
    (made / "parts_0" / "m-00002-of-00003.gguf").unlink()


def case_of(folder: Path, model: str, overrides: Sequence[str], ranks: int = 0, asked: str = "") -> Case:
    """Return a case with its model's folder, which also has the adapters."""
    given = tuple(one.replace("FOLDER", str(folder)) for one in overrides)
    return Case(str(folder / model), given, ranks, "answers", asked)


class Ring(NamedTuple):
    """What rank 0 finds in each case, and by rank, the errors that cases end with."""

    found: Mapping[str, Any]
    errors: Sequence[Mapping[str, str]]


@pytest.fixture(scope="module")
def ring(folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Ring:
    """What the ranks of all cases that run find, in four processes, as each takes seconds to start."""
    asking = {item.name.partition("[")[2].removesuffix("]") for item in request.session.items}
    needed = [name for name in RING if name not in SLOW or name in asking]
    cases = {
        name: case_of(folder, model, given, ranks, asked)
        for name, (ranks, model, given, asked) in RING.items()
        if name in needed
    }
    llama, fp32 = str(folder / "llama3"), ("dtype=fp32",)
    cases["nothing to copy"] = Case(llama, NOTHING_TO_COPY, 2, "load")
    cases.update(refused_cases(folder, tmp_path_factory.mktemp("refused")))
    recurrent = str(folder / "qwen3_next")
    cases["masks"] = Case(recurrent, ("streaming=off", LOOKUP, *fp32), 2, "masks")
    cases["save"] = Case(recurrent, ("streaming=on", *fp32), 2, "save", str(folder / "saved" / "ring.cache"))
    cases["files"] = Case(llama, ("parallel.split=[1,1]", *fp32), 2, "files", str(folder / "files"))
    for name in ("saved", "files"):
        (folder / name).mkdir()
    (folder / "files" / "taken.rank1").write_text("a poem")
    cases["refuse"] = Case(llama, ("batch_size=2", "parallel.split=[1,1]", *fp32), 2, "refuse")
    cases["stop"] = Case(llama, (), 2, "stop")
    cases["sleep"] = Case(llama, (), 3, "sleep")
    cases["lose"] = Case(llama, ("batch_size=1",), 3, "lose")  # the last, because it ends a process
    return Ring(*run_cases(4, cases, folder))


@functools.cache
def alone(folder: str, overrides: Sequence[str], asked: str) -> dict[str, Any]:
    """Return what one process answers, without drafts."""
    own = ("speculation", "parallel", "rank")
    case = Case(folder, tuple(one for one in overrides if not one.startswith(own)))
    threads = torch.get_num_threads()
    try:
        with closing(load(case, [])) as engine:
            return answers_of(engine, {}, asked)
    finally:
        torch.set_num_threads(threads)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that both have the same bits."""
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), f"{name} differs by {(found[name] - value).abs().max()}"
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("name", [of_ring(name) for name in RING])
def test_ranks_answer_as_one_process_to_the_bit(name: str, ring: Ring, folder: Path) -> None:
    ranks, model, given, asked = RING[name]
    case = case_of(folder, model, given)
    assert not any(name in errors for errors in ring.errors), ring.errors
    assert_same(ring.found[name], alone(case.folder, case.overrides, asked))
    assert any(note.startswith(f"{ranks} ranks have ") for note in ring.found[name]["notes"])


def test_a_rank_has_the_layers_whose_files_it_has(ring: Ring) -> None:
    missing = "shards of other ranks are missing", "parts of GGUF are missing"
    shards, parts = (" ".join(ring.found[name]["notes"]) for name in missing)
    assert "2 ranks have 4, 2 layers" in shards
    assert "2 ranks have 3, 3 layers" in parts


def test_a_budget_keeps_some_layers_of_each_rank_in_memory(ring: Ring) -> None:
    found = ring.found["larger, some layers stream, draft model"]
    assert 0 < len(found["streamed"]) < found["groups"]
    measured = ring.found["shards of other ranks are missing"]["notes"]
    said = (
        r"2 ranks have 4, 2 layers, and .* hand-overs; for a token rank 0 reads .*B at .*B/s, rank 1 reads .*B at .*B/s"
    )
    assert any(re.fullmatch(said, note) for note in measured)
    assert ring.found["convolutions, nothing streams, drafts"]["streamed"] == []


def test_a_ring_without_copies_for_a_draft_model_says_so(ring: Ring) -> None:
    said = (
        "speculation=self drafts nothing: nothing streams, and no matrix would be smaller in speculation.draft_format"
    )
    assert any(note.startswith(said) for note in ring.found["nothing to copy"])


@pytest.mark.parametrize("name", [of_ring(name) for name in RING if "draft" in name])
def test_ranks_check_drafts_and_accept_some(name: str, ring: Ring) -> None:
    found = ring.found[name]["speculation"]
    assert 20 < found["accepted_tokens"] < found["draft_tokens"] - 20
    assert (found["draft_steps"] > 20) == (found["kind"] == "self")


EVERY = {name: ("streaming=on", LOOKUP) if at % 2 else ("streaming=off",) for at, name in enumerate(BUILDERS)}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_of_every_family_answer_as_one_process_to_the_bit(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / name)
    case = Case(str(tmp_path / name), (*EVERY[name], "dtype=fp32"))
    assert_same(run_ranks(2, {name: case}, tmp_path)[name], alone(case.folder, case.overrides, ""))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if at else pytest.mark.thorough) for at, name in enumerate(COMPILED)],
)
def test_two_ranks_with_compiled_blocks_answer_as_one_process_to_the_bit(name: str, folder: Path) -> None:
    asked = "batch" if name == next(iter(COMPILED)) else ""  # in CI: each width of rows is compiled on both ranks
    case = case_of(folder, *COMPILED[name], asked=asked)
    found = run_ranks(2, {name: case}, folder)[name]
    assert_same(found, alone(case.folder, case.overrides, asked))
    assert found["graph"] == "compiled"


def test_requests_fail_and_all_ranks_end_when_one_is_lost(ring: Ring) -> None:
    said = ring.found["lose"]
    assert [line.partition(":")[0] for line in said] == ["request", "request", "failure", "later"]
    assert all("a process has ended, or the network has failed" in line for line in said)
    assert "lose" not in ring.errors[1], "the process has ended"
    assert ring.errors[2]["lose"].startswith("ParallelError: rank 2 of 3: ")


def test_a_rank_that_does_not_answer_is_noticed_while_nobody_asks(ring: Ring) -> None:
    assert ring.found["sleep"].startswith("rank 0 of 3: a rank did not answer")
    assert ring.errors[1]["sleep"] == "KeyboardInterrupt: rank 1 has slept"
    assert ring.errors[2]["sleep"].startswith("ParallelError: rank 2 of 3: a rank did not answer")


OTHER_SETTINGS = {  # by key the settings of rank 0 and of rank 1, and how their difference is said
    "streaming.policy": ("streaming=on", "streaming=auto", '"auto", not "on"'),
    "speculation.kind": ("speculation=off", "speculation=lookup", '"lookup", not "off"'),
    "dtype.name": ("dtype=fp32", "dtype=bf16", '"bf16", not "fp32"'),
    "parallel.split": ("parallel.split=[1,1]", "parallel.split=[2,1]", "[2.0, 1.0], not [1.0, 1.0]"),
    "parallel.transport": ("parallel.transport=gloo", "parallel.transport=auto", '"auto", not "gloo"'),
    "seed": ("seed=1", "seed=2", "2, not 1"),
}


def refused_cases(folder: Path, made: Path) -> dict[str, Case]:
    """Return cases of two ranks that end while they load; their files are made in a folder."""
    model, cases = str(folder / "llama3"), dict[str, Case]()

    def add(name: str, model: str, overrides: Sequence[str] = (), fault: str = "") -> None:
        cases[name] = Case(model, overrides, 2, "load", fault)

    for key, (one, other, _) in OTHER_SETTINGS.items():
        add(key, model, [f"rank0 {one}", f"rank1 {other}"])
    budgets = [f"rank{rank} streaming.memory_budget={budget}" for rank, budget in enumerate(("1GB", "1KiB"))]
    add("budget", model, ["streaming=on", *budgets])
    add("limits", model, ["rank0 context_length=64", "rank0 batch_size=2"])
    for name, ranks in (("gone", ("b", "b")), ("ends", ("bc", "abc"))):
        for rank, shards in enumerate(ranks):
            shutil.copytree(folder / "shards_all", made / f"{name}_{rank}")
            for shard in {*"abc"} - {*shards}:
                (made / f"{name}_{rank}" / f"{shard}.safetensors").unlink()
        add(name, str(made / f"{name}_RANK"))
    for rank in range(2):
        save_tiny("llama3", made / f"other_{rank}")
    weights = made / "other_1" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-4] ^= 1  # of the last weight
    weights.write_bytes(raw)
    add("other", str(made / "other_RANK"))
    adapters = [f"rank{rank} model.adapter={folder / 'tone'}{weight}" for rank, weight in enumerate(("", ":0.5"))]
    add("adapters", model, ["dtype=fp32", *adapters])
    shutil.copytree(folder / "llama3", made / "absent_0")
    add("absent", str(made / "absent_RANK"))
    for fault in (*FAULTS, *OTHER_FAULTS):
        add(fault, model, ["streaming=auto", "speculation=auto"], fault)
    return cases


@pytest.fixture
def refused(ring: Ring) -> Sequence[Mapping[str, str]]:
    """The errors of two ranks, by case."""
    return ring.errors[:2]


@pytest.mark.parametrize("key", OTHER_SETTINGS)
def test_ranks_with_other_settings_refuse_to_start(key: str, refused: Sequence[Mapping[str, str]]) -> None:
    said = f"{key} than rank 0: {OTHER_SETTINGS[key][2]}; start all ranks with the same settings"
    assert [errors[key] for errors in refused] == [f"ParallelError: rank 1 has other {said}"] * 2


def test_ranks_with_other_files_refuse_to_start(refused: Sequence[Mapping[str, str]]) -> None:
    for errors in refused:
        assert errors["other"].startswith("ParallelError: rank 1 has other files than rank 0: ")
        assert "copy the same model to all machines" in errors["other"]


def test_ranks_with_other_adapters_refuse_to_start(refused: Sequence[Mapping[str, str]]) -> None:
    for errors in refused:
        assert errors["adapters"].startswith("ParallelError: rank 1 has other adapters than rank 0: ")
        assert "give all ranks the same adapters" in errors["adapters"]


def test_limits_of_sequences_are_those_of_rank_0(refused: Sequence[Mapping[str, str]]) -> None:
    assert "limits" not in refused[0]


def test_files_that_no_rank_has_or_that_rank_0_needs_are_named(refused: Sequence[Mapping[str, str]]) -> None:
    first, second = refused
    gone = r"CheckpointNotFoundError: .*a\.safetensors is missing on every rank \(2 such files\); put"
    assert re.search(gone, first["gone"])
    assert re.search(gone, second["gone"])
    ends = r"a\.safetensors: rank 0 has embedding and head, and needs this file for embed_tokens"
    assert re.match(rf"CheckpointNotFoundError: .*{ends}", first["ends"])
    assert re.match(rf"ParallelError: rank 0 cannot run its share: .*{ends}", second["ends"])


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("budget", "PlanError: streaming=on needs "),
        ("absent", "CheckpointNotFoundError: checkpoint '"),
        *((fault, f"OSError: {path.rpartition('.')[2]} has failed") for fault, path in FAULTS.items()),
    ],
)
def test_an_error_of_one_rank_ends_the_others_with_it(
    case: str, said: str, refused: Sequence[Mapping[str, str]]
) -> None:
    first, second = refused
    assert second[case].startswith(said)
    assert first[case] == f"ParallelError: rank 1 cannot run its share: {second[case].partition(': ')[2]}"


def test_a_rank_that_is_lost_while_ranks_load_is_noticed_by_those_that_read_weights(
    refused: Sequence[Mapping[str, str]],
) -> None:
    first, second = refused
    assert second["losing"] == "KeyboardInterrupt: rank 1 ends"
    said = "a rank did not answer: a process has ended, or the network has failed; start all ranks again"
    assert first["losing"].startswith(f"ParallelError: rank 0 of 2: {said}")


def test_ranks_that_nccl_does_not_connect_say_so_at_once(refused: Sequence[Mapping[str, str]]) -> None:
    first, second = refused
    assert re.fullmatch(
        r"ParallelError: rank 1 of 2: NCCL did not connect the ranks: .*\. no route to rank 0", second["connecting"]
    )
    assert first["connecting"] == f"ParallelError: rank 1 cannot run its share: {second['connecting'][15:]}"


def test_an_error_of_a_follower_alone_reaches_rank_0_and_the_ring_goes_on_if_all_know_it(ring: Ring) -> None:
    one_row, no_row, answered, fault = ring.found["refuse"]
    assert one_row.startswith("SharedConfigError: rank 1: has room for rows [0] where rank 0 runs [0, 1]")
    assert no_row.startswith("SharedConfigError: rank 1: a row of 4 tokens does not fit in the KV cache's pages")
    assert answered.startswith("(2, 4, ")
    assert fault.startswith("ParallelError: rank 0 of 2: ")
    assert ring.errors[1]["refuse"] == "ConfigError: rank 1 has another opinion"


def test_closing_waits_no_longer_than_a_limit_for_a_rank_that_does_nothing(ring: Ring) -> None:
    assert 1 <= ring.found["stop"] < 3  # rank 1 sleeps for 4 s
    assert ring.errors[1]["stop"] == "KeyboardInterrupt: rank 1 has slept"


def test_late_masks_beside_drafts_of_a_recurrent_model_keep_ranks_together(ring: Ring) -> None:
    assert ring.found["masks"] is True
    assert "masks" not in ring.errors[1]


def test_a_saved_cache_has_a_part_of_each_rank_and_continues_to_the_bit(
    ring: Ring, folder: Path, tmp_path: Path
) -> None:
    case, saved = Case(str(folder / "qwen3_next"), ("streaming=on", "dtype=fp32")), folder / "saved"
    threads = torch.get_num_threads()
    try:
        assert ring.found["save"] == loaded_answer(case, str(tmp_path / "one.cache"))
    finally:
        torch.set_num_threads(threads)
    assert sorted(path.name for path in saved.iterdir()) == ["ring.cache", "ring.cache.rank1"]
    with pytest.raises(ConfigError, match=r"has only the layers 0,2,4 of rank 0 of 2; load it with parallel=ring"):
        Engine.load(case.folder, overrides=[*SIZES, "dtype=fp32"]).load_cache(saved / "ring.cache")


def test_a_cache_that_one_rank_cannot_save_or_load_is_refused_by_name_and_the_ring_goes_on(
    ring: Ring, folder: Path
) -> None:
    said, made = ring.found["files"], folder / "files"
    taken = re.escape(str(made / "taken.rank1"))
    assert re.match(rf"ConfigError: rank 1: {taken}: exists and is not a saved cache", said["taken"])
    assert re.match(r"ConfigError: rank 1: .*lost\.rank1: no such file", said["lost"])
    assert said["other"] == "ConfigError: rank 1: it has another prompt than rank 0; save the cache again"
    assert int(said["slow"]) > 9
    assert not (made / "taken").exists()
    assert not [*made.glob(".saving-*")]


def test_an_engine_that_is_freed_leaves_its_ring_and_two_at_once_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv(INTERFACE, "")  # so that it is as it was afterwards
    overrides = ["parallel=ring", f"threads={torch.get_num_threads()}"]
    first = Engine.load(folder / "llama3", device="cpu", overrides=overrides)
    with pytest.raises(ConfigError, match=r"this process has a process group of torch.distributed already"):
        Engine.load(folder / "llama3", device="cpu", overrides=overrides)
    first.close()
    freed = Engine.load(folder / "llama3", device="cpu", overrides=overrides)
    first.close()
    assert len(freed.submit([1, 2], max_new_tokens=3, ignore_eos=True).result(60).token_ids) == 3
    del freed
    end = time.monotonic() + 10  # its thread lets go of it when it wakes
    while torch.distributed.is_initialized() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert not torch.distributed.is_initialized()


def test_only_rank_0_has_an_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match=r"only rank 0 has an engine; the other ranks call .*follow with the same"):
        Engine.load(folder / "llama3", overrides=["parallel=ring"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["task=microbench"], "task=microbench does not work with parallel=ring yet"),
        (["model.fallback=transformers"], "model.fallback=transformers does not work with parallel=ring yet"),
        (["parallel.split=[inf,1]"], r"parallel.split=\[inf, 1.0\] must be a number above 0 for each rank"),
        (["parallel.split=[nan,1]"], r"parallel.split=\[nan, 1.0\] must be a number above 0 for each rank"),
        (
            ["speculation=auto", "speculation.draft_format=q4_0"],
            "speculation.draft_format=q4_0 has no effect with speculation=auto and parallel=ring",
        ),
        (["parallel.timeout=0"], "parallel.timeout=0.* must be a number of seconds above 0"),
    ],
)
def test_what_does_not_work_on_a_ring_is_refused_by_name(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose_settings(["parallel=ring", *overrides])


def test_keys_of_a_ring_have_no_effect_without_one() -> None:
    with pytest.raises(ConfigError, match=r"parallel.interface has no effect with parallel=off; add parallel=ring"):
        compose_settings(["parallel.interface=wg0"])


@pytest.mark.thorough
def test_torchrun_prints_what_one_process_prints(folder: Path, tmp_path: Path) -> None:
    add_tokenizer(folder / "llama3")
    model = [f"model.checkpoint={folder / 'llama3'}", "dtype=fp32", "streaming=on", "prompt=hello", "max_new_tokens=8"]
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_ports(1)[0]), str(RUN), "parallel=ring", "parallel.split=[2,1]", "threads=1"]
    together = subprocess.run(
        [*command, *model, f"hydra.run.dir={runs}/together"], capture_output=True, text=True, timeout=100
    )
    one = subprocess.run(
        [sys.executable, str(RUN), *model, "threads=1", f"hydra.run.dir={runs}/one"], capture_output=True, text=True
    )
    assert together.returncode == 0, together.stderr
    assert together.stdout == one.stdout
    assert "2 ranks have 2, 1 layers, and a pass has 2 hand-overs" in together.stderr
    assert json.loads((runs / "together" / "result.json").read_text())["status"] == "ok"
