// A weight matrix of any format, and the table of operations for each format.
#pragma once

#include "dense_rows.h"
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

constexpr int MOST_DENSE = 16;  // tokens whose products of a dense group are computed together

// Multiplies the rows of one dense group; a token's results do not depend on the other tokens.
inline void multiply_dense(const Matrix& matrix, int index, const Activations& x, const int* rows, int tokens, f32x16* totals) {
    const int first = index * GROUP_ROWS;
    const size_t row_nbytes = matrix_nbytes(matrix.format, 1, matrix.columns);
    const DenseGroup group{matrix.bytes + first * row_nbytes, row_nbytes, std::min(GROUP_ROWS, matrix.rows - first)};
    for (int t = 0; t < tokens; t += MOST_DENSE) {
        const int count = std::min(MOST_DENSE, tokens - t);
        const float* values[MOST_DENSE];
        for (int i = 0; i < count; i++) values[i] = x.x_row(rows[t + i]);
        switch (matrix.format) {
            case F32: multiply_dense_group<float>(group, matrix.columns, values, count, totals + t); break;
            case F16: multiply_dense_group<Fp16>(group, matrix.columns, values, count, totals + t); break;
            default: multiply_dense_group<Bf16>(group, matrix.columns, values, count, totals + t);
        }
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
