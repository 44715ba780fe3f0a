// What a matrix is multiplied with: rows of float32, and the same rows rounded to whole numbers.
//
//     per block:  scale = max|x| / 127 over 32 columns,       q = round(x / scale)
//     per token:  scale = max(max|x|, 1e-5) / 127 over a row,  q = clip(round_half_even(x / scale), -128, 127)
//     wide:       scale = max|x| / 32512 over 32 columns,     q = round(x / scale) = 256 * high + low
//
// The second is BitNet's own arithmetic (transformers, integrations/bitnet.py, ActQuant). The third has 15 bits and is
// finer than bf16: two products of bytes where memory is the limit anyway.
#pragma once

#include <cstddef>

#include "codes.h"

namespace graphcore {

enum class Rounding : int32_t { NONE = 0, PER_BLOCK = 1, PER_TOKEN = 2, WIDE = 3 };

struct Activations {
    Rounding rounding = Rounding::NONE;
    int rows = 0, columns = 0;  // columns: a multiple of 32
    float* x = nullptr;         // [rows, columns]
    float* half_sums = nullptr; // [rows, columns / 16] sums of x
    int8_t* q = nullptr;        // [rows, columns]
    int8_t* low = nullptr;      // [rows, columns] the low bytes where rounding is wide; q has the high ones
    float* scales = nullptr;    // [rows, columns / 32]
    int32_t* token_sums = nullptr;  // [rows] sums of q
    float* q_sums = nullptr;    // [rows, columns / 32] sums of q, times the scale
    float* half_q_sums = nullptr;  // [rows, columns / 16] the same of 16 columns

    static int padded(int columns) { return (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS * BLOCK_COLUMNS; }

    static size_t nbytes(int rows, int columns) {
        const size_t all = size_t(rows) * padded(columns);
        return all * 4 + all / 16 * 4 + 2 * all + all / 32 * 8 + all / 16 * 4 + size_t(rows) * 4 + 8 * 64;
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
        low = (int8_t*)take(all);
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
            const float range = rounding == Rounding::WIDE ? 127.0f * 256.0f : 127.0f;
            const float steps = size > 0 ? range / size : 0.0f;
            const size_t index = size_t(row) * columns / 32 + block;
            scales[index] = rounding == Rounding::PER_TOKEN ? 1.0f / steps : size / range;
            const size_t at = size_t(row) * columns + 32 * block;
            const int32_t left = round_half(first, steps, at), right = round_half(second, steps, at + 16);
            q_sums[index] = scales[index] * float(left + right);
            half_q_sums[2 * index] = scales[index] * float(left);
            half_q_sums[2 * index + 1] = scales[index] * float(right);
            token_sums[row] += left + right;
        }
    }

  private:
    int32_t round_half(f32x16 values, float steps, size_t at) {
        const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, half to even
        const i32x16 whole = __builtin_convertvector((values * splat(steps) + magic) - magic, i32x16);
        if (rounding == Rounding::WIDE) {
            const i32x16 high = (whole + 128) >> 8;
            store_bytes(q + at, high);
            store_bytes(low + at, whole - (high << 8));
        } else {
            store_bytes(q + at, whole);
        }
        return sum(whole);
    }
};

}  // namespace graphcore
