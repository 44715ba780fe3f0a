// Norms, rotation and gated activations of many tokens, between the products of a prompt's chunk.
//
// Numbers are float32, fp16 or bf16, and are rounded where the modules of nn/ round them.
#pragma once

#include "chunk.h"

namespace graphcore {

// y = x / sqrt(mean(x^2) + eps) * weight, row by row.
struct NormRows {
    const uint8_t* x;     // [rows, columns] of format
    const float* weight;  // [columns], or null
    uint8_t* y;           // [rows, columns] of out_format
    int32_t rows, columns, format, out_format;
    int32_t rounds_first;  // 1: the normalised row is rounded to out_format, and so is the weight, before they are multiplied
    float eps;
};

// Turns each pair of a head by its token's angle.
struct RotateRows {
    const uint8_t* x;   // [tokens, heads, head_dim] of format
    const float* rope;  // [tokens, 2, width / 2], cosines and sines
    uint8_t* y;         // [tokens, heads, head_dim] of format
    int32_t tokens, heads, head_dim, width, format;  // the features of a head from `width` on are copied
};

// y = f(gate) * up. f(gate) is rounded to format first.
struct GateRows {
    const uint8_t *gate, *up;  // [size] of format; up may be null, for f(gate) alone
    uint8_t* y;                // [size] of format
    int64_t size;
    int32_t format;
    Activation activation;  // f
};

// y = x + added.
struct AddRows {
    const float* x;        // [size]
    const uint8_t* added;  // [size] of format
    float* y;              // [size]
    int64_t size;
    int32_t format;
};

constexpr int BLOCK = 1024;  // numbers that a thread adds or gates at a time; a multiple of PART_LANES

// Rounds numbers to a format.
inline void round_row(float* x, int count, int format) {
    if (format == F32) return;
    for (int i = 0; i < count; i++) x[i] = rounded_to(x[i], format);
}

inline void norm_row(const NormRows& a, int row, float* work) {
    const bool rounds = a.rounds_first && a.weight;
    widen_row(a.x + size_t(row) * a.columns * format_nbytes(a.format), a.columns, a.format, work);
    normalise({NormKind::RMS, a.eps, rounds ? nullptr : a.weight, nullptr}, work, a.columns, work);
    if (rounds) {
        round_row(work, a.columns, a.out_format);
        for (int i = 0; i < a.columns; i++) work[i] *= rounded_to(a.weight[i], a.out_format);
    }
    narrow_row(work, a.columns, a.out_format, a.y + size_t(row) * a.columns * format_nbytes(a.out_format));
}

inline void rotate_token(const RotateRows& a, int token, float* work) {
    const size_t nbytes = size_t(a.head_dim) * format_nbytes(a.format);
    for (int head = 0; head < a.heads; head++) {
        const size_t at = (size_t(token) * a.heads + head) * nbytes;
        widen_row(a.x + at, a.head_dim, a.format, work);
        rotate(work, a.rope + size_t(token) * a.width, a.width);
        narrow_row(work, a.head_dim, a.format, a.y + at);
    }
}

inline void gate_block(const GateRows& a, int block, float* work) {
    const int64_t first = int64_t(block) * BLOCK;
    const int count = int(std::min<int64_t>(BLOCK, a.size - first));
    const size_t at = size_t(first) * format_nbytes(a.format);
    float* up = work + BLOCK;
    widen_row(a.gate + at, count, a.format, work);
    if (a.up) widen_row(a.up + at, count, a.format, up);
    for (int i = count; i % PART_LANES; i++) work[i] = 0;
    for (int i = 0; i < count; i += PART_LANES) store(work + i, activate_part(a.activation, load<FloatPart>(work + i)));
    round_row(work, count, a.format);
    for (int i = 0; a.up && i < count; i++) work[i] *= up[i];
    narrow_row(work, count, a.format, a.y + at);
}

inline void add_block(const AddRows& a, int block, float* work) {
    const int64_t first = int64_t(block) * BLOCK;
    const int count = int(std::min<int64_t>(BLOCK, a.size - first));
    widen_row(a.added + size_t(first) * format_nbytes(a.format), count, a.format, work);
    for (int i = 0; i < count; i++) a.y[first + i] = a.x[first + i] + work[i];
}

}  // namespace graphcore
