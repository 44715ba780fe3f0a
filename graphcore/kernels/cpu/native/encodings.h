// The facts of encodings. graphcore/kernels/cpu/native_header.py writes this file from graphcore/quant/formats/.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graphcore {

// Numbers of the formats. Those below DENSE_FORMATS are dtypes, too.
enum Format : int32_t {
    F32 = 0,
    F16 = 1,
    BF16 = 2,
    FORMAT_Q4_0 = 3,
    FORMAT_Q4_1 = 4,
    FORMAT_Q5_0 = 5,
    FORMAT_Q5_1 = 6,
    FORMAT_Q8_0 = 7,
    FORMAT_Q2_K = 8,
    FORMAT_Q3_K = 9,
    FORMAT_Q4_K = 10,
    FORMAT_Q5_K = 11,
    FORMAT_Q6_K = 12,
    FORMAT_IQ4_NL = 13,
    FORMAT_IQ4_XS = 14,
    FORMAT_TQ2_0 = 15,
    FORMAT_MXFP4 = 16,
    FORMAT_NVFP4 = 17,
    FORMAT_Q1_0 = 18,
    FORMAT_Q2_0 = 19,
    FORMAT_I2_S = 20,
    FORMAT_IQ2_XXS = 21,
    FORMAT_IQ2_XS = 22,
    FORMAT_IQ2_S = 23,
    FORMAT_IQ3_XXS = 24,
    FORMAT_IQ3_S = 25,
    FORMAT_IQ1_S = 26,
    FORMAT_IQ1_M = 27,
    FORMAT_AFFINE4 = 28,
    FORMAT_AFFINE8 = 29,
    FORMAT_FP8 = 30,
    FORMAT_NF4 = 31,
    FORMAT_FP4 = 32,
    FORMAT_NVFP4_F32 = 33,
    DENSE_FORMATS = 3, NUM_FORMATS = 34
};

// Applies X to each format that is stored in blocks, in the order of their numbers. Each is a struct in formats.h.
#define GRAPHCORE_FORMATS(X) \
    X(Q4_0) \
    X(Q4_1) \
    X(Q5_0) \
    X(Q5_1) \
    X(Q8_0) \
    X(Q2_K) \
    X(Q3_K) \
    X(Q4_K) \
    X(Q5_K) \
    X(Q6_K) \
    X(IQ4_NL) \
    X(IQ4_XS) \
    X(TQ2_0) \
    X(MXFP4) \
    X(NVFP4) \
    X(Q1_0) \
    X(Q2_0) \
    X(I2_S) \
    X(IQ2_XXS) \
    X(IQ2_XS) \
    X(IQ2_S) \
    X(IQ3_XXS) \
    X(IQ3_S) \
    X(IQ1_S) \
    X(IQ1_M) \
    X(AFFINE4) \
    X(AFFINE8) \
    X(FP8) \
    X(NF4) \
    X(FP4) \
    X(NVFP4_F32)

constexpr int GROUP_ROWS = 16;  // rows that are stored together
constexpr size_t TAIL_NBYTES = 64;  // bytes after the last group, for the scale of the whole tensor

constexpr bool has_tensor_scale(int32_t format) { return format == FORMAT_I2_S; }

