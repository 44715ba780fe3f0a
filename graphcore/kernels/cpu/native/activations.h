// Activations, the inputs of products: rows of float32, and the same rows rounded to integers.
//
//     per block:  scale = max|x| / 127 over 32 columns,       q = round(x / scale)
//     per token:  scale = max(max|x|, 1e-5) / 127 over a row,  q = clip(round_half_even(x / scale), -128, 127)
//     wide:       scale = max|x| / 32512 over 32 columns,     q = round(x / scale) = 256 * high + low
//
// Rounding per token is that of BitNet (transformers, integrations/bitnet.py, ActQuant). Wide rounding has 15 bits and is
// finer than bf16. Integers are stored in the fastest layout for dot.h: as bytes, or as pairs of 16 bits.
#pragma once

#include <cstddef>

#include "codes.h"

namespace graphcore {

enum class Rounding : int32_t { NONE = 0, PER_BLOCK = 1, PER_TOKEN = 2, WIDE = 3 };

struct Activations {
    Rounding rounding = Rounding::NONE;
    int rows = 0, columns = 0;  // columns: a multiple of 32
    float* x = nullptr;         // [rows, columns]
    float* half_sums = nullptr; // [rows, columns / 16] sums of x over 16 columns
    int8_t* q = nullptr;        // [rows, columns] whole numbers; if wide, their high bytes (unused if there are pairs)
#if GRAPHCORE_NO_VNNI
    int16_t* pairs = nullptr;   // [rows, columns] whole numbers; those of a quad are in the order 0 2 1 3
#else
    int8_t* low = nullptr;      // [rows, columns] low bytes of whole numbers, if wide
#endif
    float* scales = nullptr;    // [rows, columns / 32]
    int32_t* token_sums = nullptr;  // [rows] sums of q over a row
    float* q_sums = nullptr;    // [rows, columns / 32] sums of q over 32 columns, times the scale
    float* half_q_sums = nullptr;  // [rows, columns / 16] sums of q over 16 columns, times the scale

    static int padded(int columns) { return (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS * BLOCK_COLUMNS; }

    static size_t nbytes(int rows, int columns) {
        const size_t all = size_t(rows) * padded(columns);
        return all * 4 + all / 16 * 4 + 3 * all + all / 32 * 8 + all / 16 * 4 + size_t(rows) * 4 + 8 * 64;
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
#if GRAPHCORE_NO_VNNI
        pairs = (int16_t*)take(2 * all);
#else
        low = (int8_t*)take(all);
#endif
        scales = (float*)take(all / 32 * 4);
        q_sums = (float*)take(all / 32 * 4);
        half_q_sums = (float*)take(all / 16 * 4);
        token_sums = (int32_t*)take(size_t(rows) * 4);
    }

    const float* x_row(int row) const { return x + size_t(row) * columns; }
    const int8_t* q_row(int row) const { return q + size_t(row) * columns; }

    // Rounds row `row` of x and computes its sums. The caller has filled the row; its padding up to `columns` is zero.
    void finish(int row) {
        float* values = x + size_t(row) * columns;
        if (rounding == Rounding::NONE) {
            for (int half = 0; half < columns / 16; half++)
                half_sums[size_t(row) * columns / 16 + half] = sum_of_half(values + 16 * half);
            return;
        }
        float token_size = 0;
        if (rounding == Rounding::PER_TOKEN) {
            token_size = largest_of(values, columns);
            token_size = token_size < 1e-5f ? 1e-5f : token_size;
        }
        token_sums[row] = 0;
        for (int block = 0; block < columns / BLOCK_COLUMNS; block++) {
            const float* here = values + BLOCK_COLUMNS * block;
            const float size = rounding == Rounding::PER_TOKEN ? token_size : largest_of(here, BLOCK_COLUMNS);
            const float range = rounding == Rounding::WIDE ? 127.0f * 256.0f : 127.0f;
            const float steps = size > 1e-34f ? range / size : 0.0f;  // not finite for smaller sizes; their x counts as zero
            const size_t index = size_t(row) * columns / 32 + block;
            scales[index] = rounding == Rounding::PER_TOKEN ? 1.0f / steps : size / range;
            const size_t at = size_t(row) * columns + 32 * block;
            const int32_t left = round_half(here, steps, at), right = round_half(here + 16, steps, at + 16);
            q_sums[index] = scales[index] * float(left + right);
            half_q_sums[2 * index] = scales[index] * float(left);
            half_q_sums[2 * index + 1] = scales[index] * float(right);
            token_sums[row] += left + right;
        }
    }

  private:
    static float sum_of_half(const float* values) {
        FloatPart parts[PARTS];
        std::memcpy(parts, values, sizeof(parts));
        return sum(parts);
    }

    static float largest_of(const float* values, int count) {
        FloatPart most = magnitude(load<FloatPart>(values));
        for (int c = PART_LANES; c < count; c += PART_LANES) most = larger(most, magnitude(load<FloatPart>(values + c)));
        return largest(most);
    }

    int32_t round_half(const float* values, float steps, size_t at) {
        const FloatPart magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, half to even
        IntPart total{};
        for (int c = 0; c < 16; c += PART_LANES) {
            const FloatPart value = load<FloatPart>(values + c);
            const IntPart whole = __builtin_convertvector((value * splat(steps) + magic) - magic, IntPart);
            keep(whole, at + c);
            total += whole;
        }
        return sum(total);
    }

#if GRAPHCORE_NO_VNNI
    void keep(IntPart whole, size_t at) {
        const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 4, 5, 2, 3, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0);
        const __m256i quads = _mm256_shuffle_epi8(_mm256_packs_epi32((__m256i)whole, (__m256i)whole), order);
        _mm_storeu_si128((__m128i*)(pairs + at), _mm256_castsi256_si128(_mm256_permute4x64_epi64(quads, 0b1000)));
        if (rounding != Rounding::WIDE) store_bytes(q + at, whole);
    }
#else
    void keep(IntPart whole, size_t at) {
        if (rounding != Rounding::WIDE) return store_bytes(q + at, whole);
        const IntPart high = (whole + 128) >> 8;
        store_bytes(q + at, high);
        store_bytes(low + at, whole - (high << 8));
    }
#endif
};

}  // namespace graphcore
