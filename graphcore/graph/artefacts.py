"""Compiled functions of blocks and heads as packages of AOTInductor: files that run without a compiler or Python.

    cache_dir/compiled/.../packages      what this machine has compiled for itself (`CachedPackages`, graph=compiled)

    a folder of task=export, which others load with graph.artefacts (`ArtefactWriter`, `Artefacts`):
    manifest.json          what the packages were compiled for, the inputs of each, and the hashes of all files
    block0_decode_1.pt2    a function for every layer of a kind, or for heads
    kernels-....so         the library of C++ kernels that the functions call

A package has no weights: they are inputs like activations and caches, so that one package serves all layers of a kind,
resident or streamed. AOTInductor checks no input, therefore a name in the cache is a hash of all that the code depends
on; of an export, dtypes and shapes are compared with those of the export when a package is loaded, and the manifest's
facts with this machine and this model.

Packages are loaded without Inductor's Python modules, whose import takes as long as torch's own.
"""

import functools
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast
from zipfile import ZipFile

import torch
from torch import Tensor, nn

from graphcore.device import cpu_flags, dtype_name
from graphcore.errors import ConfigError, GraphError
from graphcore.graph.compile import CACHE_VARIABLE, OPTIONS, call_compiling, count_package
from graphcore.kernels.ops.kv_formats import KVTypes
from graphcore.nn.block import Routed, packed_formats
from graphcore.nn.decoder import EXPERTS, Decoder
from graphcore.nn.span import Span

MANIFEST = "manifest.json"
INSTRUCTIONS = re.compile(r"sse|ssse|pni$|avx|amx|fma|f16c|bmi|abm|movbe|popcnt|gfni|asimd|sve|fphp|bf16|i8mm")
"""CPU flags (/proc/cpuinfo) of instructions that -march=native lets the compiler use."""
CURES: Mapping[str, str] = {
    "graphcore": "install that version",
    "torch": "install that version",
    "device": "set device={}",
    "vectors": "unset ATEN_CPU_CAPABILITY, or set it as for the export",
    "threads": "set threads={}",
    "dtype": "set dtype={}",
    "kv_dtype": "set kv_dtype={}",
    "model": "use the model, quant and adapters of the export",
}
ADDRESS = re.compile(r"0x[0-9a-f]+")  # in the repr of a function, whose name is an attribute, too
R = TypeVar("R")


def model_facts(decoder: Decoder, rounding: str, dtype: torch.dtype, kv_dtype: KVTypes) -> dict[str, str]:
    """Return what compiled code depends on of a model; its weights are no part of that.

    Args:
        rounding: rounding of the input of packed matrices, one of those in kernels/cpu/kernel_packing.py.
        dtype: compute dtype.
        kv_dtype: storage types of keys and values.
    """
    formats = [packed_formats(module) for _, module in decoder.groups()]
    digest = sha256(json.dumps([repr(decoder.spec), formats, rounding]).encode()).hexdigest()
    return {"dtype": dtype_name(dtype), "kv_dtype": str(kv_dtype), "model": digest[:16]}


def instructions_here() -> list[str]:
    """Return the instructions that this processor has, as Linux names them."""
    return sorted(filter(INSTRUCTIONS.match, cpu_flags()))


