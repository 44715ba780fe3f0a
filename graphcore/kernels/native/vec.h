// Vectors of sixteen lanes, written once: GCC's and clang's vector extensions lower them to whatever the target has.
//
// Only three things differ between instruction sets and are chosen here when this machine's own compiler builds the
// file: products of bytes (VNNI, AVX2 or plain), fp16 conversion, and table lookups.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace graphcore {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));

template <class V>
inline V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

template <class V>
inline void store(void* to, V value) {
    std::memcpy(to, &value, sizeof(V));
}

inline f32x16 splat(float value) { return value - f32x16{}; }  // minus: a sum would turn -0 into 0
inline i32x16 splat_int(int32_t value) { return value - i32x16{}; }
inline u8x64 splat_byte(uint8_t value) { return value - u8x64{}; }
inline f32x16 to_float(i32x16 value) { return __builtin_convertvector(value, f32x16); }

// Shifts of bytes, as no instruction set has them; V is any vector of bytes. mask: bits of the result that are meant.
template <class V>
inline V shift_right(V bytes, int bits, uint8_t mask) {
    typedef uint16_t Pairs __attribute__((vector_size(sizeof(V))));
    return (V)((Pairs)bytes >> bits) & (mask - V{});
}
template <class V>
inline V shift_left(V bytes, int bits, uint8_t mask) {
    typedef uint16_t Pairs __attribute__((vector_size(sizeof(V))));
    return (V)((Pairs)bytes << bits) & (mask - V{});
}

inline float sum(f32x16 value) {
    float total[LANES];
    store(total, value);
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) total[lane] += total[lane + width];
    return total[0];
}

inline int32_t sum(i32x16 value) {
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += value[lane];
    return total;
}

inline f32x16 larger(f32x16 a, f32x16 b) { return a > b ? a : b; }

inline float largest(f32x16 value) {
    float best = value[0];
    for (int lane = 1; lane < LANES; lane++) best = value[lane] > best ? value[lane] : best;
    return best;
}

inline f32x16 magnitude(f32x16 value) {
    return (f32x16)((u32x16)value & (u32x16{} + 0x7fffffffu));
}

// ---- widening and narrowing; GCC 12 takes __builtin_convertvector of bytes apart into scalars

inline i32x16 widen_bytes(const void* from) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    const auto* bytes = (const uint8_t*)from;
    i32x16 value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = bytes[lane];
    return value;
#endif
}

inline i32x16 widen_signed_bytes(const void* from) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    const auto* bytes = (const int8_t*)from;
    i32x16 value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = bytes[lane];
    return value;
#endif
}

inline void store_bytes(int8_t* to, i32x16 value) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)value));
#else
    for (int lane = 0; lane < LANES; lane++) to[lane] = int8_t(value[lane]);
#endif
}

// ---- products of bytes: lane l of the result gains the sum over c of codes[4l + c] * x[c]

inline i32x16 dot4(i32x16 total, u8x64 codes, int32_t x) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    // even and odd bytes apart, as 16-bit numbers: no sum of two products can saturate
    const __m256i four = _mm256_set1_epi32(x);
    const __m256i even_x = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), odd_x = _mm256_srai_epi16(four, 8);
    const __m256i low_bytes = _mm256_set1_epi16(0x00ff);
    __m256i halves[2], sums[2];
    std::memcpy(halves, &codes, 64);
    std::memcpy(sums, &total, 64);
    for (int half = 0; half < 2; half++) {
        const __m256i even = _mm256_and_si256(halves[half], low_bytes), odd = _mm256_srli_epi16(halves[half], 8);
        sums[half] = _mm256_add_epi32(sums[half], _mm256_madd_epi16(even, even_x));
        sums[half] = _mm256_add_epi32(sums[half], _mm256_madd_epi16(odd, odd_x));
    }
    std::memcpy(&total, sums, 64);
    return total;
