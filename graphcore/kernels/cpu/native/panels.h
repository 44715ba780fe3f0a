// Products of many tokens in bf16, for processors with AVX512-BF16.
//
// A panel is two groups of weights, unpacked to bf16 or copied from dense rows of bf16. It has a vector for each pair of columns
// and each group, with the pair of each of the sixteen rows. x is in tiles of PANEL_TOKENS tokens, which have the pair of each
// token for each pair of columns. One instruction multiplies sixteen rows' pairs with a token's and adds both products to float32
// sums. A sum has the same bits for any number of tokens and threads.
#pragma once

#include "matrix.h"

namespace graphcore {

constexpr int PANEL_GROUPS = 2, PANEL_ROWS = PANEL_GROUPS * GROUP_ROWS;
constexpr int PANEL_TOKENS = 8;
constexpr int PANEL_COLUMNS = 2048;  // most columns of a panel, which stays in the L2 cache for all tokens
constexpr size_t PANEL_NBYTES = size_t(PANEL_ROWS) * PANEL_COLUMNS * 2;

using TileSums = float[PANEL_TOKENS][PANEL_ROWS];

// Returns whether this processor multiplies bf16 by AVX512-BF16. False with AMX, which torch's products use.
bool has_panels();

// Writes a tile: the pairs of columns of up to PANEL_TOKENS tokens. x: [tokens, columns] of bf16.
void arrange_tile(const uint8_t* x, int tokens, int columns, uint32_t* tile);

// Unpacks or copies some columns of a group. matrix: packed, or dense bf16. columns: begins and ends at a block. place: of the
// group in the panel.
void fill_panel(const Matrix& matrix, int group, Range columns, int place, uint8_t* panel);

// Adds the products of a panel and a tile to the sums. tile: of the panel's first column.
void multiply_panel(const uint8_t* panel, const uint32_t* tile, int pairs, TileSums& sums);

}  // namespace graphcore
