"""Published checkpoints: their script against a Hub on localhost; with `pytest -m hub` against the real one."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants
from support.chat_folders import TINY
from support.fake_sources import FakeHub

from graphcore.config.compose import compose_settings
from graphcore.config.conf_folder import published_models

ROOT = Path(__file__).parents[2]
ON_THE_HUB = {one.name: one.nbytes for one in published_models() if one.precision == "full"}
SECONDS = 10  # to reach the Hub


def published(*arguments: str, **variables: str) -> tuple[int, list[dict[str, str]]]:
    """Run the script; return its exit status, and its table as rows by column."""
    command = [sys.executable, "-m", "benchmarks.published", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    columns, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return done.returncode, [dict(zip(columns, cells, strict=True)) for cells in rows]


@pytest.mark.thorough
def test_the_script_downloads_compares_and_times_and_says_what_is_not_there(tmp_path: Path) -> None:
    source = compose_settings(["model=llama3", "model.precision=full"]).model.checkpoint
    repository, _, commit = source.removeprefix("hf:").partition("@")
    hub = FakeHub({repository: {path.name: path.read_bytes() for path in (TINY / "llama3").iterdir()}})
    hub.commits["pinned"] = commit
    try:
        status, (llama, gpt2) = published(
            *("llama3", "gpt2", "device=cpu", "graph=eager", "dtype=fp32"),
            HF_ENDPOINT=hub.url,
            HF_HUB_CACHE=str(tmp_path / "hub"),
            HF_HUB_OFFLINE="0",
        )
    finally:
        hub.close()
    assert hub.downloaded.count("model.safetensors") == 1  # the second process finds it
    assert (llama["checkpoint"], llama["verify"], llama["layers"]) == (source, "ok", "2")
    assert llama["greedy tokens as transformers'"] == "32 of 32"
    assert float(llama["largest error (allowed)"].partition(" ")[0]) < 1e-4
    assert min(float(llama["prompt tokens/s"]), float(llama["decode tokens/s"])) > 0
    assert "openai-community/gpt2" in gpt2["verify"]  # which this Hub does not have
    assert status == 1


@pytest.mark.hub
@pytest.mark.parametrize("model", ON_THE_HUB)
def test_a_published_checkpoint_is_computed_as_transformers_computes_it(model: str) -> None:
    address = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=SECONDS).close()
    except OSError as error:
        pytest.skip(f"the Hub cannot be reached ({constants.ENDPOINT}: {error})")
    nbytes, folder = ON_THE_HUB[model], Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free
    if nbytes > free:
        pytest.skip(f"{nbytes} bytes to download, {free} are free in {folder}")
    _, (row,) = published(model, "streaming=auto")
    assert row["verify"] == "ok", row
    agreeing, _, tokens = row["greedy tokens as transformers'"].partition(" of ")
    assert agreeing == tokens or row["dtype"] != "fp32", row
    assert float(row["decode tokens/s"]) > 0