@dataclass(frozen=True)
class Artefacts:
    """A folder of packages, whose manifest has been read; it makes functions by loading them.

    Attributes:
        folder: the folder.
        facts: what the packages depend on, by the names in `CURES`, at the export.
        instructions: result of `instructions_here` at the export.
        about: further facts, for people: compiler, source of the model, batch_size and context_length.
        kernels: path of the kernels' library at the export, which the packages contain; empty without one.
        inputs: by function, dtype and shape of each input; a size that differs from call to call is "*".
        hashes: sha256 of every other file in the folder, by its name.
    """

    folder: Path
    facts: Mapping[str, str]
    instructions: Sequence[str]
    about: Mapping[str, str]
    kernels: str
    inputs: Mapping[str, Sequence[str]]
    hashes: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> "Artefacts":
        """Return the artefacts in a folder.

        Raises:
            ConfigError: the folder has no manifest, or one that cannot be read.
        """
        path = folder / MANIFEST
        try:
            return cls(folder, **json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(
                f"graph.artefacts={folder} has no {MANIFEST} that can be read ({error.strerror}); task=export writes "
                "such a folder, and the manifest last"
            ) from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is damaged or of another version of graphcore; run task=export again") from error

    def write_manifest(self) -> None:
        """Write the manifest to the folder."""
        fields = {name: value for name, value in asdict(self).items() if name != "folder"}
        (self.folder / MANIFEST).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")

    def check_facts(self, here: Mapping[str, str]) -> None:
        """Check that facts of this machine or model are those of the export.

        Raises:
            ConfigError: one is not; the first is named.
        """
        for name, found in here.items():
            made = self.facts.get(name, "nothing")
            if made != found:
                raise ConfigError(
                    f"graph.artefacts={self.folder} was compiled for {name}={made}, and here it is {found}; "
                    f"{CURES[name].format(made)}, or run task=export again"
                )

    def check_instructions(self) -> None:
        """Check that this processor has the instructions that the compiler could use.

        Raises:
            ConfigError: some are missing.
        """
        missing = sorted({*self.instructions} - {*instructions_here()})
        if missing:
            raise ConfigError(
                f"graph.artefacts={self.folder} was compiled for a processor with {', '.join(missing)}, which this one "
                "lacks; run task=export on this machine"
            )

    def library(self) -> Path | None:
        """Return the file of the kernels' library in the folder; None if the export had none.

        Raises:
            ConfigError: the file is missing or damaged.
        """
        return self._checked(Path(self.kernels).name) if self.kernels else None

    def __call__(
        self,
        function: Callable[..., R],
        name: str,
        module: nn.Module,
        arguments: Sequence[Any],
        lengths: Sequence[tuple[Tensor, int]] = (),
    ) -> Callable[..., R]:
        """Return the loaded function, as `FunctionMaker` does.

        Raises:
            ConfigError: the folder does not have it, or it was compiled for other inputs.
        """
        if name not in self.inputs:
            raise ConfigError(
                f"graph.artefacts={self.folder} has no {name} (it has {', '.join(self.inputs)}); use the batch_size of "
                f"the export ({self.about['batch_size']}), or run task=export again"
            )
        found = described_inputs(module, arguments, lengths)
        if found != self.inputs[name]:
            made, here = next(
                pair for pair in zip([*self.inputs[name], "none"], [*found, "none"], strict=False) if pair[0] != pair[1]
            )
            raise ConfigError(
                f"graph.artefacts={self.folder}: {name} was compiled for an input {made}, and here it is {here}; use "
                f"the context_length of the export ({self.about['context_length']}), or run task=export again"
            )
        package = self._checked(f"{name}.pt2")
        with tempfile.TemporaryDirectory() as scratch:
            moved = Path(scratch) / package.name
            self.move_kernels(package, moved)
            try:
                return cast(Callable[..., R], PackagedFunction.load(moved, module))
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                raise ConfigError(
                    f"{package} cannot be loaded ({reason}); run task=export again, or leave graph.artefacts out"
                ) from error

    def _checked(self, name: str) -> Path:
        """Return a file of the folder, after comparing its hash: a damaged library could crash the process."""
        path = self.folder / name
        try:
            is_whole = sha256(path.read_bytes()).hexdigest() == self.hashes[name]
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}); run task=export again") from error
        if not is_whole:
            raise ConfigError(f"{path} is damaged: its hash is not that of {MANIFEST}; run task=export again")
        return path

    def move_kernels(self, package: Path, moved: Path) -> None:
        """Copy a package, and replace the kernels' path of the export by the library in this folder."""
        before, now = (json.dumps(str(path)).encode() for path in (self.kernels, self.folder / Path(self.kernels).name))
        with ZipFile(package) as source, ZipFile(moved, "w") as target:
            for entry in source.infolist():
                content = source.read(entry)
                calls = self.kernels and entry.filename.endswith(".json")
                target.writestr(entry, content.replace(before, now) if calls else content)


