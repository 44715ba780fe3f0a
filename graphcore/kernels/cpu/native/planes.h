// Rows of the formats of levels in a GPU's planes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graphcore {

// Writes the planes of rows that begin a group. raw: rows of the file, `stride` bytes apart. Of a last group with fewer than
// sixteen rows only these rows' bytes are written.
void pack_level_planes(int format, int rows, int columns, const uint8_t* raw, size_t stride, uint8_t* planes);

}  // namespace graphcore
