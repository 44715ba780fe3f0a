// Products of four tokens or more with AVX2: the codes of eight blocks are expanded once for all tokens, into memory that stays in L1.
// (AVX-512 has registers for the codes of a block, and expands them again for each eight tokens, which is as fast.)
//
//     chunk of 256 columns -> expand 16 rows -> for each tile of tokens: dot products of a block, times scales, added to the sums
//
// Registers hold the integer sums of sixteen rows and a tile of tokens, so that each code is loaded once for all tokens of the
// tile. The sums of a row and token are added in the order of `multiply_rounded`, with the same bits.
#pragma once

#include "products.h"

namespace graphcore {

#if GRAPHCORE_AVX2

constexpr int EXPANDED_TOKENS = 4;  // tokens of a tile

// Quads that are added in 16 bits, or at all with AVX-VNNI; 0 for 16-bit x.
template <class F, bool WIDE>
#if GRAPHCORE_NO_VNNI
constexpr int QUADS_OF_RUN = WIDE ? 0 : quads_in_16_bits(F::LARGEST);
#else
constexpr int QUADS_OF_RUN = WIDE ? 0 : QUADS;
#endif

// Eight blocks of sixteen rows. Pairs are the codes of columns 0 and 2 of a quad, then those of columns 1 and 3.
template <int RUN>
struct ExpandedChunk {
#if GRAPHCORE_NO_VNNI
    static constexpr bool IN_PAIRS = RUN == 0;
#else
    static constexpr bool IN_PAIRS = false;
#endif
    __m256i codes[CHUNK_BLOCKS][QUADS][IN_PAIRS ? 2 : 1][PARTS];
    FloatPart scales[CHUNK_BLOCKS][2][PARTS], corrections[CHUNK_BLOCKS][2][PARTS];  // of a block, or of its halves

    template <class F>
    void expand(const Stretch<F>& here) {
        for (int within = 0; within < here.blocks; within++) {
            prefetch_block<F>(here.meta, within);
            for (int part = 0; part < PARTS; part++) {
                const int lane = part * PART_LANES;
                for (int j = 0; j < QUADS; j++) {
                    const __m256i bytes = (__m256i)values_of<F>(here.codes_of(within) + 4 * lane, j);
                    codes[within][j][0][part] = IN_PAIRS ? _mm256_and_si256(bytes, _mm256_set1_epi16(0xff)) : bytes;
                    if constexpr (IN_PAIRS) codes[within][j][1][part] = _mm256_srli_epi16(bytes, 8);
                }
                if constexpr (!F::HALVES) corrections[within][1][part] = FloatPart{};
                for (int half = 0; half < (F::HALVES ? 2 : 1); half++) {
                    const int number = here.part_of(within) + half;
                    scales[within][half][part] = F::scale(here.meta_of(within), number, lane);
                    corrections[within][half][part] = correction<F>(here.meta_of(within), number, lane, scales[within][half][part]);
                }
            }
        }
    }
};

// Sums of sixteen rows and a tile of tokens.
template <int TOKENS>
using TileSums = IntPart[TOKENS][PARTS];

// dot_tile(codes, first, end, x, at, totals) sets totals to the dot products of quads first .. end - 1 of a block. at: index of
// the first number of each token's block in the arrays of x.
#if GRAPHCORE_NO_VNNI

// Add in place: with the intrinsics GCC 12 computes all products before it adds, and keeps some sums in memory.
__attribute__((always_inline)) inline void add_words(__m256i& sum, __m256i words) { asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(words)); }
__attribute__((always_inline)) inline void add_integers(__m256i& sum, __m256i integers) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(integers)); }

template <int RUN, int TOKENS>
__attribute__((always_inline)) inline void dot_tile(const __m256i (&codes)[QUADS][1][PARTS], int first, int end, const Activations& x, const size_t (&at)[TOKENS], TileSums<TOKENS>& totals) {
    for (int begin = first; begin < end; begin += RUN) {
        __m256i sums[TOKENS][PARTS] = {};
#pragma GCC unroll 8
        for (int j = begin; j < begin + RUN; j++)
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; t++) {
                const __m256i four = four_everywhere(x.q + at[t] + 4 * j);
#pragma GCC unroll 2
                for (int part = 0; part < PARTS; part++) add_words(sums[t][part], _mm256_maddubs_epi16(codes[j][0][part], four));
            }
        for (int t = 0; t < TOKENS; t++)
            for (int part = 0; part < PARTS; part++) {
                const IntPart wide = (IntPart)_mm256_madd_epi16(sums[t][part], _mm256_set1_epi16(1));
                totals[t][part] = begin == first ? wide : totals[t][part] + wide;
            }
    }
}

template <int RUN, int TOKENS>
__attribute__((always_inline)) inline void dot_tile(const __m256i (&codes)[QUADS][2][PARTS], int first, int end, const Activations& x, const size_t (&at)[TOKENS], TileSums<TOKENS>& totals) {
    static_assert(RUN == 0, "sums of pairs have 32 bits");
    __m256i sums[TOKENS][PARTS] = {};
#pragma GCC unroll 8
    for (int j = first; j < end; j++)
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; t++) {
                const __m256i two = four_everywhere(x.pairs + at[t] + 4 * j + 2 * odd);
#pragma GCC unroll 2
                for (int part = 0; part < PARTS; part++) add_integers(sums[t][part], _mm256_madd_epi16(codes[j][odd][part], two));
            }
    std::memcpy(totals, sums, sizeof(sums));
}