@dataclass(frozen=True)
class PackagedFunction:
    """A function of a module that a package computes.

    Attributes:
        about: the first module's `described_module`; that of every other module has to be the same.
        weights: inputs from each module that was given; a module's weights keep their places.
    """

    loader: torch._C._aoti.AOTIModelPackageLoader
    about: Sequence[str]
    weights: dict[nn.Module, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def load(cls, package: Path, module: nn.Module) -> "PackagedFunction":
        """Return the function in a package, for all modules like this one.

        Raises:
            RuntimeError: torch cannot load the file.
        """
        loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, -1)
        return cls(loader, described_module(module))

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        """Run the function: its tensor, or the parts of a `Routed`.

        Raises:
            GraphError: the module differs from the first in what the compiled code has as a constant.
        """
        if module not in self.weights:
            differing = {*self.about} ^ {*described_module(module)}
            if differing:
                raise GraphError(f"modules with one compiled function differ in {', '.join(sorted(differing))}")
            self.weights[module] = [tensor for _, tensor in module_weights(module)]
        results = self.loader.boxed_run([*self.weights[module], *tensors_of(arguments)])
        return results[0] if len(results) == 1 else Routed(*results)


@dataclass
class ArtefactWriter:
    """Compiles functions into packages; what it makes is the function itself.

    Attributes:
        folder: folder of the packages, which exists.
        cache_dir: folder of the compiled-code cache; None uses Inductor's default.
        on_export: function called with the name of each function before it is compiled.
        inputs: the same as in `Artefacts`, of all functions that were made.
    """

    folder: Path
    cache_dir: Path | None
    on_export: Callable[[str], None]
    inputs: dict[str, list[str]] = field(default_factory=dict)

    def __call__(
        self,
        function: Callable[..., R],
        name: str,
        module: nn.Module,
        arguments: Sequence[Any],
        lengths: Sequence[tuple[Tensor, int]] = (),
    ) -> Callable[..., R]:
        """Write the function's package, and return the function."""
        self.on_export(name)
        package = self.folder / f"{name}.pt2"
        call_compiling(self.cache_dir, write_package, package, function, module, arguments, lengths)
        self.inputs[name] = described_inputs(module, arguments, lengths)
        return function

    def finished(
        self, facts: Mapping[str, str], about: Mapping[str, str], kernels: str, library: Path | None
    ) -> Artefacts:
        """Write the manifest, and return all that was written.

        Args:
            facts, about, kernels: the same as in `Artefacts`.
            library: copy of the kernels' library in the folder; None without one.
        """
        files = [*([library] if library else []), *(self.folder / f"{name}.pt2" for name in self.inputs)]
        hashes = {path.name: sha256(path.read_bytes()).hexdigest() for path in files}
        written = Artefacts(self.folder, facts, instructions_here(), about, kernels, self.inputs, hashes)
        written.write_manifest()
        return written


@dataclass(frozen=True)
class CachedPackages:
    """Makes functions by loading packages from the compiled-code cache; what it does not have is compiled into it.

    A call is one of AOTInductor's C++, without the Python of Dynamo, AOTAutograd and Inductor around it, which takes a
    third of a decode step of small layers; and a start with all packages in the cache imports no compiler.

    Attributes:
        cache_dir: folder of the compiled-code cache, for this machine and this version of torch.
        on_compile: function called with the name of each function before it is compiled.
    """

    cache_dir: Path
    on_compile: Callable[[str], None]

    def __call__(
        self,
        function: Callable[..., R],
        name: str,
        module: nn.Module,
        arguments: Sequence[Any],
        lengths: Sequence[tuple[Tensor, int]] = (),
    ) -> Callable[..., R]:
        """Return the loaded function, as `FunctionMaker` does.

        Raises:
            CompiledCodeError: there is no room for compiled code.
        """
        inputs, about = described_inputs(module, arguments, lengths), described_module(module)
        depends_on = function.__qualname__, inputs, about, OPTIONS, torch.get_num_threads(), sources_hash()
        package = f"packages/{sha256(repr(depends_on).encode()).hexdigest()[:32]}.pt2"

        def compiled() -> PackagedFunction:
            path = Path(os.environ[CACHE_VARIABLE]) / package  # another folder if cache_dir turns out to have no room
            path.parent.mkdir(exist_ok=True)
            write_package(path, function, module, arguments, lengths)
            return PackagedFunction.load(path, module)

        try:
            loaded, is_cached = PackagedFunction.load(self.cache_dir / package, module), True
        except RuntimeError:  # there is none, or the file is damaged
            self.on_compile(name)
            loaded, is_cached = call_compiling(self.cache_dir, compiled), False
        count_package(is_cached)
        return cast(Callable[..., R], loaded)


