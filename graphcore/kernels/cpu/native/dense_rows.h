// Products of dense rows in torch's layout, [rows, columns], and the activations of one or more tokens.
//
// A product of a row and a token is one vector of sums, from the first column to the last; its lanes are added at the end. All
// tiles add in this order, so a product does not depend on the rows and tokens beside it.
#pragma once

#include <algorithm>
#include <utility>

#include "activations.h"

namespace graphcore {

// Rows and tokens of a tile, whose sums stay in registers. Plain C++ has vectors of four registers.
#if defined(__AVX512F__)
constexpr int DENSE_ROWS = 4, DENSE_TOKENS = 6;
#elif GRAPHCORE_AVX2
constexpr int DENSE_ROWS = 4, DENSE_TOKENS = 3;
#else
constexpr int DENSE_ROWS = 2, DENSE_TOKENS = 1;
#endif

constexpr int DENSE_STEP = 32;  // columns between two prefetches
constexpr int FEW_TOKENS = 4;   // most tokens for which reading the weights takes longest

// Distances of prefetches into the L1 cache: within a row, and the least and most from a tile to a later one.
constexpr size_t NEAR_NBYTES = 1024, LEAST_NBYTES = 4096, MOST_NBYTES = 8192;

// The rows of a group, each of which begins at `first` plus a multiple of row_nbytes; rows that the matrix does not have are its last.
struct DenseGroup {
    const uint8_t* first;
    size_t row_nbytes;
    int height;

    const uint8_t* row(int index) const { return first + row_nbytes * size_t(index < height ? index : height - 1); }
};

// What a tile prefetches for later ones: so many bytes for each step of its columns.
struct Ahead {
    const uint8_t* from;
    size_t nbytes;
    bool is_near;  // true: into the L1 cache; else into L2, and the tile prefetches its own rows into L1

    __attribute__((always_inline)) void fetch(int step) const {
        const uint8_t *begin = from + step * nbytes, *end = begin + nbytes;
        for (auto* line = (const uint8_t*)((uintptr_t(begin) + VECTOR_NBYTES - 1) / VECTOR_NBYTES * VECTOR_NBYTES); line < end; line += VECTOR_NBYTES)
            is_near ? __builtin_prefetch(line) : __builtin_prefetch(line, 0, 2);
    }
};

inline f32x16 sums_of_group(const FloatPart (&rows)[LANES]) {
    return by_parts([&](int lane) { return sums_of_rows(rows + lane); });
}

template <class T>
inline FloatPart widen_some(const T* from, int count) {
    T some[PART_LANES] = {};
    std::memcpy(some, from, size_t(count) * sizeof(T));
    return widen(some);
}

// Multiplies ROWS rows with TOKENS tokens: each vector is loaded once for several products. x: padded with zeros to whole blocks.
template <int ROWS, int TOKENS, class T>
inline void multiply_dense_tile(const DenseGroup& group, int row, int columns, const float* const* x, const Ahead& ahead, FloatPart (*sums)[LANES]) {
    FloatPart held[TOKENS][ROWS] = {};
    const T* rows[ROWS];
    for (int r = 0; r < ROWS; r++) rows[r] = (const T*)group.row(row + r);
    const auto add = [&](int c, const auto& weights_of) __attribute__((always_inline)) {
        FloatPart values[TOKENS];
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) values[t] = load<FloatPart>(x[t] + c);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const FloatPart weights = weights_of(rows[r] + c);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++) held[t][r] += weights * values[t];
        }
    };
    const auto whole = [](const T* from) __attribute__((always_inline)) { return widen(from); };
    int c = 0;
    for (; c + DENSE_STEP <= columns; c += DENSE_STEP) {
        ahead.fetch(c / DENSE_STEP);
        if (!ahead.is_near)
            for (int r = 0; r < ROWS; r++) __builtin_prefetch((const uint8_t*)(rows[r] + c) + NEAR_NBYTES);
#pragma GCC unroll 4
        for (int i = 0; i < DENSE_STEP; i += PART_LANES) add(c + i, whole);
    }
    for (; c + PART_LANES <= columns; c += PART_LANES) add(c, whole);
    if (c < columns) add(c, [&](const T* from) __attribute__((always_inline)) { return widen_some(from, columns - c); });
    for (int t = 0; t < TOKENS; t++)
        for (int r = 0; r < ROWS; r++) sums[t][row + r] = held[t][r];
}