#else

template <int TOKENS>
__attribute__((always_inline)) inline void dot_bytes_of_tile(const __m256i (&codes)[QUADS][1][PARTS], int first, int end, const int8_t* q, const size_t (&at)[TOKENS], IntPart (&sums)[TOKENS][PARTS]) {
#pragma GCC unroll 8
    for (int j = first; j < end; j++)
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; t++) {
            const int32_t four = four_at(q + at[t] + 4 * j);
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) sums[t][part] = dot4(sums[t][part], (BytePart)codes[j][0][part], four);
        }
}

template <int RUN, int TOKENS>
__attribute__((always_inline)) inline void dot_tile(const __m256i (&codes)[QUADS][1][PARTS], int first, int end, const Activations& x, const size_t (&at)[TOKENS], TileSums<TOKENS>& totals) {
    IntPart high[TOKENS][PARTS] = {};
    dot_bytes_of_tile<TOKENS>(codes, first, end, x.q, at, high);
    if constexpr (RUN == 0) {
        for (int t = 0; t < TOKENS; t++)
            for (int part = 0; part < PARTS; part++) high[t][part] <<= 8;
        dot_bytes_of_tile<TOKENS>(codes, first, end, x.low, at, high);
    }
    std::memcpy(totals, high, sizeof(high));
}

#endif

// Adds the products of a chunk and a tile of tokens to their sums.
template <int RUN, bool HALVES, bool CORRECTS, int TOKENS>
__attribute__((noinline)) void multiply_chunk(const ExpandedChunk<RUN>& chunk, int first, int blocks, const Activations& x, const int* rows, f32x16* totals) {
    constexpr int END = HALVES ? QUADS / 2 : QUADS, RUN_OF_PART = RUN < END ? RUN : END;
    FloatPart sums[TOKENS][PARTS];
    std::memcpy(sums, totals, sizeof(sums));
    for (int within = 0; within < blocks; within++) {
        size_t index[TOKENS], at[TOKENS];
        for (int t = 0; t < TOKENS; t++) {
            index[t] = size_t(rows[t]) * (x.columns / BLOCK_COLUMNS) + first + within;
            at[t] = index[t] * BLOCK_COLUMNS;
        }
        TileSums<TOKENS> dots;
        FloatPart products[TOKENS][PARTS];
        dot_tile<RUN_OF_PART, TOKENS>(chunk.codes[within], 0, END, x, at, dots);
        for (int t = 0; t < TOKENS; t++)
            for (int part = 0; part < PARTS; part++) products[t][part] = to_float(dots[t][part]) * chunk.scales[within][0][part];
        if constexpr (HALVES) {
            dot_tile<RUN_OF_PART, TOKENS>(chunk.codes[within], END, QUADS, x, at, dots);
            for (int t = 0; t < TOKENS; t++)
                for (int part = 0; part < PARTS; part++) products[t][part] += to_float(dots[t][part]) * chunk.scales[within][1][part];
        }
        for (int t = 0; t < TOKENS; t++)
            for (int part = 0; part < PARTS; part++)
                sums[t][part] = with_block<HALVES, CORRECTS>(
                    sums[t][part], products[t][part], chunk.corrections[within][0][part], chunk.corrections[within][1][part], x, index[t]);
    }
    std::memcpy(totals, sums, sizeof(sums));
}

template <int RUN, bool HALVES, bool CORRECTS, int TOKENS = EXPANDED_TOKENS>
void multiply_chunk_tiles(const ExpandedChunk<RUN>& chunk, int first, int blocks, const Activations& x, const int* rows, int tokens, f32x16* totals) {
    int t = 0;
    for (; t + TOKENS <= tokens; t += TOKENS) multiply_chunk<RUN, HALVES, CORRECTS, TOKENS>(chunk, first, blocks, x, rows + t, totals + t);
    if constexpr (TOKENS > 1)
        if (t < tokens) multiply_chunk_tiles<RUN, HALVES, CORRECTS, TOKENS / 2>(chunk, first, blocks, x, rows + t, tokens - t, totals + t);
}

template <class F, bool WIDE>
void multiply_expanded(const uint8_t* group, int columns, const Activations& x, const int* rows, int tokens, f32x16* totals) {
    ExpandedChunk<QUADS_OF_RUN<F, WIDE>> expanded;
    for (int t = 0; t < tokens; t++) totals[t] = f32x16{};
    for (int chunk = 0; chunk < num_chunks(columns); chunk++) {
        const Stretch<F> here(group, columns, chunk);
        expanded.template expand<F>(here);
        multiply_chunk_tiles<QUADS_OF_RUN<F, WIDE>, F::HALVES, HAS_CORRECTION<F>>(expanded, here.first, here.blocks, x, rows, tokens, totals);
    }
}

#endif

}  // namespace graphcore
