// Products of codes that are floats: sixteen levels, or E4M3. x is not rounded, whatever the rounding of other formats is.
//
// Sums of a block are float32 sums over its columns, and are then multiplied by the block's scales. A token's sums do not
// depend on the other tokens.
#pragma once

#include "matrix.h"
#include "products.h"

namespace graphcore {

// Rows of x as floats, of several tokens.
template <int TOKENS>
using FloatRows = const float* [TOKENS];

constexpr int FLOAT_TOKENS = TOKEN_TILE < 4 ? TOKEN_TILE : 4;  // tokens of a tile, whose sums fill the registers
constexpr int CHAINS = 4;  // sums of a row and token that are independent of each other: one would wait for each addition

// Codes of four bits: one column of sixteen rows at a time.
template <class F, int TOKENS>
inline void multiply_levels(const uint8_t* group, int columns, const FloatRows<TOKENS>& x, f32x16* totals) {
    FloatPart all[TOKENS][PARTS] = {};
    for (int chunk = 0; chunk < num_chunks(columns); chunk++) {
        const Stretch<F> here(group, columns, chunk);
        for (int within = 0; within < here.blocks; within++) {
            prefetch_block<F>(here.meta, within);
            const int first = (here.first + within) * BLOCK_COLUMNS;
            for (int lane = 0; lane < LANES; lane += PART_LANES) {
                FloatPart sums[TOKENS][CHAINS] = {};
#pragma GCC unroll 8
                for (int j = 0; j < QUADS; j++) {
                    const IntPart quad = (IntPart)Codes<F::BITS>::quad(here.codes_of(within) + 4 * lane, j);
#pragma GCC unroll 4
                    for (int c = 0; c < 4; c++) {
                        const FloatPart level = F::level(quad >> (8 * c));
                        for (int t = 0; t < TOKENS; t++) sums[t][c] += level * splat(x[t][first + 4 * j + c]);
                    }
                }
                const FloatPart scale = F::scale(here.meta_of(within), 0, lane);
                for (int t = 0; t < TOKENS; t++) all[t][lane / PART_LANES] += ((sums[t][0] + sums[t][1]) + (sums[t][2] + sums[t][3])) * scale;
            }
        }
    }
    for (int t = 0; t < TOKENS; t++) std::memcpy(totals + t, all[t], sizeof(f32x16));
}

#if defined(__AVX512BW__) || (GRAPHCORE_AVX2 && defined(__F16C__))
// E4M3 by the conversion of fp16: shifted to the place of fp16's fields, a code is its value times 2^-8, subnormals included.
// The even bytes of a register become fp16 numbers of columns 0 and 2 of a quad, the odd bytes those of columns 1 and 3, row
// by row; so a register of floats has two columns of half of the rows, and the two sums of a row are added at the end.
#if defined(__AVX512BW__)
typedef __m512i HalfCodes;
inline HalfCodes even_halves(BytePart codes) { return _mm512_slli_epi16((__m512i)codes, 8); }
inline HalfCodes odd_halves(BytePart codes) { return (__m512i)codes; }
inline HalfCodes halves_of_codes(HalfCodes high) {  // codes in the high bytes of 16 bits; the low bytes are ignored
    return _mm512_and_si512(_mm512_srai_epi16(high, 1), _mm512_set1_epi16(int16_t(0xbf80)));
}
inline FloatPart half_lanes(HalfCodes halves, int upper) {
    const __m256i some = upper ? _mm512_extracti64x4_epi64(halves, 1) : _mm512_castsi512_si256(halves);
    return (FloatPart)_mm512_cvtph_ps(some);
}
inline FloatPart pairs_of_four(const float* x, int odd) {
    const __m512 four = _mm512_broadcast_f32x4(_mm_loadu_ps(x));
    return (FloatPart)(odd ? _mm512_permute_ps(four, 0xdd) : _mm512_permute_ps(four, 0x88));
}
inline FloatPart each_twice(FloatPart rows, int upper) {
    const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return (FloatPart)_mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(8 * upper)), (__m512)rows);
}
#else
typedef __m256i HalfCodes;
inline HalfCodes even_halves(BytePart codes) { return _mm256_slli_epi16((__m256i)codes, 8); }
inline HalfCodes odd_halves(BytePart codes) { return (__m256i)codes; }
inline HalfCodes halves_of_codes(HalfCodes high) {
    return _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(int16_t(0xbf80)));
}
inline FloatPart half_lanes(HalfCodes halves, int upper) {
    const __m128i some = upper ? _mm256_extracti128_si256(halves, 1) : _mm256_castsi256_si128(halves);
    return (FloatPart)_mm256_cvtph_ps(some);
}
inline FloatPart pairs_of_four(const float* x, int odd) {
    const __m256 four = _mm256_broadcast_ps((const __m128*)x);
    return (FloatPart)(odd ? _mm256_permute_ps(four, 0xdd) : _mm256_permute_ps(four, 0x88));
}
inline FloatPart each_twice(FloatPart rows, int upper) {
    const __m256i first = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    return (FloatPart)_mm256_permutevar8x32_ps((__m256)rows, _mm256_add_epi32(first, _mm256_set1_epi32(4 * upper)));
}
#endif

