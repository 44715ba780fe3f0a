// Kernels for bf16 on processors with AVX512-BF16: products of many tokens, and attention of a chunk (chunk.h). A pair is two
// numbers of bf16 in a lane of 32 bits. vdpbf16ps multiplies sixteen pairs with others and adds both products to float32 sums.
//
// A panel is two groups of weights, unpacked to bf16 or copied from dense rows of bf16. It has a vector for each pair of columns
// and each group, with the pair of each of the sixteen rows. x is in tiles of tokens. With AVX512-BF16 a tile has the pair of each
// of 8 tokens for each pair of columns; with AMX it has the registers of 32 tokens, two for each block of columns:
//
//     AVX512-BF16   x: [pairs of columns] [8 tokens]                 sums[8][32] += x[token] * panel[pair], pair by pair
//     AMX           x: [blocks] [2] [16 tokens] [16 pairs]           sums[2][16][2][16] += x * panel, block by block
//
// A sum has the same bits for any number of tokens and threads. The two ways have different bits.
#pragma once

#include "matrix.h"

namespace graphcore {

constexpr int PANEL_GROUPS = 2, PANEL_ROWS = PANEL_GROUPS * GROUP_ROWS;
constexpr int PANEL_TOKENS = 8, AMX_TOKENS = 32;  // tokens of a tile
// Most columns of a panel, which stays in a cache for all tokens: L2, or L1, from which AMX reads twice as much for each sum.
constexpr int PANEL_COLUMNS = 2048, AMX_COLUMNS = 512;
constexpr size_t PANEL_NBYTES = size_t(PANEL_ROWS) * PANEL_COLUMNS * 2;

// Returns whether this processor has AVX512-BF16; all other functions need it.
bool has_bf16_pairs();

// Returns whether this processor has AMX for bf16, too, and the system lets this process use it.
bool has_amx();

// Writes a tile of up to PANEL_TOKENS or AMX_TOKENS tokens, with zeros for missing ones. x: [tokens, columns] of bf16.
void arrange_tile(const uint8_t* x, int tokens, int columns, uint32_t* tile);
void arrange_amx_tile(const uint8_t* x, int tokens, int columns, uint32_t* tile);

// Unpacks or copies some columns of a group. matrix: packed, or dense bf16. columns: begins and ends at a block. place: of the
// group in the panel.
void fill_panel(const Matrix& matrix, int group, Range columns, int place, uint8_t* panel);

// Adds the products of a panel and a tile to the sums. tile: of the panel's first column.  sums: [tokens of a tile, PANEL_ROWS].
void multiply_panel(const uint8_t* panel, const uint32_t* tile, int pairs, float* sums);
void multiply_amx_panel(const uint8_t* panel, const uint32_t* tile, int pairs, float* sums);

// The shapes of this thread's AMX registers while multiply_amx_panel is called; those that it found are put back, because torch's
// library may rely on them.
class AmxShapes {
  public:
    AmxShapes();
    ~AmxShapes();

  private:
    alignas(64) uint8_t found_[64];
};

// ---- Attention. head_dim: a multiple of BLOCK_COLUMNS.

constexpr int PAIR_ROWS = 8, PAIR_KEYS = 2 * LANES;  // rows and keys of score_pairs

// Writes sixteen keys, each [head_dim] of bf16, as [head_dim / 2, LANES] pairs of features.
void arrange_keys(const uint8_t* const keys[LANES], int head_dim, uint32_t* to);

// Writes sixteen values, each [head_dim] of bf16, as [LANES / 2, head_dim] pairs of neighbours.
void arrange_values(const uint8_t* const values[LANES], int head_dim, uint32_t* to);

// Computes scale * (q . key) for PAIR_ROWS rows and PAIR_KEYS keys. q: [PAIR_ROWS, head_dim] of bf16.  keys: two blocks of arrange_keys.
void score_pairs(const uint8_t* q, int head_dim, const uint32_t* keys, float scale, size_t stride, float* scores);

// Adds weights times values to out, for four rows and key pairs begin .. end - 1. weights: bf16, rows `stride` bytes apart.
// values: arranged.  out: [4, head_dim].
void add_weighted_pairs(const uint8_t* weights, size_t stride, const uint32_t* values, int head_dim, int begin, int end, float* out);

}  // namespace graphcore
