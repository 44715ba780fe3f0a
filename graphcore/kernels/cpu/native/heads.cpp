// Quantises heads to cache entries, and dequantises entries; codes are rounded as in libggml.
#include "heads.h"

#include <algorithm>
#include <type_traits>

namespace graphcore {

namespace {

// Replaces pairs (x[j], x[j + STEP]) within a vector by their sum and difference.
template <int STEP>
FloatPart mix_lanes(FloatPart x) {
    FloatPart other, sign;
    for (int lane = 0; lane < PART_LANES; lane++) other[lane] = x[lane ^ STEP], sign[lane] = lane & STEP ? -1.0f : 1.0f;
    return other + sign * x;
}

float largest_of(const float* x) {
    float size = 0;
    for (int i = 0; i < CACHE_BLOCK; i++) size = std::max(size, std::fabs(x[i]));
    return size;
}

// Returns the number with the largest absolute value, with its sign.
float extreme_of(const float* x) {
    float size = 0, extreme = 0;
    for (int i = 0; i < CACHE_BLOCK; i++)
        if (std::fabs(x[i]) > size) size = std::fabs(x[i]), extreme = x[i];
    return extreme;
}

void round_block(int format, const float* x, uint8_t* codes, uint8_t* fifths, uint8_t* scale_at) {
    const int zero = format == FORMAT_Q5_0 ? 16 : 8;
    const float scale = format == FORMAT_Q8_0 ? largest_of(x) / 127.0f : extreme_of(x) / -float(zero);
    const float steps = scale ? 1.0f / scale : 0.0f;
    store(scale_at, float_to_half(scale));
    if (format == FORMAT_Q8_0) {
        for (int i = 0; i < CACHE_BLOCK; i++) codes[i] = uint8_t(int8_t(std::round(x[i] * steps)));
        return;
    }
    uint32_t high = 0;
    for (int i = 0; i < CACHE_BLOCK / 2; i++) {
        const auto code = [&](float value) { return std::min(2 * zero - 1, int(value * steps + (float(zero) + 0.5f))); };
        const int low = code(x[i]), upper = code(x[i + CACHE_BLOCK / 2]);
        codes[i] = uint8_t((low & 15) | (upper & 15) << 4);
        high |= uint32_t(low >> 4) << i | uint32_t(upper >> 4) << (i + CACHE_BLOCK / 2);
    }
    if (format == FORMAT_Q5_0) store(fifths, high);
}

template <class T>
void narrow_head(const float* from, int count, T* to) {
    for (int e = 0; e < count; e++) narrow(from[e], to + e);
}

}  // namespace

void mix_head(float* x, int count, int size) {
    const float scale = float(1.0 / std::sqrt(double(size)));
    int step = 1;
    if (size >= PART_LANES) {
        for (int e = 0; e < count; e += PART_LANES) {
            FloatPart part = mix_lanes<4>(mix_lanes<2>(mix_lanes<1>(load<FloatPart>(x + e))));
            if constexpr (PART_LANES > 8) part = mix_lanes<8>(part);
            store(x + e, part);
        }
        for (step = PART_LANES; step < size; step *= 2)
            for (int e = 0; e < count; e += 2 * step)
                for (int i = e; i < e + step; i += PART_LANES) {
                    const FloatPart first = load<FloatPart>(x + i), second = load<FloatPart>(x + i + step);
                    store(x + i, first + second), store(x + i + step, first - second);
                }
    }
    for (; step < size; step *= 2)
        for (int e = 0; e < count; e++)
            if (!(e & step)) {
                const float first = x[e], second = x[e + step];
                x[e] = first + second, x[e + step] = first - second;
            }
    for (int e = 0; e < count; e++) x[e] *= scale;
}

void Entries::put(int slot, float* head) const {
    uint8_t* parts[3] = {};
    int count = 0;
    for_each_part(slot, [&](uint8_t* part, size_t) { parts[count++] = part; });
    switch (format) {
        case F32: return narrow_head(head, head_dim, (float*)parts[0]);
        case F16: return narrow_head(head, head_dim, (Fp16*)parts[0]);
        case BF16: return narrow_head(head, head_dim, (Bf16*)parts[0]);
        default: break;
    }
    mix_head(head, head_dim);
    const PlaneSizes sizes = plane_sizes(format);
    for (int block = 0; block < head_dim / CACHE_BLOCK; block++)
        round_block(format, head + block * CACHE_BLOCK, parts[0] + block * sizes.codes, parts[1] + block * sizes.fifths, parts[count - 1] + block * sizes.scales);
}

void Entries::get(int slot, float* head) const {
    with_reader(format, [&](auto* type) {
        using Reader = std::remove_pointer_t<decltype(type)>;
        const Reader reader(*this);
        const int width = Reader::UNIT * PART_LANES;
        int e = 0;
        for (; e + width <= head_dim; e += width) {
            FloatPart parts[Reader::UNIT];
            reader.template widen<Reader::UNIT>(slot, e, parts);
            for (int p = 0; p < Reader::UNIT; p++) store(head + e + p * PART_LANES, parts[p]);
        }
        for (; e < head_dim; e++) head[e] = reader.one(slot, e);
    });
}

}  // namespace graphcore
