// GRAPHCORE_MULTIPLY(F), a macro that defines multiply_F: the products (products.h) of one format.
#pragma once

#include "matrix.h"

namespace graphcore {

template <class F>
void multiply(const uint8_t* group, int columns, const Activations& x, int first, int tokens, f32x16* totals) {
    const bool is_float = x.rounding == Rounding::NONE;
    if constexpr (F::ONE_SCALE) {
        if (x.rounding == Rounding::PER_TOKEN) {
            for (int t = 0; t < tokens; t++) totals[t] = multiply_ternary<F>(group, columns, x, first + t);
            return;
        }
    }
    if (x.rounding == Rounding::WIDE) {
        for (int t = 0; t < tokens; t++) multiply_rounded<F, 1, true>(group, columns, x, first + t, totals + t);
        return;
    }
    if (tokens == TOKEN_TILE)
        return is_float ? multiply_float<F, TOKEN_TILE>(group, columns, x, first, totals)
                        : multiply_rounded<F, TOKEN_TILE, false>(group, columns, x, first, totals);
    for (int t = 0; t < tokens; t++)
        is_float ? multiply_float<F, 1>(group, columns, x, first + t, totals + t)
                 : multiply_rounded<F, 1, false>(group, columns, x, first + t, totals + t);
}

#define GRAPHCORE_MULTIPLY(F)                                                                                        \
    void multiply_##F(const uint8_t* group, int columns, const Activations& x, int first, int tokens, f32x16* totals) { \
        multiply<F>(group, columns, x, first, tokens, totals);                                                       \
    }

}  // namespace graphcore
