"""Building the kernels: once, under a key of all that matters, errors in one line; structures as C++ has them."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.packed_matrices import native_kernels

from graphcore.activations import Activation
from graphcore.compiler import TARGETS, find_compiler, prebuilt_name
from graphcore.device import find_cpp_compiler
from graphcore.errors import GraphError
from graphcore.kernels.cpu import instructions as native_instructions
from graphcore.kernels.cpu import library
from graphcore.kernels.cpu.library import FORMAT_NUMBERS, ROUNDINGS
from graphcore.kernels.cpu.native_header import HEADERS
from graphcore.kernels.cpu.quantize import QuantizedSums

build = library.build_library.__wrapped__  # without the process's own memory of what it has built
SOURCES = library.SOURCES


@pytest.fixture
def write_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """A function that replaces the kernels' sources by one small file."""
    sources = tmp_path / "sources"
    sources.mkdir()
    monkeypatch.setattr(library, "SOURCES", sources)

    def write(text: str) -> None:
        (sources / "one.cpp").write_text(text, encoding="utf-8")

    write('extern "C" int answer() { return 42; }\n')
    return write


@pytest.fixture
def built(tmp_path: Path) -> Path:
    if find_cpp_compiler() is None:
        pytest.skip("no C++ compiler works here")
    return tmp_path / "cache" / "kernels"


@pytest.mark.usefixtures("write_source")
def test_what_is_built_can_be_called_and_nothing_else_is_left(built: Path) -> None:
    path = build(built)
    assert ctypes.CDLL(str(path)).answer() == 42
    assert set(built.iterdir()) == {path, path.with_suffix(".sha256")}


@pytest.mark.usefixtures("write_source")
def test_building_tells_how_many_sources_are_compiled_and_finding_tells_nothing(built: Path) -> None:
    (library.SOURCES / "two.cpp").write_text('extern "C" int question() { return 6 * 9; }\n', encoding="utf-8")
    told: list[tuple[str, int | None, int, int]] = []
    path = build(built, on_progress=lambda *event: told.append(event))
    assert told == [("build kernels", None, done, 2) for done in range(3)]
    assert build(built, on_progress=lambda *event: told.append(event)) == path
    assert len(told) == 3


@pytest.mark.usefixtures("write_source")
def test_a_library_that_is_there_is_not_built_again(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build(built)
    compiled: list[object] = []
    monkeypatch.setattr(library, "build_libraries", lambda *arguments: compiled.append(arguments))
    assert build(built) == path
    assert compiled == []


def test_other_flags_sources_and_processors_are_other_libraries(
    built: Path, write_source: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [build(built), build(built, ("-O1",)), build(built, ("-O1", "-DX=1"))]
    write_source('extern "C" int answer() { return 43; }\n')
    paths.append(build(built))
    assert ctypes.CDLL(str(paths[-1])).answer() == 43
    monkeypatch.setattr(library, "cpu_name", lambda: "another processor")
    paths.append(build(built))
    assert len(set(paths)) == 5


def test_a_compiler_error_is_one_line_that_says_who_and_what(built: Path, write_source: Callable[[str], None]) -> None:
    write_source("#include <cstdint>\n#error this compiler is too old\n#error and so is its maker\n")
    with pytest.raises(GraphError) as raised:
        build(built)
    message = str(raised.value)
    assert "\n" not in message
    assert str(find_cpp_compiler()) in message
    assert "this compiler is too old" in message
    assert list(built.iterdir()) == []


@pytest.mark.usefixtures("write_source")
def test_a_library_that_was_cut_short_is_built_again(built: Path) -> None:
    path = build(built)
    path.write_bytes(path.read_bytes()[:1000])
    assert build(built) == path
    assert ctypes.CDLL(str(path)).answer() == 42


@pytest.mark.usefixtures("write_source")
@pytest.mark.parametrize("damage", [b"", b"\xff\xfe no digest", b"0" * 64])
def test_a_damaged_digest_has_the_library_built_again(built: Path, damage: bytes) -> None:
    path = build(built)
    digest = path.with_suffix(".sha256")
    right = digest.read_bytes()
    digest.write_bytes(damage)
    assert build(built) == path
    assert digest.read_bytes() == right


def test_a_full_disk_is_no_missing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's own words for a disk without room, from a compiler that is there."""
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'g++: fatal error: write: No space left on device' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    find_compiler.cache_clear()
    with pytest.raises(GraphError, match=r"cannot be kept in .*: No space left on device"):
        build(tmp_path / "kernels")


def prebuilt(folder: Path, *names: str) -> dict[str, Path]:
    """Put an empty library of these very sources there for each target."""
    folder.mkdir()
    places = {one.name: folder / prebuilt_name(SOURCES, one) for one in TARGETS["x86_64"] if one.name in names}
    for place in places.values():
        place.touch()
    return places


V3 = "popcnt cx16 lahf_lm pni ssse3 sse4_1 sse4_2 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "x86-64"),
        (V3.replace("fma ", ""), "x86-64"),
        (V3, "x86-64-v3"),
        (f"{V3} avx_vnni", "x86-64-v3-vnni"),
        (V4.replace(" avx512_vnni", ""), "x86-64-v3"),
        (V4, "x86-64-v4-vnni"),
    ],
)
def test_the_best_library_that_the_processor_runs_is_chosen(
    flags: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = prebuilt(tmp_path / "built", *(one.name for one in TARGETS["x86_64"]))
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "built")
    monkeypatch.setattr(library, "targets_here", lambda: TARGETS["x86_64"])
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(library, "open_library", lambda path: None)
    assert library.prebuilt_library.__wrapped__() == places[expected]


