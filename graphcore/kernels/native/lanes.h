// Elementwise functions of float32 rows.
#pragma once

#include "step.h"

namespace graphcore {

inline f32x16 activate(Activation activation, f32x16 x) {
    switch (activation) {
        case Activation::NONE: return x;
        case Activation::SILU: return x / (splat(1.0f) + exponential(-x));
        case Activation::GELU:
            for (int lane = 0; lane < LANES; lane++) x[lane] = 0.5f * x[lane] * (1.0f + std::erf(x[lane] * 0.70710678118654752f));
            return x;
        case Activation::GELU_TANH: {
            const f32x16 inner = splat(0.79788456080286536f) * (x + splat(0.044715f) * x * x * x);
            return splat(0.5f) * x * (splat(1.0f) + hyperbolic_tangent(inner));
        }
        case Activation::RELU: return larger(x, f32x16{});
        case Activation::RELU2: {
            const f32x16 kept = larger(x, f32x16{});
            return kept * kept;
        }
        case Activation::CLAMPED_SWIGLU: break;
    }
    return x;
}

// (min(gate, limit) * sigmoid(alpha * gate)) * (clamp(up) + 1): gpt-oss
inline f32x16 clamped_swiglu(f32x16 gate, f32x16 up, float limit, float alpha) {
    const f32x16 most = splat(limit), least = splat(-limit);
    gate = gate > most ? most : gate;
    up = up > most ? most : up;
    up = up < least ? least : up;
    return (up + splat(1.0f)) * gate / (splat(1.0f) + exponential(splat(-alpha) * gate));
}

inline float sum_of_squares(const float* x, int count, float mean) {
    f32x16 total{};
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        const f32x16 part = load<f32x16>(x + i) - splat(mean);
        total += part * part;
    }
    float rest = sum(total);
    for (; i < count; i++) rest += (x[i] - mean) * (x[i] - mean);
    return rest;
}

inline float sum_of(const float* x, int count) {
    f32x16 total{};
    int i = 0;
    for (; i + LANES <= count; i += LANES) total += load<f32x16>(x + i);
    float rest = sum(total);
    for (; i < count; i++) rest += x[i];
    return rest;
}

// to = norm(x); in place is fine.
inline void normalise(const Norm& norm, const float* x, int count, float* to) {
    if (norm.kind == NormKind::NONE) {
        if (to != x) std::memcpy(to, x, size_t(count) * 4);
        return;
    }
    const float mean = norm.kind == NormKind::LAYER ? sum_of(x, count) / float(count) : 0.0f;
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, count, mean) / float(count) + norm.eps);
    for (int i = 0; i < count; i++) to[i] = (x[i] - mean) * scale * norm.weight[i];
    if (norm.bias)
        for (int i = 0; i < count; i++) to[i] += norm.bias[i];
}

// Halves paired: (x[i], x[i + E/2]) turned by the angle whose cosine and sine the row holds.
inline void rotate(float* x, const float* row, int head_dim) {
    const int half = head_dim / 2;
    const float *cosines = row, *sines = row + half;
    for (int i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cosines[i] - second * sines[i];
        x[i + half] = second * cosines[i] + first * sines[i];
    }
}

}  // namespace graphcore
