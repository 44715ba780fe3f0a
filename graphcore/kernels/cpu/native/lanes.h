// Activations, norms and rotation of float32 rows.
#pragma once

#include "step.h"

namespace graphcore {

inline FloatPart activate_part(Activation activation, FloatPart x) {
    switch (activation) {
        case Activation::NONE: return x;
        case Activation::SILU: return x / (splat(1.0f) + exponential(-x));
        case Activation::GELU:
            for (int lane = 0; lane < PART_LANES; lane++) x[lane] = 0.5f * x[lane] * (1.0f + std::erf(x[lane] * 0.70710678118654752f));
            return x;
        case Activation::GELU_TANH: {
            const FloatPart inner = splat(0.79788456080286536f) * (x + splat(0.044715f) * x * x * x);
            return splat(0.5f) * x * (splat(1.0f) + hyperbolic_tangent(inner));
        }
        case Activation::RELU: return larger(x, FloatPart{});
        case Activation::RELU2: {
            const FloatPart kept = larger(x, FloatPart{});
            return kept * kept;
        }
        case Activation::SIGMOID: return splat(1.0f) / (splat(1.0f) + exponential(-x));
        case Activation::CLAMPED_SWIGLU: break;
    }
    return x;
}

inline f32x16 activate(Activation activation, f32x16 x) {
    return by_parts([&](int lane) { return activate_part(activation, load<FloatPart>((const float*)&x + lane)); });
}

// Returns g * sigmoid(alpha * g) * (u + 1), the activation of gpt-oss. g: gate, at most limit.  u: up, clamped to
// [-limit, limit].
inline FloatPart clamped_swiglu_part(FloatPart gate, FloatPart up, float limit, float alpha) {
    const FloatPart most = splat(limit), least = splat(-limit);
    gate = gate > most ? most : gate;
    up = up > most ? most : up;
    up = up < least ? least : up;
    return (up + splat(1.0f)) * gate / (splat(1.0f) + exponential(splat(-alpha) * gate));
}

inline f32x16 clamped_swiglu(f32x16 gate, f32x16 up, float limit, float alpha) {
    return by_parts([&](int lane) {
        return clamped_swiglu_part(load<FloatPart>((const float*)&gate + lane), load<FloatPart>((const float*)&up + lane), limit, alpha);
    });
}

// Returns an expert's hidden features from its gate and up products.
inline f32x16 gated_features(Activation activation, f32x16 gate, f32x16 up, float limit, float alpha) {
    return activation == Activation::CLAMPED_SWIGLU ? clamped_swiglu(gate, up, limit, alpha) : activate(activation, gate) * up;
}

inline f32x16 load_some(const float* from, int count) {
    if (count == LANES) return load<f32x16>(from);
    f32x16 value{};
    for (int lane = 0; lane < count; lane++) value[lane] = from[lane];
    return value;
}

inline void store_some(f32x16 value, int count, float* to) {
    if (count == LANES) return store(to, value);
    for (int lane = 0; lane < count; lane++) to[lane] = value[lane];
}

// Returns the bias of an expert's group of rows, or null.
inline const float* bias_at(const float* biases, int rows, int expert, int group) {
    return biases ? biases + size_t(expert) * rows + group * GROUP_ROWS : nullptr;
}

inline float sum_of_squares(const float* x, int count, float mean) {
    FloatPart total[PARTS] = {};
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int p = 0; p < PARTS; p++) {
            const FloatPart part = load<FloatPart>(x + i + p * PART_LANES) - splat(mean);
            total[p] += part * part;
        }
    float rest = sum(total);
    for (; i < count; i++) rest += (x[i] - mean) * (x[i] - mean);
    return rest;
}

inline float sum_of(const float* x, int count) {
    FloatPart total[PARTS] = {};
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int p = 0; p < PARTS; p++) total[p] += load<FloatPart>(x + i + p * PART_LANES);
    float rest = sum(total);
    for (; i < count; i++) rest += x[i];
    return rest;
}

// Writes norm(x) to `to`, which may be x itself.
inline void normalise(const Norm& norm, const float* x, int count, float* to) {
    if (norm.kind == NormKind::NONE) {
        if (to != x) std::memcpy(to, x, size_t(count) * 4);
        return;
    }
    const float mean = norm.kind == NormKind::LAYER ? sum_of(x, count) / float(count) : 0.0f;
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, count, mean) / float(count) + norm.eps);
    if (!norm.weight) {
        for (int i = 0; i < count; i++) to[i] = (x[i] - mean) * scale;
        return;
    }
    for (int i = 0; i < count; i++) to[i] = (x[i] - mean) * scale * norm.weight[i];
    if (norm.bias)
        for (int i = 0; i < count; i++) to[i] += norm.bias[i];
}

// Rotates each pair (x[i], x[i + width / 2]) by its angle. row: [2, width / 2], the cosines and then the sines.
inline void rotate(float* x, const float* row, int width) {
    const int half = width / 2;
    const float *cosines = row, *sines = row + half;
    for (int i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cosines[i] - second * sines[i];
        x[i + half] = second * cosines[i] + first * sines[i];
    }
}

}  // namespace graphcore