template <class F, int TOKENS>
inline void multiply_e4m3(const uint8_t* group, int columns, const FloatRows<TOKENS>& x, f32x16* totals) {
    FloatPart all[TOKENS][PARTS][2] = {};  // two sums of each row, of the first and of the second half of a part's rows
    for (int chunk = 0; chunk < num_chunks(columns); chunk++) {
        const Stretch<F> here(group, columns, chunk);
        for (int within = 0; within < here.blocks; within++) {
            prefetch_block<F>(here.meta, within);
            const int first = (here.first + within) * BLOCK_COLUMNS;
            for (int lane = 0; lane < LANES; lane += PART_LANES) {
                FloatPart sums[TOKENS][2][2] = {};  // of halves of the rows, and of columns in even and odd bytes
#pragma GCC unroll 8
                for (int j = 0; j < QUADS; j++) {
                    const BytePart codes = Codes<8>::quad(here.codes_of(within) + 4 * lane, j);
                    const HalfCodes even = halves_of_codes(even_halves(codes)), odd = halves_of_codes(odd_halves(codes));
                    const FloatPart levels[2][2] = {{half_lanes(even, 0), half_lanes(even, 1)}, {half_lanes(odd, 0), half_lanes(odd, 1)}};
                    for (int t = 0; t < TOKENS; t++)
                        for (int i = 0; i < 2; i++) {
                            const FloatPart two = pairs_of_four(x[t] + first + 4 * j, i);
                            for (int upper = 0; upper < 2; upper++) sums[t][upper][i] += levels[i][upper] * two;
                        }
                }
                const FloatPart scale = F::scale(here.meta_of(within), 0, lane);
                for (int upper = 0; upper < 2; upper++) {
                    const FloatPart twice = each_twice(scale, upper);
                    for (int t = 0; t < TOKENS; t++) all[t][lane / PART_LANES][upper] += (sums[t][upper][0] + sums[t][upper][1]) * twice;
                }
            }
        }
    }
    for (int t = 0; t < TOKENS; t++) {
        float pairs[2 * LANES], sums[LANES];
        std::memcpy(pairs, all[t], sizeof(pairs));
        for (int lane = 0; lane < LANES; lane++) sums[lane] = (pairs[2 * lane] + pairs[2 * lane + 1]) * 256.0f;
        std::memcpy(totals + t, sums, sizeof(sums));
    }
}
#define GRAPHCORE_HALF_CODES 1
#endif

template <class F, int TOKENS = FLOAT_TOKENS>
void multiply_float_tiles(const uint8_t* group, int columns, const Activations& x, const int* rows, int tokens, f32x16* totals) {
    int t = 0;
    for (; t + TOKENS <= tokens; t += TOKENS) {
        FloatRows<TOKENS> values;
        for (int i = 0; i < TOKENS; i++) values[i] = x.x_row(rows[t + i]);
#if GRAPHCORE_HALF_CODES
        if constexpr (F::BITS == 8) multiply_e4m3<F, TOKENS>(group, columns, values, totals + t);
        else
#endif
            multiply_levels<F, TOKENS>(group, columns, values, totals + t);
    }
    if constexpr (TOKENS > 1)
        if (t < tokens) multiply_float_tiles<F, TOKENS / 2>(group, columns, x, rows + t, tokens - t, totals + t);
}

}  // namespace graphcore
