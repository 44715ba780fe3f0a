"""parallel=ring: two and four processes answer as one does, to the bit; and what happens if one is lost or differs."""

import functools
import gc
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import llama_files
import pytest
import torch
from adapter_files import drawn, packed_file, write_peft
from ring_ranks import (
    FAULTS,
    OTHER_FAULTS,
    SIZES,
    Case,
    answers_of,
    ended,
    free_ports,
    load,
    loaded_answer,
    run_ranks,
    run_refused,
    start_ranks,
)
from safetensors.torch import save_file
from tiny_models import BUILDERS, add_tokenizer, save_tiny

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.errors import ConfigError
from graphcore.parallel.process_group import INTERFACE

SCRIPT = str(Path(__file__).parents[1] / "ring_ranks.py")
RUN = Path(__file__).parents[2] / "run.py"
SELF = ("speculation=self", "speculation.draft_format=q4_0")
LOOKUP = "speculation=lookup"
TWO: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "dense, resident": ("llama3", ("streaming=off", "dtype=fp32")),
    "dense, streamed, drafts": ("llama3", ("streaming=on", "dtype=bf16", LOOKUP)),
    "dense, pages run out": ("llama3", ("streaming=off", "dtype=fp32", "batching.cache_tokens=128")),
    "windows, in groups of layers": ("gemma3", ("streaming=on", "streaming.layer_group_size=2", "dtype=fp32")),
    "windows, draft model, pages run out": (
        "gemma3",
        ("streaming=on", "dtype=fp32", "batching.cache_tokens=128", *SELF),
    ),
    "quantised, nothing to copy": ("llama3", ("streaming=off", "dtype=fp32", "quant.format=q4_0", *SELF)),
    "recurrent, eager": ("qwen3_next", ("streaming=on", "graph=eager", "dtype=fp32")),
    "recurrent, pages run out": ("qwen3_next", ("streaming=off", "dtype=fp32", "batching.cache_tokens=128")),
    "recurrent, draft model": ("qwen3_5", ("streaming=on", "dtype=fp32", *SELF)),
    "convolutions, nothing streams, drafts": ("lfm2_moe", ("streaming=auto", "dtype=fp32", LOOKUP)),
    "mixture": ("qwen3_moe", ("streaming=on", "streaming.expert_cache=0", "dtype=fp32")),
    "larger, some layers stream, draft model": (
        "large",
        ("streaming=auto", "streaming.memory_budget=36MB", "dtype=fp32", *SELF),
    ),
    "one rank streams, the other not": (
        "large",
        (
            *(
                "streaming=auto",
                "dtype=fp32",
                "rank0 streaming.memory_budget=30MB",
                "rank1 streaming.memory_budget=1GB",
            ),
            *("rank0 parallel.split=[1,1]", "rank1 parallel.split=[1,1]"),
        ),
    ),
    "features of layers, lent caches, draft model": (
        "gemma4",
        ("streaming=on", "dtype=fp32", *SELF),
    ),
    "features of layers, lent caches, native decode steps": ("gemma4", ("streaming=on", "dtype=bf16")),
    "features of layers, lent caches, eager": ("gemma4", ("streaming=off", "dtype=fp32", "graph=eager")),
    "lent caches": ("gemma4_unified", ("streaming=on", "dtype=bf16", LOOKUP)),
    "latent": ("deepseek_v2", ("streaming=on", "dtype=fp32", "kv_dtype=q8_0")),
    "two adapters, dense, streamed": (
        "llama3",
        (
            *("streaming=on", "dtype=bf16", "alone model.adapter=[FOLDER/tone:0.5,FOLDER/support]"),
            "rank0 model.adapter=[FOLDER/tone:0.5,FOLDER/support]",
            "rank1 model.adapter=[FOLDER/tone:0.5,FOLDER/other_path]",
        ),
    ),
    "an adapter beside packed matrices, draft model": (
        "packed.gguf",
        ("streaming=on", "dtype=fp32", "model.adapter=FOLDER/packed_support", *SELF),
    ),
    "shards of other ranks are missing": ("shards_RANK", ("streaming=on", "dtype=fp32")),
    "parts of GGUF are missing": ("parts_RANK/m-00001-of-00003.gguf", ("streaming=off", "dtype=fp32")),
}
FOUR: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "windows, streamed, draft model": ("gemma3", ("streaming=on", "dtype=fp32", *SELF)),
    "recurrent, resident": ("qwen3_next", ("streaming=off", "dtype=fp32", "batching.cache_tokens=160")),
}

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
    for model in {model for model, _ in (*TWO.values(), *FOUR.values())} & {*BUILDERS}:
        save_tiny(model, made / model)
    torch.manual_seed(0)
    BUILDERS["llama3"](hidden_size=256, intermediate_size=1024, num_hidden_layers=20).save_pretrained(made / "large")
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


