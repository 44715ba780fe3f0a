// A weight matrix of any format, and the table of operations for each format.
#pragma once

#include <type_traits>

#include "products.h"
#include "team.h"

namespace graphcore {

struct Matrix {
    const uint8_t* bytes;
    int32_t rows, columns;
    int32_t format;
    float scale;  // scale of the whole tensor if it has one, else 1
};

// Largest number of tokens of `multiply_rounded` and `multiply_float`, a power of two. Narrow registers have room for fewer
// sums, and larger tiles take the compiler a minute.
#if defined(__AVX512F__)
constexpr int TOKEN_TILE = 8;
#else
constexpr int TOKEN_TILE = 2;
#endif
constexpr int DENSE_FIRST = 4;  // most tokens of a dense group that are multiplied row by row
constexpr int DENSE_ROWS = 4;   // rows of a tile of dense rows
constexpr size_t L1_NBYTES = 32 * 1024;

// Most tokens that a group is multiplied with at once: it is read from memory once for all of them.
constexpr int TOKENS_AT_ONCE = 128;

// A function that multiplies the sixteen rows of one group with rows rows[0] .. rows[tokens - 1] of x.
using Multiply = void (*)(const uint8_t* group, int columns, const Activations& x, const int* rows, int tokens, f32x16* totals);

struct FormatOps {
    size_t (*group_nbytes)(int columns);
    Multiply multiply;
    void (*pack_group)(const uint8_t* const rows[GROUP_ROWS], int columns, uint8_t* group);
    void (*unpack_group)(const uint8_t* group, int columns, float scale, int rows, int target, uint8_t* to);
    void (*unpack_row)(const uint8_t* group, int columns, float scale, int lane, float* to);
    int raw_columns, raw_nbytes;
};

const FormatOps& format_ops(int format);

template <class F>
void pack_group(const uint8_t* const rows[GROUP_ROWS], int columns, uint8_t* group);  // defined in pack.cpp

inline size_t matrix_nbytes(int format, int rows, int columns) {
    if (format < DENSE_FORMATS) return size_t(rows) * columns * (format == F32 ? 4 : 2);
    return size_t((rows + GROUP_ROWS - 1) / GROUP_ROWS) * format_ops(format).group_nbytes(columns);
}

// Returns the expert's matrix at a place, counted from the first matrix.
inline Matrix matrix_at(const Matrix& first, int place) {
    const size_t tail = has_tensor_scale(first.format) ? TAIL_NBYTES : 0;  // each expert ends with the tensor's one scale
    Matrix matrix = first;
    matrix.bytes += place * (matrix_nbytes(first.format, first.rows, first.columns) + tail);
    return matrix;
}

inline int num_groups(int rows) { return (rows + GROUP_ROWS - 1) / GROUP_ROWS; }

template <int TOKENS, class T>
inline void multiply_dense_rows(const T* rows, int height, int columns, const float* const* x, float (*results)[LANES]) {
    for (int row = 0; row < height; row++) multiply_dense_row<TOKENS>(rows + size_t(row) * columns, columns, x, results, row);
}

template <int TOKENS, bool FETCHES, class T>
inline void multiply_dense_tiles(const T* rows, int height, int columns, const float* const* x, float (*results)[LANES]) {
    int row = 0;
    for (; row + DENSE_ROWS <= height; row += DENSE_ROWS)
        multiply_dense_tile<DENSE_ROWS, TOKENS, FETCHES>(rows + size_t(row) * columns, columns, x, results, row);
    for (; row < height; row++) multiply_dense_row<TOKENS>(rows + size_t(row) * columns, columns, x, results, row);
}

// Multiplies a group row by row with the first tokens, which reads memory fastest, and in tiles with the others. Wide registers
// begin with tiles where x does not stay in L1 from one row to the next: a tile loads it once for several rows.
template <class T>
inline void multiply_dense_group(const T* rows, int height, int columns, const float* const* x, int tokens, float (*results)[LANES]) {
    using One = std::integral_constant<int, 1>;
    using Two = std::integral_constant<int, 2>;
    using Three = std::integral_constant<int, 3>;
    using Four = std::integral_constant<int, 4>;
    int t = 0;
    const int first = tokens < DENSE_FIRST ? tokens : DENSE_FIRST;
    if (tokens == 1 || PARTS > 1 || size_t(first) * columns * sizeof(float) <= L1_NBYTES) {
        const auto by_rows = [&](auto count) { multiply_dense_rows<count>(rows, height, columns, x, results); };
        t = first;
        t == 1 ? by_rows(One{}) : t == 2 ? by_rows(Two{}) : t == 3 ? by_rows(Three{}) : by_rows(Four{});
    }
    while (t < tokens) {
        const int left = tokens - t, count = left == 4 || left == 2 ? 2 : left == 1 ? 1 : 3;
        const auto in_tiles = [&](auto count) {
            if constexpr (PARTS == 1)  // narrow registers have begun row by row
                if (!t) return multiply_dense_tiles<count, true>(rows, height, columns, x, results);
            multiply_dense_tiles<count, false>(rows, height, columns, x + t, results + t);
        };
        count == 1 ? in_tiles(One{}) : count == 2 ? in_tiles(Two{}) : in_tiles(Three{});
        t += count;
    }
}

constexpr int MOST_DENSE = 16;  // tokens whose products of a dense group are computed together

// Multiplies the rows of one dense group; a token's results do not depend on the other tokens.
inline void multiply_dense(const Matrix& matrix, int group, const Activations& x, const int* rows, int tokens, f32x16* totals) {
    const int first = group * GROUP_ROWS;
    const int height = matrix.rows - first < GROUP_ROWS ? matrix.rows - first : GROUP_ROWS;
    const size_t offset = size_t(first) * matrix.columns;
    for (int t = 0; t < tokens; t += MOST_DENSE) {
        const int count = tokens - t < MOST_DENSE ? tokens - t : MOST_DENSE;
        const float* values[MOST_DENSE];
        float results[MOST_DENSE][LANES] = {};
        for (int i = 0; i < count; i++) values[i] = x.x_row(rows[t + i]);
        switch (matrix.format) {
            case F32: multiply_dense_group((const float*)matrix.bytes + offset, height, matrix.columns, values, count, results); break;
            case F16: multiply_dense_group((const Fp16*)matrix.bytes + offset, height, matrix.columns, values, count, results); break;
            default: multiply_dense_group((const Bf16*)matrix.bytes + offset, height, matrix.columns, values, count, results);
        }
        for (int i = 0; i < count; i++) totals[t + i] = load<f32x16>(results[i]);
    }
}

// Multiplies the rows of one group of the matrix with rows rows[0] .. rows[tokens - 1] of x. A token's results do not depend
// on the other tokens.
inline void multiply_group(const Matrix& matrix, int group, const Activations& x, const int* rows, int tokens, f32x16* totals) {
    if (matrix.format < DENSE_FORMATS) return multiply_dense(matrix, group, x, rows, tokens, totals);
    const FormatOps& ops = format_ops(matrix.format);
    ops.multiply(matrix.bytes + size_t(group) * ops.group_nbytes(matrix.columns), matrix.columns, x, rows, tokens, totals);
    if (has_tensor_scale(matrix.format))
        for (int t = 0; t < tokens; t++) totals[t] *= splat<f32x16>(matrix.scale);
}

}  // namespace graphcore