#else
    int8_t four[4];
    std::memcpy(four, &x, 4);
    for (int lane = 0; lane < LANES; lane++)
        for (int column = 0; column < 4; column++)
            total[lane] += int32_t(codes[4 * lane + column]) * int32_t(four[column]);
    return total;
#endif
}

// The byte at each index (0..15) of a table of sixteen.
inline u8x64 lookup16(const uint8_t* table, u8x64 index) {
#if defined(__AVX512BW__)
    const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
    return (u8x64)_mm512_shuffle_epi8(entries, (__m512i)index);
#elif defined(__AVX2__)
    const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    __m256i halves[2];
    std::memcpy(halves, &index, 64);
    for (auto& half : halves) half = _mm256_shuffle_epi8(entries, half);
    std::memcpy(&index, halves, 64);
    return index;
#else
    for (int byte = 0; byte < 64; byte++) index[byte] = table[index[byte]];
    return index;
#endif
}

// ---- fp16, bf16

inline float half_to_float(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 0x3ff;
    uint32_t wide;
    if (exponent == 31) {
        wide = sign | 0x7f800000u | (mantissa << 13);
    } else if (exponent) {
        wide = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else {
        const float value = std::ldexp(float(mantissa), -24);
        std::memcpy(&wide, &value, 4);
        wide |= sign;
    }
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
#endif
}

inline f32x16 halves_to_float(const uint16_t* from) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    f32x16 value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = half_to_float(from[lane]);
    return value;
#endif
}

inline uint16_t float_to_half(float value) {
#if defined(__F16C__)
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = uint16_t(bits >> 16) & 0x8000;
    const uint32_t size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return sign | 0x7e00;
    if (size >= 0x477ff000u) return sign | 0x7c00;  // rounds to more than 65504
    if (size < 0x38800000u) return sign | uint16_t(std::nearbyint(std::ldexp(std::fabs(value), 24)));
    return sign | uint16_t((size - 0x38000000u + 0xfff + ((size >> 13) & 1)) >> 13);
#endif
}

inline f32x16 bf16_to_float(const uint16_t* from) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#else
    u32x16 bits;
    for (int lane = 0; lane < LANES; lane++) bits[lane] = uint32_t(from[lane]) << 16;
    return (f32x16)bits;
#endif
}

inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16) | 0x40;  // NaN stays NaN
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// ---- functions of float32 lanes

// exp(x) to within 2 ulp for x in [-87, 88]; below, 0. Cody and Waite's reduction, then a polynomial of degree 6.
inline f32x16 exponential(f32x16 x) {
    const f32x16 low = splat(-87.0f), high = splat(88.0f);
    const i32x16 vanishes = x < low;
    x = x < low ? low : x;
    x = x > high ? high : x;
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const f32x16 scaled = x * splat(1.44269504088896341f) + magic;
    const f32x16 power = scaled - magic;
    f32x16 rest = x - power * splat(0.693359375f);
    rest = rest - power * splat(-2.12194440e-4f);
    f32x16 value = splat(1.0f / 720.0f);
    value = value * rest + splat(1.0f / 120.0f);
    value = value * rest + splat(1.0f / 24.0f);
    value = value * rest + splat(1.0f / 6.0f);
    value = value * rest + splat(0.5f);
    value = value * rest + splat(1.0f);
    value = value * rest + splat(1.0f);
    const i32x16 exponent = __builtin_convertvector(power, i32x16) + 127;
    value = value * (f32x16)(exponent << 23);
    return (f32x16)((i32x16)value & ~vanishes);
}

inline f32x16 hyperbolic_tangent(f32x16 x) {
    const f32x16 shrunk = exponential(splat(-2.0f) * magnitude(x));
    const f32x16 size = (splat(1.0f) - shrunk) / (splat(1.0f) + shrunk);
    return (f32x16)((u32x16)size | ((u32x16)x & (u32x16{} + 0x80000000u)));
}

}  // namespace graphcore