def case_of(folder: Path, given: tuple[str, tuple[str, ...]]) -> Case:
    """Return a case with its model's folder, which also has the adapters."""
    return Case(str(folder / given[0]), tuple(one.replace("FOLDER", str(folder)) for one in given[1]))


@pytest.fixture(scope="module")
def of_two(folder: Path) -> dict[str, Any]:
    """What rank 0 of two answers."""
    return run_ranks(2, {name: case_of(folder, given) for name, given in TWO.items()}, folder)


@pytest.fixture(scope="module")
def of_four(folder: Path) -> dict[str, Any]:
    """What rank 0 of four answers."""
    return run_ranks(4, {name: case_of(folder, given) for name, given in FOUR.items()}, folder)


@functools.cache
def alone(case: Case) -> dict[str, Any]:
    """Return what one process answers, without drafts."""
    case = Case(case.folder, tuple(one for one in case.overrides if not one.startswith("speculation")))
    threads = torch.get_num_threads()
    try:
        with closing(load(case, [])) as engine:
            return answers_of(engine, {})
    finally:
        torch.set_num_threads(threads)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that both have the same bits."""
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), f"{name} differs by {(found[name] - value).abs().max()}"
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_answer_as_one_process_to_the_bit(name: str, of_two: dict[str, Any], folder: Path) -> None:
    assert_same(of_two[name], alone(case_of(folder, TWO[name])))
    assert any(note.startswith("2 ranks have ") for note in of_two[name]["notes"])


def test_a_rank_has_the_layers_whose_files_it_has(of_two: dict[str, Any]) -> None:
    notes = {name: " ".join(of_two[name]["notes"]) for name in of_two}
    assert "2 ranks have 4, 2 layers" in notes["shards of other ranks are missing"]
    assert "2 ranks have 3, 3 layers" in notes["parts of GGUF are missing"]


def test_a_budget_keeps_some_layers_of_each_rank_in_memory(of_two: dict[str, Any]) -> None:
    found = of_two["larger, some layers stream, draft model"]
    assert 0 < len(found["streamed"]) < found["groups"]
    note = next(note for note in found["notes"] if note.startswith("2 ranks have "))
    counts = [int(count) for count in re.findall(r"\d+", note.partition(" layers")[0])][1:]
    assert sum(counts) == 20
    assert re.search(r"hand-overs; for a token rank 0 reads .*B at .*B/s, rank 1 reads .*B at .*B/s$", note)
    assert of_two["convolutions, nothing streams, drafts"]["streamed"] == []


def test_a_ring_without_copies_for_a_draft_model_says_so(of_two: dict[str, Any]) -> None:
    said = (
        "speculation=self drafts nothing: nothing streams, and no matrix would be smaller in speculation.draft_format"
    )
    assert any(note.startswith(said) for note in of_two["quantised, nothing to copy"]["notes"])


@pytest.mark.parametrize("name", [name for name in TWO if "draft" in name])
def test_two_ranks_check_drafts_and_accept_some(name: str, of_two: dict[str, Any]) -> None:
    found = of_two[name]["speculation"]
    assert 20 < found["accepted_tokens"] < found["draft_tokens"] - 20
    assert (found["draft_steps"] > 20) == (found["kind"] == "self")


EVERY = {name: ("streaming=on", LOOKUP) if at % 2 else ("streaming=off",) for at, name in enumerate(BUILDERS)}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_of_every_family_answer_as_one_process_to_the_bit(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / name)
    case = Case(str(tmp_path / name), (*EVERY[name], "dtype=fp32"))
    assert_same(run_ranks(2, {name: case}, tmp_path)[name], alone(case))


@pytest.mark.thorough
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_answer_as_one_process_to_the_bit(name: str, of_four: dict[str, Any], folder: Path) -> None:
    assert_same(of_four[name], alone(case_of(folder, FOUR[name])))
    assert any(note.startswith("4 ranks have ") for note in of_four[name]["notes"])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if at else pytest.mark.thorough) for at, name in enumerate(COMPILED)],
)
def test_two_ranks_with_compiled_blocks_answer_as_one_process_to_the_bit(name: str, folder: Path) -> None:
    case = case_of(folder, COMPILED[name])
    found = run_ranks(2, {name: case}, folder)[name]
    assert_same(found, alone(case))
    assert found["graph"] == "compiled"


def test_requests_fail_and_all_ranks_end_when_one_is_lost(folder: Path) -> None:
    given = [str(folder / "llama3"), "batch_size=1", "lose"]
    first, lost, other = ended(start_ranks(SCRIPT, [given] * 3, *free_ports(1)), seconds=60)
    assert lost.status == 9
    said = first.errors.splitlines()
    lines = [line for line in said if line.startswith(("request:", "failure:", "later:"))]
    assert [line.partition(":")[0] for line in lines] == ["request", "request", "failure", "later"]
    assert all("a process has ended, or the network has failed" in line for line in lines)
    assert (first.status, other.status) == (0, 1)
    assert "ParallelError: rank 2 of 3: " in other.errors


@pytest.mark.thorough
def test_a_rank_that_does_not_answer_is_noticed_while_nobody_asks(folder: Path) -> None:
    given = [str(folder / "llama3"), "sleep"]
    first, sleeping, other = ended(start_ranks(SCRIPT, [given] * 3, *free_ports(1)), seconds=60)
    assert "noticed: rank 0 of 3: a rank did not answer" in first.errors
    assert (first.status, sleeping.status, other.status) == (0, 9, 1)
    assert "ParallelError: rank 2 of 3: a rank did not answer" in other.errors


OTHER_SETTINGS = {  # by key the settings of rank 0 and of rank 1, and how their difference is said
    "streaming.policy": ("streaming=on", "streaming=auto", '"auto", not "on"'),
    "speculation.kind": ("speculation=off", "speculation=lookup", '"lookup", not "off"'),
    "dtype.name": ("dtype=fp32", "dtype=bf16", '"bf16", not "fp32"'),
    "parallel.split": ("parallel.split=[1,1]", "parallel.split=[2,1]", "[2.0, 1.0], not [1.0, 1.0]"),
    "parallel.transport": ("parallel.transport=gloo", "parallel.transport=auto", '"auto", not "gloo"'),
    "seed": ("seed=1", "seed=2", "2, not 1"),
}


@pytest.fixture(scope="module")
def refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The error of each of two ranks in every case that ends while they load."""
    made = tmp_path_factory.mktemp("refused")
    model = str(folder / "llama3")
    settings = OTHER_SETTINGS.items()
    cases = {key: (Case(model, [f"rank0 {one}", f"rank1 {other}"]), "") for key, (one, other, _) in settings}
    budgets = [f"rank{rank} streaming.memory_budget={budget}" for rank, budget in enumerate(("1GB", "1KiB"))]
    cases["budget"] = Case(model, ["streaming=on", *budgets]), ""
    cases["limits"] = Case(model, ["rank0 context_length=64", "rank0 batch_size=2"]), ""
    for name, ranks in (("gone", ("b", "b")), ("ends", ("bc", "abc"))):
        for rank, shards in enumerate(ranks):
            shutil.copytree(folder / "shards_all", made / f"{name}_{rank}")
            for shard in {*"abc"} - {*shards}:
                (made / f"{name}_{rank}" / f"{shard}.safetensors").unlink()
        cases[name] = Case(str(made / f"{name}_RANK"), []), ""
    for rank in range(2):
        save_tiny("llama3", made / f"other_{rank}")
    weights = made / "other_1" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-4] ^= 1  # of the last weight
    weights.write_bytes(raw)
    cases["other"] = Case(str(made / "other_RANK"), []), ""
    adapters = [f"rank{rank} model.adapter={folder / 'tone'}{weight}" for rank, weight in enumerate(("", ":0.5"))]
    cases["adapters"] = Case(model, ["dtype=fp32", *adapters]), ""
    shutil.copytree(folder / "llama3", made / "absent_0")
    cases["absent"] = Case(str(made / "absent_RANK"), []), ""
    for fault in (*FAULTS, *OTHER_FAULTS):
        cases[fault] = Case(model, ["streaming=auto", "speculation=auto"]), fault
    return run_refused(cases, made)


