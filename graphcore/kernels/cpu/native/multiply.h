// The macro GRAPHCORE_MULTIPLY(F), which defines multiply_F: the products (products.h) of one format.
#pragma once

#include "expanded.h"
#include "float_products.h"
#include "matrix.h"

namespace graphcore {

// Multiplies rows of x in tiles of TOKENS, and the remaining rows in smaller tiles. A row's sums do not depend on the tile
// size.
template <class F, int TOKENS = TOKEN_TILE>
void multiply_tiles(const uint8_t* group, int columns, const Activations& x, const int* rows, int tokens, f32x16* totals) {
    int t = 0;
    for (; t + TOKENS <= tokens; t += TOKENS) {
        if (x.rounding == Rounding::WIDE)
            multiply_rounded<F, TOKENS, true>(group, columns, x, rows + t, totals + t);
        else if (x.rounding == Rounding::NONE)
            multiply_float<F, TOKENS>(group, columns, x, rows + t, totals + t);
        else
            multiply_rounded<F, TOKENS, false>(group, columns, x, rows + t, totals + t);
    }
    if constexpr (TOKENS > 1)
        if (t < tokens) multiply_tiles<F, TOKENS / 2>(group, columns, x, rows + t, tokens - t, totals + t);
}

template <class F>
void multiply(const uint8_t* group, int columns, const Activations& x, const int* rows, int tokens, f32x16* totals) {
    if constexpr (F::ONE_SCALE) {
        if (x.rounding == Rounding::PER_TOKEN) {
            for (int t = 0; t < tokens; t++) totals[t] = multiply_ternary<F>(group, columns, x, rows[t]);
            return;
        }
    }
    if constexpr (F::HAS_FLOATS) return multiply_float_tiles<F>(group, columns, x, rows, tokens, totals);
#if GRAPHCORE_AVX2
    if (x.rounding != Rounding::NONE && tokens >= EXPANDED_TOKENS)
        return x.rounding == Rounding::WIDE ? multiply_expanded<F, true>(group, columns, x, rows, tokens, totals)
                                            : multiply_expanded<F, false>(group, columns, x, rows, tokens, totals);
#endif
    if constexpr (!F::HAS_FLOATS) multiply_tiles<F>(group, columns, x, rows, tokens, totals);
}

#define GRAPHCORE_MULTIPLY(F)                                                                                             \
    void multiply_##F(const uint8_t* group, int columns, const Activations& x, const int* rows, int tokens, f32x16* totals) { \
        multiply<F>(group, columns, x, rows, tokens, totals);                                                             \
    }

}  // namespace graphcore
