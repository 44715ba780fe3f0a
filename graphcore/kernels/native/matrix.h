// A weight matrix of any format, and what can be done with it, by format number.
#pragma once

#include "products.h"
#include "team.h"

namespace graphcore {

// The numbers are those of graphcore/kernels/packed.py.
enum Format : int32_t {
    F32 = 0, F16 = 1, BF16 = 2, DENSE_FORMATS = 3,
    FORMAT_Q4_0 = 3, FORMAT_Q4_1, FORMAT_Q5_0, FORMAT_Q5_1, FORMAT_Q8_0, FORMAT_Q2_K, FORMAT_Q3_K, FORMAT_Q4_K, FORMAT_Q5_K,
    FORMAT_Q6_K, FORMAT_IQ4_NL, FORMAT_IQ4_XS, FORMAT_TQ2_0, FORMAT_MXFP4, FORMAT_NVFP4, FORMAT_Q1_0, FORMAT_Q2_0, FORMAT_I2_S,
    NUM_FORMATS
};

struct Matrix {
    const uint8_t* bytes;
    int32_t rows, columns;
    int32_t format;
    float scale;  // of the whole tensor (i2_s), else 1
};

constexpr size_t I2_S_TAIL_NBYTES = 64;  // after i2_s's codes, for its scale; as in graphcore/kernels/packed.py
// Tokens that share a widened block. Registers of fewer bits hold fewer sums, and the compiler takes a minute over more.
#if defined(__AVX512F__)
constexpr int TOKEN_TILE = 8;
#else
constexpr int TOKEN_TILE = 2;
#endif

// Multiplies the sixteen rows of one group with tokens first .. first + tokens - 1 (at most TOKEN_TILE of them).
using Multiply = void (*)(const uint8_t* group, int columns, const Activations& x, int first, int tokens, f32x16* totals);

struct FormatOps {
    size_t (*group_nbytes)(int columns);
    Multiply multiply;
    void (*pack_group)(const uint8_t* const rows[LANES], int columns, uint8_t* group);
    void (*unpack_group)(const uint8_t* group, int columns, float scale, int rows, int target, uint8_t* to);
    void (*unpack_row)(const uint8_t* group, int columns, float scale, int lane, float* to);
    int raw_columns, raw_nbytes;
};

const FormatOps& format_ops(int format);

// Every format that has kernels, in the order of their numbers.
#define GRAPHCORE_FORMATS(X)                                                                                    \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(Iq4Nl) X(Iq4Xs) X(Tq2_0) \
    X(Mxfp4) X(Nvfp4) X(Q1_0) X(Q2_0) X(I2_S)

template <class F>
void pack_group(const uint8_t* const rows[LANES], int columns, uint8_t* group);  // pack.cpp

inline size_t matrix_nbytes(int format, int rows, int columns) {
    if (format < DENSE_FORMATS) return size_t(rows) * columns * (format == F32 ? 4 : 2);
    return size_t((rows + LANES - 1) / LANES) * format_ops(format).group_nbytes(columns);
}

inline int num_groups(int rows) { return (rows + LANES - 1) / LANES; }

inline f32x16 multiply_dense_group(const Matrix& matrix, int group, const float* x) {
    const int first = group * LANES;
    const int height = matrix.rows - first < LANES ? matrix.rows - first : LANES;
    const size_t offset = size_t(first) * matrix.columns;
    switch (matrix.format) {
        case F32: return multiply_dense((const float*)matrix.bytes + offset, height, matrix.columns, x);
        case F16: return multiply_dense((const Fp16*)matrix.bytes + offset, height, matrix.columns, x);
        default: return multiply_dense((const Bf16*)matrix.bytes + offset, height, matrix.columns, x);
    }
}

// Sixteen rows of the matrix, [16 * group, 16 * group + 16), times each token.
inline void multiply_group(const Matrix& matrix, int group, const Activations& x, int first, int tokens, f32x16* totals) {
    if (matrix.format < DENSE_FORMATS) {
        for (int t = 0; t < tokens; t++) totals[t] = multiply_dense_group(matrix, group, x.x_row(first + t));
        return;
    }
    const FormatOps& ops = format_ops(matrix.format);
    ops.multiply(matrix.bytes + size_t(group) * ops.group_nbytes(matrix.columns), matrix.columns, x, first, tokens, totals);
    if (matrix.format == FORMAT_I2_S)
        for (int t = 0; t < tokens; t++) totals[t] *= splat<f32x16>(matrix.scale);
}

}  // namespace graphcore
