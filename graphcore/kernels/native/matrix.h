// A weight matrix of any format, and the table of operations for each format.
#pragma once

#include "products.h"
#include "team.h"

namespace graphcore {

struct Matrix {
    const uint8_t* bytes;
    int32_t rows, columns;
    int32_t format;
    float scale;  // scale of the whole tensor if it has one, else 1
};

// Number of tokens that are multiplied with a block once it is widened. Narrow registers hold fewer sums, and for more
// tokens the compiler would need a minute.
#if defined(__AVX512F__)
constexpr int TOKEN_TILE = 8;
#else
constexpr int TOKEN_TILE = 2;
#endif

// A function that multiplies the sixteen rows of one group with tokens first .. first + tokens - 1. tokens: at most
// TOKEN_TILE.
using Multiply = void (*)(const uint8_t* group, int columns, const Activations& x, int first, int tokens, f32x16* totals);

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

inline int num_groups(int rows) { return (rows + GROUP_ROWS - 1) / GROUP_ROWS; }

inline f32x16 multiply_dense_group(const Matrix& matrix, int group, const float* x) {
    const int first = group * GROUP_ROWS;
    const int height = matrix.rows - first < GROUP_ROWS ? matrix.rows - first : GROUP_ROWS;
    const size_t offset = size_t(first) * matrix.columns;
    switch (matrix.format) {
        case F32: return multiply_dense((const float*)matrix.bytes + offset, height, matrix.columns, x);
        case F16: return multiply_dense((const Fp16*)matrix.bytes + offset, height, matrix.columns, x);
        default: return multiply_dense((const Bf16*)matrix.bytes + offset, height, matrix.columns, x);
    }
}

// Multiplies the rows of one group of the matrix with each token.
inline void multiply_group(const Matrix& matrix, int group, const Activations& x, int first, int tokens, f32x16* totals) {
    if (matrix.format < DENSE_FORMATS) {
        for (int t = 0; t < tokens; t++) totals[t] = multiply_dense_group(matrix, group, x.x_row(first + t));
        return;
    }
    const FormatOps& ops = format_ops(matrix.format);
    ops.multiply(matrix.bytes + size_t(group) * ops.group_nbytes(matrix.columns), matrix.columns, x, first, tokens, totals);
    if (has_tensor_scale(matrix.format))
        for (int t = 0; t < tokens; t++) totals[t] *= splat<f32x16>(matrix.scale);
}

}  // namespace graphcore