// Values of codes, minus the smallest value.
inline constexpr uint8_t IQ4_NL_VALUES[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};
inline constexpr uint8_t MXFP4_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
inline constexpr uint8_t Q1_0_VALUES[16] = {0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
inline constexpr uint8_t IQ2_XXS_VALUES[16] = {51, 68, 86, 43, 35, 18, 0, 43, 0, 0, 0, 0, 0, 0, 0, 0};
inline constexpr uint8_t IQ3_XXS_VALUES[16] = {66, 74, 82, 90, 98, 106, 114, 124, 58, 50, 42, 34, 26, 18, 10, 0};
inline constexpr uint8_t IQ3_S_VALUES[16] = {16, 18, 20, 22, 24, 26, 28, 30, 14, 12, 10, 8, 6, 4, 2, 0};
inline constexpr uint8_t IQ1_S_VALUES[16] = {2, 10, 18, 9, 0, 8, 16, 9, 0, 0, 0, 0, 0, 0, 0, 0};

// Values of codes that are floats.
inline constexpr float NF4_LEVELS[16] = {
    -1.000000000e+00f, -6.961928010e-01f, -5.250730515e-01f, -3.949174881e-01f,
    -2.844413817e-01f, -1.847734302e-01f, -9.105003625e-02f, 0.000000000e+00f,
    7.958029956e-02f, 1.609302014e-01f, 2.461123019e-01f, 3.379152417e-01f,
    4.407098293e-01f, 5.626170039e-01f, 7.229568362e-01f, 1.000000000e+00f,
};
inline constexpr float FP4_LEVELS[16] = {
    0.000000000e+00f, 5.208333333e-03f, 6.666666667e-01f, 1.000000000e+00f,
    3.333333333e-01f, 5.000000000e-01f, 1.666666667e-01f, 2.500000000e-01f,
    -0.000000000e+00f, -5.208333333e-03f, -6.666666667e-01f, -1.000000000e+00f,
    -3.333333333e-01f, -5.000000000e-01f, -1.666666667e-01f, -2.500000000e-01f,
};

// Offsets that the search for a group's scale tries.
inline constexpr double Q2_K_STRETCHES[] = {0.0, -0.5, -0.3, -0.1, 0.1, 0.3, 0.5, 0.7, 0.9, 1.2};
inline constexpr double Q3_K_STRETCHES[] = {0.0, -0.9, -0.6, -0.3, 0.3, 0.6, 0.9};
inline constexpr double Q4_K_STRETCHES[] = {0.0, -1.5, -1.0, -0.6, -0.3, 0.3, 0.6, 0.9, 1.2};
inline constexpr double Q5_K_STRETCHES[] = {0.0, -0.9, -0.6, -0.3, 0.3, 0.6, 0.9, 1.2};
inline constexpr double Q6_K_STRETCHES[] = {0.0, -0.9, -0.6, -0.3, 0.3, 0.6, 0.9};

struct Encoding {
    int columns, nbytes;    // columns and bytes of a stored block
    int bits;               // bits of a code
    int offset;             // stored number that means zero
    int largest;            // largest value, before the offset is subtracted
    const uint8_t* values;  // values of the codes; null if a code is its own value
};

// Facts of each format, indexed by its number.
inline constexpr Encoding ENCODINGS[] = {
    {1, 4, 0, 0, 0, nullptr},  // f32
    {1, 2, 0, 0, 0, nullptr},  // f16
    {1, 2, 0, 0, 0, nullptr},  // bf16
    {32, 18, 4, 8, 15, nullptr},  // q4_0
    {32, 20, 4, 0, 15, nullptr},  // q4_1
    {32, 22, 5, 16, 31, nullptr},  // q5_0
    {32, 24, 5, 0, 31, nullptr},  // q5_1
    {32, 34, 8, 128, 255, nullptr},  // q8_0
    {256, 84, 2, 0, 3, nullptr},  // q2_k
    {256, 110, 3, 4, 7, nullptr},  // q3_k
    {256, 144, 4, 0, 15, nullptr},  // q4_k
    {256, 176, 5, 0, 31, nullptr},  // q5_k
    {256, 210, 6, 32, 63, nullptr},  // q6_k
    {32, 18, 4, 127, 240, IQ4_NL_VALUES},  // iq4_nl
    {256, 136, 4, 127, 240, IQ4_NL_VALUES},  // iq4_xs
    {256, 66, 2, 1, 3, nullptr},  // tq2_0
    {32, 17, 4, 12, 24, MXFP4_VALUES},  // mxfp4
    {64, 36, 4, 12, 24, MXFP4_VALUES},  // nvfp4
    {128, 18, 1, 1, 2, Q1_0_VALUES},  // q1_0
    {64, 18, 2, 1, 3, nullptr},  // q2_0
    {128, 32, 2, 1, 3, nullptr},  // i2_s
    {256, 66, 3, 43, 86, IQ2_XXS_VALUES},  // iq2_xxs
    {256, 74, 3, 43, 86, IQ2_XXS_VALUES},  // iq2_xs
    {256, 82, 3, 43, 86, IQ2_XXS_VALUES},  // iq2_s
    {256, 98, 4, 62, 124, IQ3_XXS_VALUES},  // iq3_xxs
    {256, 110, 4, 15, 30, IQ3_S_VALUES},  // iq3_s
    {256, 50, 3, 9, 18, IQ1_S_VALUES},  // iq1_s
    {256, 56, 3, 9, 18, IQ1_S_VALUES},  // iq1_m
    {32, 19, 4, 0, 15, nullptr},  // affine4
    {32, 37, 8, 0, 255, nullptr},  // affine8
    {32, 36, 8, 0, 255, nullptr},  // fp8
    {32, 20, 4, 0, 15, nullptr},  // nf4
    {32, 20, 4, 0, 15, nullptr},  // fp4
    {32, 24, 4, 12, 24, MXFP4_VALUES},  // nvfp4_f32
};

}  // namespace graphcore
