"""What each captured graph launches, in order, is what golden/captured_graphs.txt says: with kernels, and compiled.

A compiled block is one line, its function's name: golden/graphs has what Inductor makes of it. What stands between the
blocks, inputs, copies from and to the boundary buffers, and the choice of a token, is torch's. Nothing is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from support.golden_models import write_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph import compile as compiling
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.gpu.capture import CapturedStep, captured_steps
from graphcore.graph.gpu.kernel_decode import DeviceBlocks
from graphcore.graph.program import Program
from graphcore.weights.groups import split_layers

GOLDEN = Path(__file__).parents[3] / "golden" / "captured_graphs.txt"
MODELS = ("dense", "window", "mixture", "recurrent", "latent")
BLOCKS = ("kernels", "compiled")
CHUNK = 16


@dataclass
class Launches:
    """Writes down the names of what is launched; a compiled function is one launch.

    Attributes:
        names: kernels of Triton, torch's ops as "aten ...", and compiled functions, in order.
    """

    names: list[str] = field(default_factory=list)
    is_inside: bool = False

    def compile_whole(self, function: Callable[..., Any], name: str, is_guarded: bool = True) -> Callable[..., Any]:
        def run(*arguments: object) -> object:
            self.names.append(name)
            self.is_inside = True
            try:
                return function(*arguments)
            finally:
                self.is_inside = False

        return run

    def launch(self, kernel: Any, *_: object, **__: object) -> None:
        self.add(kernel.fn.__name__.lstrip("_"))

    def add(self, name: str) -> None:
        if not self.is_inside:
            self.names.append(name)

    def of(self, step: CapturedStep) -> list[str]:
        """Return what a graph of the step's steps launches."""
        self.names.clear()
        ops = self

        class TorchOps(TorchDispatchMode):
            def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
                if not op.is_view and not any(word in op.name() for word in ("empty", "promote_types")):
                    ops.add(op.name().replace("::", " "))
                return op(*args, **(kwargs or {}))

        with TorchOps():
            for one in step.steps:
                one.replay()
        return [*self.names]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    if torch.cuda.is_available():
        pytest.skip("tests/cuda/test_cuda_kernel_lists.py has the lists of a GPU")
    found = Launches()
    monkeypatch.setattr(compiling, "compile_whole", found.compile_whole)
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *args, **options: found.launch(self))
    return found


@pytest.fixture(scope="module")
def builder_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], GraphBuilder]]:
    """A function to the builder of an eager engine of two layers, by kind of block."""
    engines: dict[str, Engine] = {}

    def builder(name: str) -> GraphBuilder:
        if name not in engines:
            folder = write_checkpoint(name, tmp_path_factory.mktemp(name))
            sizes = ["context_length=96", f"prefill_chunk={CHUNK}", "batch_size=2"]
            engines[name] = Engine.load(folder, dtype="bf16", device="cpu", graph="eager", overrides=sizes)
        runner = engines[name].runner
        assert isinstance(runner, ProgramRunner)
        return runner.builder

    yield builder
    for engine in engines.values():
        engine.close()


def capturing(own: GraphBuilder, blocks: str, streamed: Sequence[int]) -> GraphBuilder:
    """Return a builder of CUDA graphs over the same weights and caches. Args: blocks: "kernels" or "compiled"."""
    groups = split_layers(len(own.decoder.layers), 1)
    kernels = DeviceBlocks.allocate(own.caches, own.device) if blocks == "kernels" else None
    sizes = (groups, own.caches, own.context, own.device)
    made = GraphBuilder(own.decoder, "captured", *sizes, streamed=streamed, decode_kernels=kernels)
    made.captured_chunk = CHUNK
    return made


def lists_of(program: Program, launches: Launches) -> Iterator[str]:
    """Yield a line for each graph of a program: the groups whose weights it reads, and its launches."""
    program.state.span.counts.fill_(1)
    for step in captured_steps(program.steps):
        runs = [(name, len([*same])) for name, same in groupby(launches.of(step))]
        yield f"  graph {step.group}: " + ", ".join(name if count == 1 else f"{count} {name}" for name, count in runs)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", MODELS)
def test_each_captured_graph_launches_what_is_written_down(
    name: str,
    blocks: str,
    launches: Launches,
    builder_of: Callable[[str], GraphBuilder],
    request: pytest.FixtureRequest,
) -> None:
    """With `--kernel-lists tests/golden` the file's part is written instead: look it through and commit it."""
    found: dict[str, list[str]] = {}
    with torch.inference_mode():
        for streamed in ((), (1,)):
            where = f"{name}, {blocks}, layer 0 {'streamed' if streamed else 'resident'}"
            builder = capturing(builder_of(name), blocks, streamed)
            found[f"{where}, decode"] = [*lists_of(builder.decode(2, is_greedy=True), launches)]
            if blocks == "compiled":  # prompts are, whatever decode steps consist of
                whole = builder.captured_prefill(builder.prefill(1, first=1), CHUNK)
                found[f"{where}, chunk"] = [*lists_of(whole.without_head(), launches)]
    golden = read_lists(GOLDEN)
    folder: Path | None = request.config.getoption("--kernel-lists")
    if folder is not None:
        write_lists(folder / GOLDEN.name, {**read_lists(folder / GOLDEN.name), **found})
        pytest.fail(f"{folder / GOLDEN.name} is written: look it through and commit it", pytrace=False)
    for key, lines in found.items():
        assert lines == golden.get(key), (
            f"{key}: {GOLDEN.name} differs; `pytest {__file__} --kernel-lists tests/golden`"
        )


def test_no_list_is_left_of_what_no_test_makes() -> None:
    keys = {tuple(key.split(", ")[:2]) for key in read_lists(GOLDEN)}
    assert keys == {(name, blocks) for name in MODELS for blocks in BLOCKS}


def read_lists(path: Path) -> dict[str, list[str]]:
    """Return the lines below each title."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if not line.startswith(" "):
            key = line
            found[key] = []
        else:
            found[key].append(line)
    return found


def write_lists(path: Path, lists: dict[str, list[str]]) -> None:
    path.write_text("".join("\n".join([key, *lines, ""]) for key, lines in lists.items()), encoding="utf-8")