@pytest.mark.parametrize("key", OTHER_SETTINGS)
def test_ranks_with_other_settings_refuse_to_start(key: str, refused: list[dict[str, str]]) -> None:
    said = f"{key} than rank 0: {OTHER_SETTINGS[key][2]}; start all ranks with the same settings"
    assert [errors[key] for errors in refused] == [f"ParallelError: rank 1 has other {said}"] * 2


def test_ranks_with_other_files_refuse_to_start(refused: list[dict[str, str]]) -> None:
    for errors in refused:
        assert errors["other"].startswith("ParallelError: rank 1 has other files than rank 0: ")
        assert "copy the same model to all machines" in errors["other"]


def test_ranks_with_other_adapters_refuse_to_start(refused: list[dict[str, str]]) -> None:
    for errors in refused:
        assert errors["adapters"].startswith("ParallelError: rank 1 has other adapters than rank 0: ")
        assert "give all ranks the same adapters" in errors["adapters"]


def test_limits_of_sequences_are_those_of_rank_0(refused: list[dict[str, str]]) -> None:
    assert "limits" not in refused[0]


def test_files_that_no_rank_has_or_that_rank_0_needs_are_named(refused: list[dict[str, str]]) -> None:
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
def test_an_error_of_one_rank_ends_the_others_with_it(case: str, said: str, refused: list[dict[str, str]]) -> None:
    first, second = refused
    assert second[case].startswith(said)
    assert first[case] == f"ParallelError: rank 1 cannot run its share: {second[case].partition(': ')[2]}"


