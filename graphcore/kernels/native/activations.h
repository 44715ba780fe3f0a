// What a matrix is multiplied with: rows of float32, and the same rows rounded to eight bits.
//
//     per block:  scale = max|x| / 127 over 32 columns,       q = round(x / scale)
//     per token:  scale = max(max|x|, 1e-5) / 127 over a row,  q = clip(round_half_even(x / scale), -128, 127)
//
// The second is BitNet's own arithmetic (transformers, integrations/bitnet.py, ActQuant).
#pragma once

#include <cstddef>

#include "codes.h"

namespace graphcore {

enum class Rounding : int32_t { NONE = 0, PER_BLOCK = 1, PER_TOKEN = 2 };

struct Activations {
    Rounding rounding = Rounding::NONE;
    int rows = 0, columns = 0;  // columns: a multiple of 32
    float* x = nullptr;         // [rows, columns]
    float* half_sums = nullptr; // [rows, columns / 16] sums of x
    int8_t* q = nullptr;        // [rows, columns]
    float* scales = nullptr;    // [rows, columns / 32]
    int32_t* token_sums = nullptr;  // [rows] sums of q
    float* q_sums = nullptr;    // [rows, columns / 32] sums of q, times the scale
    float* half_q_sums = nullptr;  // [rows, columns / 16] the same of 16 columns

    static int padded(int columns) { return (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS * BLOCK_COLUMNS; }

    static size_t nbytes(int rows, int columns) {
        const size_t all = size_t(rows) * padded(columns);
        return all * 4 + all / 16 * 4 + all + all / 32 * 8 + all / 16 * 4 + size_t(rows) * 4 + 7 * 64;
    }

    // Lays the arrays out in memory that holds at least nbytes(rows, columns).
    void place(void* memory, int num_rows, int num_columns) {
        rows = num_rows, columns = padded(num_columns);
        const size_t all = size_t(rows) * columns;
        auto* at = (uint8_t*)((uintptr_t(memory) + 63) / 64 * 64);
        const auto take = [&at](size_t size) {
            auto* here = at;
            at += (size + 63) / 64 * 64;
            return here;
        };
        x = (float*)take(all * 4);
        half_sums = (float*)take(all / 16 * 4);
        q = (int8_t*)take(all);
        scales = (float*)take(all / 32 * 4);
        q_sums = (float*)take(all / 32 * 4);
        half_q_sums = (float*)take(all / 16 * 4);
        token_sums = (int32_t*)take(size_t(rows) * 4);
    }

    const float* x_row(int row) const { return x + size_t(row) * columns; }
    const int8_t* q_row(int row) const { return q + size_t(row) * columns; }

    // Rounds row `row` of x, which is filled up to `columns`; what lies between is padding and is zero.
    void finish(int row) {
        float* values = x + size_t(row) * columns;
        if (rounding == Rounding::NONE) {
            for (int half = 0; half < columns / 16; half++)
                half_sums[size_t(row) * columns / 16 + half] = sum(load<f32x16>(values + 16 * half));
            return;
        }
        float token_size = 0;
        if (rounding == Rounding::PER_TOKEN) {
            f32x16 most{};
            for (int c = 0; c < columns; c += LANES) most = larger(most, magnitude(load<f32x16>(values + c)));
            token_size = largest(most);
            token_size = token_size < 1e-5f ? 1e-5f : token_size;
        }
        token_sums[row] = 0;
        for (int block = 0; block < columns / BLOCK_COLUMNS; block++) {
            const f32x16 first = load<f32x16>(values + 32 * block), second = load<f32x16>(values + 32 * block + 16);
            const float size = rounding == Rounding::PER_TOKEN ? token_size
                                                               : largest(larger(magnitude(first), magnitude(second)));
            const float steps = size > 0 ? 127.0f / size : 0.0f;
            const size_t index = size_t(row) * columns / 32 + block;
            scales[index] = rounding == Rounding::PER_TOKEN ? 1.0f / steps : size / 127.0f;
            int8_t* codes = q + size_t(row) * columns + 32 * block;
            const int32_t low = round_half(first, steps, codes), high = round_half(second, steps, codes + 16);
            q_sums[index] = scales[index] * float(low + high);
            half_q_sums[2 * index] = scales[index] * float(low);
            half_q_sums[2 * index + 1] = scales[index] * float(high);
            token_sums[row] += low + high;
        }
    }

  private:
    static int32_t round_half(f32x16 values, float steps, int8_t* to) {
        const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, half to even
        const i32x16 whole = __builtin_convertvector((values * splat(steps) + magic) - magic, i32x16);
        store(to, __builtin_convertvector(whole, i8x16));
        return sum(whole);
    }
};

}  // namespace graphcore