def test_a_library_built_ahead_counts_for_its_own_sources_and_only_if_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_source: Callable[[str], None]
) -> None:
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "built")
    monkeypatch.setattr(library, "targets_here", lambda: TARGETS["x86_64"])
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset(V3.split()))
    monkeypatch.setattr(library, "SOURCES", SOURCES)
    prebuilt(tmp_path / "built", "x86-64")
    assert library.prebuilt_library.__wrapped__() is None  # an empty file is no library
    monkeypatch.setattr(library, "open_library", lambda path: None)
    assert library.prebuilt_library.__wrapped__() is not None
    monkeypatch.setattr(library, "SOURCES", tmp_path / "sources")
    assert library.prebuilt_library.__wrapped__() is None


@pytest.mark.usefixtures("write_source", "built")
def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(GraphError, match=r"cannot be kept in .*file.*set cache_dir"):
        build(tmp_path / "file" / "kernels")


def test_the_kernels_need_no_cpp_runtime() -> None:
    """Python is a C program: with every symbol looked up at once, what only libstdc++ defines would be missing."""
    path = Path(native_kernels())
    script = f"import ctypes; ctypes.CDLL({str(path)!r}, mode={os.RTLD_NOW})"
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"libstdc++" not in path.read_bytes()


def test_without_a_compiler_there_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_own_compiler", lambda: None)
    assert build(tmp_path / "kernels") is None
    assert not (tmp_path / "kernels").exists()


@pytest.mark.thorough
def test_structures_lie_in_memory_as_the_kernels_read_them(tmp_path: Path) -> None:
    """Every field's place and size is asserted by the compiler itself."""
    compiler = find_cpp_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler works here")
    mirrored = (
        *(library.Matrix, QuantizedSums, native_instructions.Norm, native_instructions.Instruction),
        *instructions(),
    )
    lines = [f'#include "{SOURCES / name}"' for name in ("step.h", "quantize.h")] + ["#include <cstddef>"]
    for one in mirrored:
        owner = next(base for base in one.__mro__ if "_fields_" in vars(base))  # two instructions share `Delta`
        theirs = f"graphcore::{owner.__name__}"
        lines.append(f"static_assert(sizeof({theirs}) == {ctypes.sizeof(one)});")
        for name, *_ in one._fields_:
            place = getattr(one, name)
            lines.append(f"static_assert(offsetof({theirs}, {name}) == {place.offset});")
            lines.append(f"static_assert(sizeof({theirs}::{name}) == {place.size});")
    for one in instructions():
        lines.append(f"static_assert(int(graphcore::Kind::{constant(one.__name__)}) == {one.KIND});")
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wno-psabi", "-Wno-invalid-offsetof", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def instructions() -> list[type[ctypes.Structure]]:
    """Return the structure of every kind of instruction."""
    direct = ctypes.Structure.__subclasses__()
    return [one for base in direct for one in (base, *base.__subclasses__()) if "KIND" in vars(one)]


def constant(name: str) -> str:
    """Return "ADD_NORM" for "AddNorm"."""
    return "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in name).removeprefix("_")


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_says_what_python_says(name: str) -> None:
    text = (SOURCES / name).read_text(encoding="utf-8")
    assert text == HEADERS[name](), "run python -m graphcore.kernels.cpu.native_header"


def test_formats_keep_their_numbers() -> None:
    """tests/golden/native_programs.txt has them."""
    names = "f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k iq4_nl iq4_xs tq2_0 mxfp4 nvfp4 q1_0 q2_0"
    levels = "iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq1_s iq1_m"
    folders = "affine4 affine8 fp8 nf4 fp4 nvfp4_f32"
    expected = [*names.split(), "i2_s", *levels.split(), *folders.split()]
    assert list(FORMAT_NUMBERS.items()) == [(name, number) for number, name in enumerate(expected)]


def test_numbers_of_choices_are_those_of_the_sources() -> None:
    """Enumerations are read out of the headers, in order."""
    step = (SOURCES / "step.h").read_text(encoding="utf-8")
    for enum, ours in (
        ("NormKind", {"none": 0, **native_instructions.NORM_KINDS}),
        ("Activation", {one.name.lower(): one for one in Activation} | {"clamped_swiglu": len(Activation)}),
        ("Store", native_instructions.STORES),
        ("Elements", native_instructions.ELEMENTS),
    ):
        theirs = step.split(f"enum class {enum} : int32_t {{")[1].split("}")[0]
        found = {name.strip().lower(): int(number) for name, number in (part.split("=") for part in theirs.split(","))}
        assert found == ours
    text = (
        (SOURCES / "activations.h")
        .read_text(encoding="utf-8")
        .split("enum class Rounding : int32_t {")[1]
        .split("}")[0]
    )
    found = {name.strip(): int(number) for name, number in (part.split("=") for part in text.split(","))}
    ours_by_theirs = {"NONE": "float", "PER_BLOCK": "block", "PER_TOKEN": "token", "WIDE": "wide"}
    assert {ours_by_theirs[name]: number for name, number in found.items()} == ROUNDINGS