// Multiplies the group with a few tokens. Memory is read from front to back, so what is some tiles further on is prefetched.
template <int TOKENS, class T>
inline void multiply_dense_few(const DenseGroup& group, int columns, const float* const* x, f32x16* totals) {
    constexpr int ROWS = TOKENS <= 2 ? std::min(2, DENSE_ROWS) : DENSE_ROWS;
    FloatPart sums[TOKENS][LANES];
    if (group.height < LANES) std::memset(sums, 0, sizeof(sums));
    const size_t tile = ROWS * group.row_nbytes, distance = tile * std::max<size_t>(1, (LEAST_NBYTES + tile - 1) / tile);
    for (int row = 0; row < group.height; row += ROWS)
        multiply_dense_tile<ROWS, TOKENS, T>(group, row, columns, x, {group.row(row) + distance, ROWS * DENSE_STEP * sizeof(T), distance <= MOST_NBYTES}, sums);
    for (int t = 0; t < TOKENS; t++) totals[t] = sums_of_group(sums[t]);
}

// Multiplies the group with a tile of tokens. Each of the `tiles` tiles prefetches its share of the next group.
template <int TOKENS, class T>
inline void multiply_dense_many(const DenseGroup& group, int columns, const float* const* x, int index, int tiles, f32x16* totals) {
    FloatPart sums[TOKENS][LANES];
    if (group.height < LANES) std::memset(sums, 0, sizeof(sums));
    const size_t nbytes = DENSE_ROWS * DENSE_STEP * sizeof(T) / tiles, tile = nbytes * (columns / DENSE_STEP);
    const uint8_t* share = group.first + LANES * group.row_nbytes + index * (LANES / DENSE_ROWS) * tile;
    for (int row = 0; row < group.height; row += DENSE_ROWS)
        multiply_dense_tile<DENSE_ROWS, TOKENS, T>(group, row, columns, x, {share + row / DENSE_ROWS * tile, nbytes, false}, sums);
    for (int t = 0; t < TOKENS; t++) totals[t] = sums_of_group(sums[t]);
}

// Calls one(std::integral_constant<int, number>) for a number from 1 to MOST.
template <int MOST, class One>
__attribute__((always_inline)) inline void with_constant(int number, const One& one) {
    [&]<int... I>(std::integer_sequence<int, I...>) { ((I + 1 == number ? one(std::integral_constant<int, I + 1>{}) : void()), ...); }(std::make_integer_sequence<int, MOST>{});
}

// Multiplies the sixteen rows of a group with some tokens. x: rows of x.
template <class T>
inline void multiply_dense_group(const DenseGroup& group, int columns, const float* const* x, int tokens, f32x16* totals) {
    constexpr int FEW = std::min(FEW_TOKENS, DENSE_TOKENS);
    if (tokens <= FEW) return with_constant<FEW>(tokens, [&](auto count) { multiply_dense_few<count, T>(group, columns, x, totals); });
    const int tiles = (tokens + DENSE_TOKENS - 1) / DENSE_TOKENS;
    for (int t = 0, index = 0, count; index < tiles; index++, t += count) {
        count = (tokens - t + tiles - index - 1) / (tiles - index);
        with_constant<DENSE_TOKENS>(count, [&](auto some) { multiply_dense_many<some, T>(group, columns, x + t, index, tiles, totals + t); });
    }
}

}  // namespace graphcore