def write_package(
    package: Path,
    function: Callable[..., Any],
    module: nn.Module,
    arguments: Sequence[Any],
    lengths: Sequence[tuple[Tensor, int]],
) -> None:
    """Compile a function into a package, which is there whole or not at all.

    Args:
        function, module, arguments, lengths: the same as in `FunctionMaker`.
    """
    inputs = [tensor for _, tensor in module_weights(module)] + tensors_of(arguments)
    dynamic = torch.export.Dim.DYNAMIC
    dims = [{dim: dynamic for tensor, dim in lengths if tensor is one} or None for one in inputs]
    examples = [torch.empty_like(one) for one in inputs]  # their values do not matter
    root = Exported(function, module, arguments)
    exported = torch.export.export(root, (examples,), dynamic_shapes={"inputs": dims}, strict=False)
    written = package.with_suffix(f".{os.getpid()}.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch calls a name of its own that it has deprecated
        torch._inductor.aoti_compile_and_package(exported, package_path=str(written), inductor_configs=dict(OPTIONS))
    written.replace(package)


class Exported(nn.Module):
    """A function of a module, of a flat list of tensors: the module's weights, then those of the arguments."""

    def __init__(self, function: Callable[..., Any], module: nn.Module, arguments: Sequence[Any]) -> None:
        super().__init__()
        # in a tuple, in which torch does not look for submodules, whose weights it would export
        self.called = (Called(function, module),)
        self.names, self.arguments = [f"module.{name}" for name, _ in module_weights(module)], arguments

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the function, with the weights in place of the module's own."""
        weights, tensors = dict(zip(self.names, inputs, strict=False)), iter(inputs[len(self.names) :])
        arguments = tuple(_rebuilt(one, tensors) for one in self.arguments)
        result: Tensor | Routed = torch.func.functional_call(self.called[0], weights, arguments)
        return [result] if isinstance(result, Tensor) else [*result]


class Called(nn.Module):
    """Wraps a module, and runs one of its other functions as `forward`, such as `Block.route`."""

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self.function, self.module = function, module

    def forward(self, *arguments: Any) -> Any:
        """Run the function."""
        return self.function(self.module, *arguments)


def module_weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the weights that a compiled function reads; experts run between two functions."""
    return [(name, tensor) for name, tensor in module.named_buffers() if EXPERTS not in f".{name}"]


def tensors_of(arguments: Sequence[Any]) -> list[Tensor]:
    """Return the tensors of arguments, each a tensor, a `Span` or None, in order."""
    parts = (one if isinstance(one, Span) else (one,) for one in arguments)
    return [tensor for part in parts for tensor in part if tensor is not None]


def _rebuilt(argument: Any, tensors: Iterator[Tensor]) -> Any:
    """Return an argument like this one, of the next tensors."""
    if isinstance(argument, Span):
        return Span(next(tensors), next(tensors))
    return None if argument is None else next(tensors)


@functools.cache
def sources_hash() -> str:
    """Return a hash of graphcore's own code, which decides what is traced."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def described_module(module: nn.Module) -> list[str]:
    """Return every attribute of a module and its submodules that tracing may turn into a constant, with its value."""
    return [
        f"{name}.{key}={ADDRESS.sub('', repr(value))}"
        for name, one in module.named_modules()
        for key, value in vars(one).items()
        if not key.startswith("_") and EXPERTS not in f".{name}."
    ]


def described_inputs(module: nn.Module, arguments: Sequence[Any], lengths: Sequence[tuple[Tensor, int]]) -> list[str]:
    """Return name, dtype and shape of each input, such as "argument 0 float32[1, *, 576]"."""
    named = [*module_weights(module), *((f"argument {at}", one) for at, one in enumerate(tensors_of(arguments)))]
    described = []
    for name, tensor in named:
        assert tensor.is_contiguous(), f"{name} has strides {tensor.stride()}, and packages are compiled for one run"
        varying = {dim for one, dim in lengths if one is tensor}
        shape = ", ".join("*" if dim in varying else str(size) for dim, size in enumerate(tensor.shape))
        described.append(f"{name} {str(tensor.dtype).removeprefix('torch.')}[{shape}]")
    return described
