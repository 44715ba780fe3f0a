"""Lists of what a graph runs: in order, kept by GPU and torch version, and a drift can be read."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphcore import Engine
from graphcore.errors import GraphError
from graphcore.tasks.graph_nodes import MOST_LINES, decode_nodes, drift, golden_path, names_in_order, write_nodes

TINY = Path(__file__).parents[2] / "golden" / "tiny"


def event(name: str, start: float, device: str = "CUDA") -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=SimpleNamespace(name=device), time_range=SimpleNamespace(start=start))


def test_what_ran_on_the_device_is_listed_in_the_order_of_time() -> None:
    events = [event("third", 9.0), event("cudaGraphLaunch", 0.5, "CPU"), event("first", 1.0), event("second", 2.5)]
    assert names_in_order(events) == ["first", "second", "third"]


def test_a_list_is_kept_for_each_gpu_and_torch_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 (SXM)")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    path = golden_path(tmp_path, "llama-bf16-batch1", torch.device("cuda", 0))
    assert path == tmp_path / "nvidia-h200-sxm-torch-2.13.0" / "llama-bf16-batch1.txt"


def test_a_drift_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "one.txt"
    with pytest.raises(FileNotFoundError):
        drift(["a"], path)
    layers = ["norm", "product", "attend", "product"] * 8
    write_nodes(layers, path)
    assert drift(layers, path) == ""
    assert drift([*layers[:6], "attend_part", "attend_sum", *layers[7:]], path).splitlines() == [
        f"{path}: 32 nodes were kept, 33 ran",
        "    8 -> 7 times  attend",
        "    0 -> 1 times  attend_part",
        "    0 -> 1 times  attend_sum",
        "- 6: attend",
        "+ 6: attend_part",
        "+ 7: attend_sum",
    ]
    assert drift(layers[:-4], path).splitlines()[1:] == [
        "    8 -> 7 times  norm",
        "    16 -> 14 times  product",
        "    8 -> 7 times  attend",
        *(f"- {28 + at}: {name}" for at, name in enumerate(layers[:4])),
    ]
    assert "+ 32: copy" in drift([*layers, "copy"], path)
    assert drift([layers[1], layers[0], *layers[2:]], path).splitlines()[0].endswith("32 nodes were kept, 32 ran")
    whole = drift([f"other {index}" for index in range(500)], path).splitlines()
    assert len(whole) == MOST_LINES + 2
    assert whole[-1].endswith("more lines")


def test_without_cuda_graphs_there_is_no_list() -> None:
    with (
        Engine.load(TINY / "qwen3", graph="eager", device="cpu") as engine,
        pytest.raises(GraphError, match="no CUDA graphs on cpu with graph=eager"),
    ):
        decode_nodes(engine)
