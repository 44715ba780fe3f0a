"""A folder of compiled functions is refused by name wherever it does not fit; nothing here compiles."""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from support.cases import in_case
from tiny_graph import FULL, builder_of, model_of

from graphcore.errors import ConfigError
from graphcore.graph import artefacts
from graphcore.graph.artefacts import CURES, MANIFEST, Artefacts, Exported, described_inputs
from graphcore.graph.block_compiler import BlockCompiler
from graphcore.nn.block import Block

ABOUT = {"compiler": "g++ 12", "source": "/models/tiny", "batch_size": "1", "context_length": "64"}
FACTS = {name: f"{name} of the export" for name in CURES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder whose only package is damaged for AOTInductor, and whole by its hash."""
    with ZipFile(tmp_path / "head_1.pt2", "w") as package:
        package.writestr("model/calls.json", json.dumps({"library": "/elsewhere/kernels-1.so"}))
        package.writestr("model/code.so", b"\x7fELF /elsewhere/kernels-1.so")
    (tmp_path / "kernels-1.so").write_bytes(b"a library")
    hashes = {path.name: sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    inputs = {"head_1": ["weight float32[2, 3]", "argument 0 float32[1, *, 3]"]}
    Artefacts(tmp_path, FACTS, ["avx2", "fma"], ABOUT, "/elsewhere/kernels-1.so", inputs, hashes).write_manifest()
    return tmp_path


def head() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a module with the inputs of the folder's package."""
    module = torch.nn.Module()
    module.register_buffer("weight", torch.zeros(2, 3))
    return module, torch.zeros(1, 5, 3)


def make(found: Artefacts, name: str, x: torch.Tensor, lengths: list[Any]) -> Callable[..., torch.Tensor]:
    return found(lambda module, x: x, name, head()[0], (x,), lengths)


def test_every_fact_of_machine_and_model_is_compared_and_named(folder: Path) -> None:
    found = Artefacts.read(folder)
    found.check_facts(FACTS)
    for name in FACTS:
        with in_case(name), pytest.raises(ConfigError) as raised:
            found.check_facts({**FACTS, name: "another"})
        assert f"was compiled for {name}={FACTS[name]}, and here it is another; " in str(raised.value)
        assert str(folder) in str(raised.value)


def test_a_processor_without_an_instruction_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Artefacts.read(folder)
    monkeypatch.setattr(artefacts, "cpu_flags", lambda: frozenset({"avx2", "fma", "avx512f", "hypervisor"}))
    found.check_instructions()  # more than the export's are no hindrance
    monkeypatch.setattr(artefacts, "cpu_flags", lambda: frozenset({"avx2", "hypervisor"}))
    with pytest.raises(ConfigError, match="a processor with fma, which this one lacks; run task=export"):
        found.check_instructions()


def test_a_folder_without_a_whole_manifest_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"has no {MANIFEST} that can be read"):
        Artefacts.read(folder / "nothing")
    manifest = folder / MANIFEST
    for text in ("{", "[]", json.dumps({"facts": {}}), json.dumps({**json.loads(manifest.read_text()), "more": 1})):
        manifest.write_text(text)
        with in_case(text[:20]), pytest.raises(ConfigError, match="is damaged or of another version"):
            Artefacts.read(folder)


def test_a_function_that_the_folder_lacks_or_has_for_other_inputs_is_refused(folder: Path) -> None:
    found, x = Artefacts.read(folder), head()[1]
    with pytest.raises(ConfigError, match=r"has no head_2 \(it has head_1\); use the batch_size of the export \(1\)"):
        make(found, "head_2", x, [(x, 1)])
    with pytest.raises(ConfigError, match=r"argument 0 float32\[1, \*, 3\], and here it is argument 0 bfloat16"):
        make(found, "head_1", x.bfloat16(), [])
    with pytest.raises(ConfigError, match=r"and here it is argument 0 float32\[1, 5, 3\]; use the context_length"):
        make(found, "head_1", x, [])  # a length that was symbolic


def test_damaged_files_are_refused_before_they_are_loaded(folder: Path) -> None:
    found, x = Artefacts.read(folder), head()[1]
    assert found.library() == folder / "kernels-1.so"
    (folder / "kernels-1.so").write_bytes(b"b library")
    with pytest.raises(ConfigError, match=r"kernels-1.so is damaged: its hash is not that of manifest.json"):
        found.library()
    with pytest.raises(ConfigError, match=r"head_1.pt2 cannot be loaded .*; run task=export again"):
        make(found, "head_1", x, [(x, 1)])  # whole, but no package
    (folder / "head_1.pt2").unlink()
    with pytest.raises(ConfigError, match=r"head_1.pt2 cannot be read \(No such file"):
        make(found, "head_1", x, [(x, 1)])


def test_calls_of_kernels_name_the_library_that_lies_in_the_folder(folder: Path, tmp_path: Path) -> None:
    Artefacts.read(folder).move_kernels(folder / "head_1.pt2", tmp_path / "moved.pt2")
    with ZipFile(tmp_path / "moved.pt2") as moved:
        assert json.loads(moved.read("model/calls.json")) == {"library": str(folder / "kernels-1.so")}
        assert moved.read("model/code.so") == b"\x7fELF /elsewhere/kernels-1.so"  # machine code keeps its length


@torch.inference_mode()
def test_an_exported_function_takes_weights_as_inputs() -> None:
    """A block computes with the weights of another one that it is given."""
    compiler: BlockCompiler = builder_of(model_of(FULL, FULL), "eager", batch=1).functions.compiler
    example = compiler._example(0, 1, "prefill")
    x = torch.randn(example.arguments[0].shape, generator=torch.Generator().manual_seed(0))
    arguments = x, *example.arguments[1:]
    root = Exported(Block.forward, compiler.block(0), arguments)
    assert not [*root.named_buffers()]  # else they would be constants of the package
    weights = [torch.rand_like(weight) for weight in compiler.block(0).buffers()]
    (found,) = root([*weights, *artefacts.tensors_of(arguments)])
    for weight, other in zip(compiler.block(1).buffers(), weights, strict=True):
        weight.copy_(other)
    assert torch.equal(found, compiler.block(1)(*arguments))
    assert not torch.equal(found, compiler.block(0)(*arguments))


def test_inputs_are_described_by_dtype_and_shape() -> None:
    module, x = head()
    assert described_inputs(module, (None, x), [(x, 1)]) == ["weight float32[2, 3]", "argument 0 float32[1, *, 3]"]
