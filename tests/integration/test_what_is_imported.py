"""What a start brings in: each package here costs more time than the rest of the start may take."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.tiny_models import ARCHITECTURES, TinyModel

from graphcore.device import find_cpp_compiler

TINY = Path(__file__).parents[1] / "golden" / "tiny"
COMPILER = ("torch._dynamo", "torch._inductor", "torch.onnx", "sympy", "triton", "networkx")
RARE = ("transformers", "matplotlib", "gguf", "huggingface_hub", "pandas", "scipy", "graphcore.export")
PROGRAM = """
import json, sys
from graphcore.cli.main import main
names = json.loads(sys.argv.pop(1))
try:
    main()
finally:
    print(json.dumps([name for name in names if name in sys.modules]))
"""


def run(tmp_path: Path, names: tuple[str, ...], *arguments: str) -> tuple[int, list[str]]:
    """Run the command line in a process of its own: its exit status, and which of the modules it has imported."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(names), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def generate(tmp_path: Path, names: tuple[str, ...], *overrides: str) -> list[str]:
    status, found = run(
        tmp_path, names, "prompt_ids=[1,2,3]", f"model.checkpoint={TINY / 'gemma3'}", "max_new_tokens=3", *overrides
    )
    assert status == 0
    (record,) = tmp_path.glob("outputs/*/*/result.json")
    assert len(json.loads(record.read_text("utf-8"))["token_ids"]) == 3
    return found


def test_one_sequence_brings_no_compiler_and_nothing_rare(tmp_path: Path) -> None:
    """Its prompt runs eager, and its tokens are native where a C++ compiler works."""
    graph = "auto" if find_cpp_compiler() else "eager"
    assert generate(tmp_path, (*COMPILER, *RARE), f"graph={graph}", "device=cpu") == []


LOADING = """
import json, sys
from graphcore import Engine
for folder in sys.argv[2:]:
    with Engine.load(folder, dtype="bf16", device="cpu", graph="auto", overrides=["context_length=64"]) as engine:
        engine.generate([[1, 2, 3]], 2)
    found = [name for name in json.loads(sys.argv[1]) if name in sys.modules]
    if found:
        sys.exit(f"{folder} brings {found}")
"""


@pytest.mark.slow
@pytest.mark.skipif(not find_cpp_compiler(), reason="without a C++ compiler, decode steps run compiled")
def test_no_family_brings_the_compiler(tiny_model: Callable[[str], TinyModel]) -> None:
    """Not even to check the shapes of its tensors: arithmetic on the meta device would import it."""
    folders = [str(tiny_model(name).folder) for name in ARCHITECTURES]
    command = [sys.executable, "-c", LOADING, json.dumps(COMPILER), *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_counting_the_kernels_of_an_eager_step_brings_no_compiler(tmp_path: Path) -> None:
    small = ("task.prompt_tokens=4", "task.new_tokens=2", "task.repeats=1", "graph=eager", "device=cpu")
    asked = ("task=bench", f"model.checkpoint={TINY / 'qwen3'}", "outputs=false", *small)
    assert run(tmp_path, COMPILER, *asked) == (0, [])


@pytest.mark.slow  # in CI the modules of that name are at least there
@pytest.mark.skipif(not find_cpp_compiler(), reason="needs a C++ compiler")
def test_what_is_compiled_brings_the_compiler(tmp_path: Path) -> None:
    """What the absence of the others is worth: these are the modules that compiling imports."""
    found = generate(tmp_path, COMPILER[:2], "graph=compiled", "device=cpu", "model.num_hidden_layers=1")
    assert found == [*COMPILER[:2]]


def test_the_compiler_has_the_names_that_are_looked_for() -> None:
    assert all(find_spec(name) is not None for name in COMPILER[:2])


@pytest.mark.parametrize(
    ("argument", "status"),
    [("--help", 0), ("--version", 0), ("caht", 2), ("promt=Hello", 2), ("model.checkpoint=/nowhere/model.gguf", 1)],
)
def test_help_and_mistakes_are_answered_without_torch(argument: str, status: int, tmp_path: Path) -> None:
    names = ("torch", "numpy", "rich", "jinja2", "tokenizers", "psutil")
    assert run(tmp_path, names, argument) == (status, [])


def test_servers_are_listed_without_torch(tmp_path: Path) -> None:
    assert run(tmp_path, ("torch", "numpy", "tokenizers", "uvicorn"), "ps", "outputs=false") == (0, [])
