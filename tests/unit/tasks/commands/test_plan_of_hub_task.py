"""task=plan of a repository reads its headers by HTTP ranges, and plans as if all files were there."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from support.chat_folders import TINY
from support.fake_sources import COMMIT, FakeHub, hub_of
from support.task_runs import RunTask

from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.checkpoint.sources import remote_headers
from graphcore.checkpoint.sources.remote_headers import fetch_headers
from graphcore.checkpoint.sources.source import HubSource

GOLDEN = Path(__file__).parents[3] / "golden"
BLOCK = 1024  # bytes; the headers of tiny models are longer, as those of large ones are than the real block
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CONFIGS = ("config.json", "generation_config.json", "model.safetensors.index.json")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def split(folder: Path, target: Path) -> dict[str, bytes]:
    """The model in two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    half = sorted(tensors)[: len(tensors) // 2]
    target.mkdir()
    save_file({name: tensors[name] for name in half}, target / ONE)
    save_file({name: tensors[name] for name in tensors if name not in half}, target / TWO)
    index = {"weight_map": {name: ONE if name in half else TWO for name in tensors}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return contents(target)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setattr(remote_headers, "BLOCK", BLOCK)
    repositories = {
        "org/plain": contents(TINY / "llama3"),
        "org/sharded": split(TINY / "llama3", tmp_path / "sharded"),
        "org/nf4": contents(GOLDEN / "quantised_folders" / "llama_nf4"),
        "org/gptq": contents(GOLDEN / "quantised_folders" / "llama_gptq"),
        "org/gguf": {"m-F32.gguf": (TINY / "llama3.gguf").read_bytes(), "m-Q8_0.gguf": b"no"},
    }
    with hub_of(monkeypatch, repositories, tmp_path / "hub") as fake:
        yield fake


@pytest.mark.parametrize("name", ["nf4", "gptq"])
def test_quantised_folders_are_planned_from_headers(run_task: RunTask, hub: FakeHub, name: str) -> None:
    """The shapes of NF4 weights are in tensors of their own, which are read, too."""
    check(plan(run_task, f"hf:org/{name}"), plan(run_task, GOLDEN / "quantised_folders" / f"llama_{name}"))


def plan(run_task: RunTask, checkpoint: object, *overrides: str) -> dict[str, Any]:
    run = run_task("task=plan", f"model.checkpoint='{checkpoint}'", "context_length=64", *overrides)
    assert run.error is None
    return run.record


def header_nbytes(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def check(record: dict[str, Any], local: dict[str, Any]) -> None:
    for key in ("groups", "memory", "fits", "dtype", "context_length", "graph"):
        assert record[key] == local[key], key
    (note,) = (note for note in record["notes"] if "headers" in note)
    assert note.startswith("planned from headers: ")
    assert note.endswith("were read from the Hub, and nothing was downloaded")


@pytest.mark.parametrize("repository", ["plain", "sharded"])
def test_only_configs_and_headers_of_safetensors_are_read(
    run_task: RunTask, hub: FakeHub, tmp_path: Path, repository: str
) -> None:
    record = plan(run_task, f"hf:org/{repository}")
    files = hub.repositories[f"org/{repository}"]
    assert isinstance(files, dict)
    weights = [content for name, content in files.items() if name.endswith(".safetensors")]
    configs = sum(len(content) for name, content in files.items() if name in CONFIGS)
    assert hub.nbytes == configs + sum(max(header_nbytes(content), BLOCK) for content in weights)
    assert hub.nbytes < sum(map(len, weights)) / 4
    assert record["model"]["source"] == f"hf:org/{repository}"
    assert not (tmp_path / "hub").exists()
    check(record, plan(run_task, TINY / "llama3"))


def test_only_the_header_of_a_gguf_file_is_read(run_task: RunTask, hub: FakeHub, tmp_path: Path) -> None:
    record = plan(run_task, "hf:org/gguf:f32")
    begin = gguf.GGUFReader(TINY / "llama3.gguf").data_offset
    assert begin <= hub.nbytes <= begin + BLOCK + 4096  # the last block, and a tensor of rotary factors
    assert not (tmp_path / "hub").exists()
    check(record, plan(run_task, TINY / "llama3.gguf"))


def test_rotary_factors_of_a_gguf_file_are_read_with_its_header(hub: FakeHub, tmp_path: Path) -> None:
    stored = open_checkpoint(TINY / "llama3.gguf")
    name = "rope_freqs.weight"
    headers = fetch_headers(HubSource("org/gguf", tag="F32"), tmp_path / "local", lambda *event: None)
    local = open_checkpoint(headers.path)
    assert dict(local.tensors).keys() == dict(stored.tensors).keys()
    assert np.array_equal(local.read(name).numpy(), stored.read(name).numpy())
    assert headers.nbytes == (TINY / "llama3.gguf").stat().st_size
    assert headers.read_nbytes == hub.nbytes


def test_streaming_from_files_that_are_not_there_is_not_timed(run_task: RunTask, hub: FakeHub) -> None:
    record = plan(run_task, "hf:org/plain", "streaming=on")
    assert record["predicted"]["tokens_per_second"] is None
    assert plan(run_task, TINY / "llama3", "streaming=on")["predicted"]["tokens_per_second"] is not None
    assert record["fits"]


def test_the_fallback_is_planned_from_headers_too(run_task: RunTask, hub: FakeHub) -> None:
    record = plan(run_task, "hf:org/plain", "model.fallback=transformers")
    assert record["memory"] == plan(run_task, TINY / "llama3", "model.fallback=transformers")["memory"]
    assert hub.nbytes < 20_000


def test_a_model_in_the_cache_is_planned_without_the_hub(run_task: RunTask, hub: FakeHub) -> None:
    snapshot_download("org/plain")
    hub.requests.clear()
    record = plan(run_task, "hf:org/plain")
    assert hub.requests == []
    assert not any("headers" in note for note in record["notes"])


def test_a_server_without_ranges_is_refused_before_the_weights_are_read(run_task: RunTask, hub: FakeHub) -> None:
    hub.gives_ranges = False
    run = run_task("task=plan", f"model.checkpoint=hf:org/plain@{COMMIT}", "context_length=64")
    assert "the server gives no parts of files; download the model first" in str(run.error)


def test_a_model_group_that_the_hub_does_not_give_is_planned_from_its_shapes(run_task: RunTask, hub: FakeHub) -> None:
    elsewhere = ("task=plan", "task.ram=64GiB", "task.bandwidth=1GB/s", "context_length=64")
    record = run_task(*elsewhere, "model=llama3").record
    same = run_task(*elsewhere, "model=llama3", "model.checkpoint=random:q4_k").record
    assert (record["memory"], record["predicted"]) == (same["memory"], same["predicted"])
    (note,) = (note for note in record["notes"] if "shapes" in note)
    assert note.startswith(
        "planned from the shapes in conf/, 727.6 MiB as random:q4_k for the 770.3 MiB of llama3: hf:"
    )
    larger = run_task(*elsewhere, "model=llama3", "model.precision=full").record
    assert larger["memory"]["weight_bytes"] > 3 * record["memory"]["weight_bytes"]
    packed = run_task(*elsewhere, "model=qwen3_moe", "model.precision=full")  # its experts would be drawn in mxfp4
    assert "hf:Qwen/Qwen3-30B-A3B is not there" in str(packed.error)
    cure = re.search(
        r"or plan its shapes with (model\.checkpoint=random:), whose weights take 17\.21 GiB, not", str(packed.error)
    )
    assert cure is not None, packed.error
    roomy = run_task(*elsewhere, "model=qwen3_moe", "model.precision=full", cure[1])
    assert roomy.record["fits"]
    other = run_task(*elsewhere, "model=llama3", "model.checkpoint=hf:org/none")
    assert "hf:org/none is not there" in str(other.error)
