"""Generates headers of the C++ kernels: encodings.h and grids.h from quant/, sampling_params.h from sampling_params.py.

    python -m graphcore.kernels.cpu.native_header

The headers are committed, so that the kernels build without Python; a test compares them with this module's output.
"""

from graphcore.encodings import Encoding
from graphcore.kernels.cpu.kernel_packing import TAIL_NBYTES
from graphcore.kernels.cpu.library import FORMAT_NUMBERS, SOURCES
from graphcore.kernels.packing import GROUP_ROWS
from graphcore.quant.level_formats import LevelFormat, grid_words
from graphcore.quant.registry import FORMATS
from graphcore.sampling_params import KERNEL_PARAMETERS, WHOLE_NUMBERS

TABLE_SIZE = 16  # entries of a vector's lookup table, indexed by codes of four bits

TEXT = """\
// The facts of encodings. graphcore/kernels/cpu/native_header.py writes this file from graphcore/quant/formats/.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graphcore {{

// Numbers of the formats. Those below DENSE_FORMATS are dtypes, too.
enum Format : int32_t {{
{numbers}
    DENSE_FORMATS = {num_dense}, NUM_FORMATS = {num_formats}
}};

// Applies X to each format that is stored in blocks, in the order of their numbers. Each is a struct in formats.h.
#define GRAPHCORE_FORMATS(X) \\
{names}

constexpr int GROUP_ROWS = {group_rows};  // rows that are stored together
constexpr size_t TAIL_NBYTES = {tail};  // bytes after the last group, for the scale of the whole tensor

constexpr bool has_tensor_scale(int32_t format) {{ return {scaled}; }}

// Values of codes, minus the smallest value.
{tables}

// Values of codes that are floats.
{floats}

// Offsets that the search for a group's scale tries.
{stretches}

struct Encoding {{
    int columns, nbytes;    // columns and bytes of a stored block
    int bits;               // bits of a code
    int offset;             // stored number that means zero
    int largest;            // largest value, before the offset is subtracted
    const uint8_t* values;  // values of the codes; null if a code is its own value
}};

// Facts of each format, indexed by its number.
inline constexpr Encoding ENCODINGS[] = {{
{facts}
}};

}}  // namespace graphcore
"""


GRIDS_TEXT = """\
// The grids of formats of levels: an entry has the numbers of eight magnitudes of two bits, or of four of three, the
// first in the lowest bits. graphcore/kernels/cpu/native_header.py writes this file from gguf-py's grids.
#pragma once

#include <cstdint>

namespace graphcore {{

{arrays}

}}  // namespace graphcore
"""


PARAMS_TEXT = """\
// The parameters of a row's choice. graphcore/kernels/cpu/native_header.py writes this file from sampling_params.py.
#pragma once

#include <cstdint>

namespace graphcore {{

struct SamplingParams {{
{fields}
}};

}}  // namespace graphcore
"""


def sampling_params_header() -> str:
    """Return the text of native/sampling_params.h."""
    types = {name: "int32_t" if name in WHOLE_NUMBERS else "float" for name in KERNEL_PARAMETERS}
    return PARAMS_TEXT.format(fields="\n".join(f"    {kind} {name};" for name, kind in types.items()))


def encodings_header() -> str:
    """Return the text of native/encodings.h."""
    known = [FORMATS[name] for name in FORMAT_NUMBERS]  # in the order of the numbers
    assert list(FORMAT_NUMBERS.values()) == list(range(len(known))), "numbers index a table"
    num_dense = sum(one.is_dense for one in known)
    assert all(one.is_dense for one in known[:num_dense]), "dense encodings have the lowest numbers"
    blocks = known[num_dense:]
    return TEXT.format(
        numbers="\n".join(f"    {_constant(one)} = {one.kernel_number}," for one in known),
        num_dense=num_dense,
        num_formats=len(known),
        names=" \\\n".join(f"    X({one.name.upper()})" for one in blocks),
        group_rows=GROUP_ROWS,
        tail=TAIL_NBYTES,
        scaled=" || ".join(f"format == {_constant(one)}" for one in known if one.has_tensor_scale),
        tables="\n".join(_table(levels, name) for levels, name in _tables().items()),
        floats="\n".join(_float_table(one) for one in known if len(one.float_levels) == TABLE_SIZE),
        stretches="\n".join(_stretches(one) for one in known if one.stretches),
        facts="\n".join(f"    {_facts(one)},  // {one.name}" for one in known),
    )


def _constant(one: Encoding) -> str:
    return one.name.upper() if one.is_dense else f"FORMAT_{one.name.upper()}"


def _tables() -> dict[tuple[int, ...], str]:
    """Return the name of each table of values: that of the first encoding that uses it."""
    tables: dict[tuple[int, ...], str] = {}
    for name in FORMAT_NUMBERS:
        levels = FORMATS[name].levels
        if levels:
            tables.setdefault(levels, f"{name.upper()}_VALUES")
    return tables


def _table(levels: tuple[int, ...], name: str) -> str:
    values = [level - min(levels) for level in levels] + [0] * (TABLE_SIZE - len(levels))
    return f"inline constexpr uint8_t {name}[{TABLE_SIZE}] = {{{', '.join(map(str, values))}}};"


def _float_table(one: Encoding) -> str:
    numbers = [f"{level:.9e}f" for level in one.float_levels]
    lines = [f"    {', '.join(numbers[start : start + 4])}," for start in range(0, TABLE_SIZE, 4)]
    return "\n".join((f"inline constexpr float {one.name.upper()}_LEVELS[{TABLE_SIZE}] = {{", *lines, "};"))


def _stretches(one: Encoding) -> str:
    return f"inline constexpr double {one.name.upper()}_STRETCHES[] = {{{', '.join(map(str, one.stretches))}}};"


def _facts(one: Encoding) -> str:
    offset, largest = one.zero, (1 << one.bits) - 1
    if one.levels:
        offset, largest = -min(one.levels), max(one.levels) - min(one.levels)
    table = _tables().get(one.levels, "nullptr")
    return f"{{{one.block_elements}, {one.block_nbytes}, {one.bits}, {offset}, {largest}, {table}}}"


def grids_header() -> str:
    """Return the text of native/grids.h."""
    names = sorted({one.grid for one in FORMATS.values() if isinstance(one, LevelFormat)})
    return GRIDS_TEXT.format(arrays="\n\n".join(map(_array, names)))


def _array(name: str) -> str:
    words = [f"0x{word:04x}" for word in grid_words(name)]
    lines = [f"    {', '.join(words[start : start + 16])}," for start in range(0, len(words), 16)]
    return "\n".join((f"inline constexpr uint16_t {name}_WORDS[{len(words)}] = {{", *lines, "};"))


HEADERS = {"encodings.h": encodings_header, "grids.h": grids_header, "sampling_params.h": sampling_params_header}

if __name__ == "__main__":
    for name, text in HEADERS.items():
        (SOURCES / name).write_text(text(), encoding="utf-8")