def test_a_rank_that_is_lost_while_ranks_load_is_noticed_by_those_that_read_weights(
    refused: list[dict[str, str]],
) -> None:
    first, second = refused
    assert second["losing"] == "KeyboardInterrupt: rank 1 ends"
    said = "a rank did not answer: a process has ended, or the network has failed; start all ranks again"
    assert first["losing"].startswith(f"ParallelError: rank 0 of 2: {said}")


def test_ranks_that_nccl_does_not_connect_say_so_at_once(refused: list[dict[str, str]]) -> None:
    first, second = refused
    assert re.fullmatch(
        r"ParallelError: rank 1 of 2: NCCL did not connect the ranks: .*\. no route to rank 0", second["connecting"]
    )
    assert first["connecting"] == f"ParallelError: rank 1 cannot run its share: {second['connecting'][15:]}"


@pytest.mark.thorough
def test_closing_waits_no_longer_than_a_limit_for_a_rank_that_does_nothing(folder: Path) -> None:
    given = [str(folder / "llama3"), "stop"]
    first, stopped = ended(start_ranks(SCRIPT, [given] * 2, *free_ports(1)), seconds=60)
    assert (first.status, stopped.status) == (0, 9)
    assert 1 <= float(first.errors.partition("closed: ")[2].split()[0]) < 3  # rank 1 sleeps for 4 s


@pytest.mark.thorough
def test_late_masks_beside_drafts_of_a_recurrent_model_keep_ranks_together(folder: Path) -> None:
    given = [str(folder / "qwen3_next"), "streaming=off", "dtype=fp32", "speculation=lookup", "masks"]
    first, second = ended(start_ranks(SCRIPT, [given] * 2, *free_ports(1)), seconds=60)
    assert (first.status, second.status) == (0, 0), first.errors + second.errors
    assert "answered" in first.errors


@pytest.mark.thorough
def test_a_saved_cache_has_a_part_of_each_rank_and_continues_to_the_bit(folder: Path, tmp_path: Path) -> None:
    given = [str(folder / "qwen3_next"), "streaming=on", "dtype=fp32", "save", str(tmp_path / "ring.cache")]
    first, second = ended(start_ranks(SCRIPT, [given] * 2, *free_ports(1)), seconds=60)
    assert (first.status, second.status) == (0, 0), first.errors + second.errors
    threads = torch.get_num_threads()
    try:
        case = Case(str(folder / "qwen3_next"), ("streaming=on", "dtype=fp32"))
        expected = loaded_answer(case, str(tmp_path / "one.cache"))
    finally:
        torch.set_num_threads(threads)
    assert expected[0] in first.errors
    assert sorted(path.name for path in tmp_path.glob("ring*")) == ["ring.cache", "ring.cache.rank1"]
    with pytest.raises(ConfigError, match=r"has only the layers 0,2,4 of rank 0 of 2; load it with parallel=ring"):
        Engine.load(case.folder, overrides=[*SIZES, "dtype=fp32"]).load_cache(tmp_path / "ring.cache")


def test_a_cache_that_one_rank_cannot_save_or_load_is_refused_by_name_and_the_ring_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "taken.rank1").write_text("a poem")
    given = [str(folder / "llama3"), "dtype=fp32", "parallel.split=[1,1]", "files", str(tmp_path)]
    first, second = ended(start_ranks(SCRIPT, [given] * 2, *free_ports(1)), seconds=60)
    assert (first.status, second.status) == (0, 0), first.errors + second.errors
    taken = re.escape(str(tmp_path / "taken.rank1"))
    assert re.search(rf"taken: ConfigError: rank 1: {taken}: exists and is not a saved cache", first.errors)
    assert re.search(r"lost: ConfigError: rank 1: .*lost\.rank1: no such file", first.errors)
    assert "other: ConfigError: rank 1: it has another prompt than rank 0; save the cache again" in first.errors
    assert re.search(r"slow: \d\d\n", first.errors)
    assert not (tmp_path / "taken").exists()
    assert not [*tmp_path.glob(".saving-*")]


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
