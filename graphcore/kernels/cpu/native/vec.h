// Vectors for all instruction sets, by the vector extensions of GCC and clang.
//
// A vector has sixteen lanes. GCC keeps vectors that are wider than a register in memory. So fast loops handle sixteen
// lanes in parts of one register each: FloatPart, IntPart, BytePart. Only conversions, table lookups, sums of
// lanes and products of bytes (dot.h) are written separately for each instruction set, and the preprocessor chooses between
// them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "encodings.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace graphcore {

constexpr int LANES = GROUP_ROWS;  // lanes of a vector: one for each row of a group
static_assert(LANES == 16, "vectors are written out in sixteens");
#if defined(__AVX2__) && !defined(__AVX512F__)
#define GRAPHCORE_AVX2 1  // the target has AVX2 and no AVX-512
#if !defined(__AVXVNNI__)
#define GRAPHCORE_NO_VNNI 1  // and no products of four bytes (dot.h)
#endif
constexpr int PART_LANES = 8;
#else
constexpr int PART_LANES = LANES;
#endif
constexpr int PARTS = LANES / PART_LANES;

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));

typedef float FloatPart __attribute__((vector_size(4 * PART_LANES)));
typedef int32_t IntPart __attribute__((vector_size(4 * PART_LANES)));
typedef uint32_t WordPart __attribute__((vector_size(4 * PART_LANES)));
typedef uint8_t BytePart __attribute__((vector_size(4 * PART_LANES)));

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

template <class V = FloatPart>
inline V splat(float value) { return value - V{}; }  // a difference, because adding zero would turn -0 into 0
inline IntPart splat_int(int32_t value) { return value - IntPart{}; }
inline BytePart splat_byte(uint8_t value) { return value - BytePart{}; }
inline FloatPart to_float(IntPart value) { return __builtin_convertvector(value, FloatPart); }

// Returns sixteen lanes, part by part: each part is function(lane), where lane is its first lane.
template <class Function>
__attribute__((always_inline)) inline f32x16 by_parts(const Function& function) {
    float lanes[LANES];
    for (int lane = 0; lane < LANES; lane += PART_LANES) store(lanes + lane, function(lane));
    return load<f32x16>(lanes);
}

// Shift each byte of a vector, which no instruction set does in one instruction. V: any vector of bytes. mask: the bits of
// each resulting byte to keep.
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

// Adds all lanes by folding one half onto the other, so that the order is the same for every instruction set.
inline float sum(const FloatPart parts[PARTS]) {
    float total[LANES];
    std::memcpy(total, parts, sizeof(total));
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) total[lane] += total[lane + width];
    return total[0];
}

// Returns [sum(rows[0]), sum(rows[1]), ...]. It folds halves onto each other until each lane holds one row's sum.
#if defined(__AVX512F__)
inline FloatPart sums_of_rows(const FloatPart rows[PART_LANES]) {
    __m512 eight[8], four[4], two[2];
    for (int i = 0; i < 8; i++)  // lanes 0..7: row i, lanes 8..15: row i + 8
        eight[i] = _mm512_shuffle_f32x4((__m512)rows[i], (__m512)rows[i + 8], 0x44) + _mm512_shuffle_f32x4((__m512)rows[i], (__m512)rows[i + 8], 0xee);
    for (int i = 0; i < 4; i++)  // four lanes each of rows i, i + 8, i + 4, i + 12
        four[i] = _mm512_shuffle_f32x4(eight[i], eight[i + 4], 0x88) + _mm512_shuffle_f32x4(eight[i], eight[i + 4], 0xdd);
    for (int i = 0; i < 2; i++)  // in each quarter two lanes of its row 2 i, and two of row 2 i + 1
        two[i] = (__m512)_mm512_unpacklo_pd((__m512d)four[2 * i], (__m512d)four[2 * i + 1]) + (__m512)_mm512_unpackhi_pd((__m512d)four[2 * i], (__m512d)four[2 * i + 1]);
    const FloatPart sums = (FloatPart)(_mm512_shuffle_ps(two[0], two[1], 0x88) + _mm512_shuffle_ps(two[0], two[1], 0xdd));
    return __builtin_shufflevector(sums, sums, 0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
}
#elif GRAPHCORE_AVX2
inline FloatPart sums_of_rows(const FloatPart rows[PART_LANES]) {
    __m256 four[2];
    for (int i = 0; i < 2; i++) {
        const __m256 first = _mm256_hadd_ps((__m256)rows[4 * i], (__m256)rows[4 * i + 1]);
        four[i] = _mm256_hadd_ps(first, _mm256_hadd_ps((__m256)rows[4 * i + 2], (__m256)rows[4 * i + 3]));
    }
    return (FloatPart)_mm256_permute2f128_ps(four[0], four[1], 0x20) + (FloatPart)_mm256_permute2f128_ps(four[0], four[1], 0x31);
}
#else
inline f32x16 sums_of_rows(const f32x16 rows[LANES]) {
    f32x16 eight[8], four[4], two[2];
    for (int i = 0; i < 8; i++) {
        const f32x16 a = rows[2 * i], b = rows[2 * i + 1];
        eight[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                   __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (int i = 0; i < 4; i++) {
        const f32x16 a = eight[2 * i], b = eight[2 * i + 1];
        four[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    for (int i = 0; i < 2; i++) {
        const f32x16 a = four[2 * i], b = four[2 * i + 1];
        two[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                 __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    }
    return __builtin_shufflevector(two[0], two[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(two[0], two[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
#endif

inline int32_t sum(IntPart value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)value);
#elif GRAPHCORE_AVX2
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)value), _mm256_extracti128_si256((__m256i)value, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
#else
    int32_t total = 0;
    for (int lane = 0; lane < PART_LANES; lane++) total += value[lane];
    return total;
#endif
}

inline FloatPart larger(FloatPart a, FloatPart b) { return a > b ? a : b; }

inline float largest(FloatPart value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#elif GRAPHCORE_AVX2
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    float best = value[0];
    for (int lane = 1; lane < PART_LANES; lane++) best = value[lane] > best ? value[lane] : best;
    return best;
#endif
}

inline FloatPart magnitude(FloatPart value) {
    return (FloatPart)((WordPart)value & (WordPart{} + 0x7fffffffu));
}

// ---- Widening and narrowing of a part. GCC 12 compiles __builtin_convertvector of bytes to scalar instructions.

inline IntPart widen_bytes(const void* from) {
#if defined(__AVX512F__)
    return (IntPart)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (IntPart)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    const auto* bytes = (const uint8_t*)from;
    IntPart value;
    for (int lane = 0; lane < PART_LANES; lane++) value[lane] = bytes[lane];
    return value;
#endif
}

inline IntPart widen_signed_bytes(const void* from) {
#if defined(__AVX512F__)
    return (IntPart)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (IntPart)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    const auto* bytes = (const int8_t*)from;
    IntPart value;
    for (int lane = 0; lane < PART_LANES; lane++) value[lane] = bytes[lane];
    return value;
#endif
}

inline void store_bytes(int8_t* to, IntPart value) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)value));
#elif defined(__AVX2__)
    const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)value), _mm256_extracti128_si256((__m256i)value, 1));
    _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(pairs, pairs));
#else
    for (int lane = 0; lane < PART_LANES; lane++) to[lane] = int8_t(value[lane]);
#endif
}

// Looks up each index (0..15) in a table of sixteen bytes.
inline BytePart lookup16(const uint8_t* table, BytePart index) {
#if defined(__AVX512BW__)
    const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
    return (BytePart)_mm512_shuffle_epi8(entries, (__m512i)index);
#elif GRAPHCORE_AVX2
    const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return (BytePart)_mm256_shuffle_epi8(entries, (__m256i)index);
#else
    for (int byte = 0; byte < 4 * PART_LANES; byte++) index[byte] = table[index[byte]];
    return index;
#endif
}

// Looks up the lowest four bits of each lane in a table of sixteen floats.
inline FloatPart lookup_floats(const float* table, IntPart index) {
#if defined(__AVX512F__)
    return (FloatPart)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
#elif GRAPHCORE_AVX2
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)index);
    return (FloatPart)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32((__m256i)index, 28)));
#else
    FloatPart value;
    for (int lane = 0; lane < PART_LANES; lane++) value[lane] = table[index[lane] & 15];
    return value;
#endif
}

// ---- Conversions of fp16 and bf16

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

inline FloatPart halves_to_float(const uint16_t* from) {
#if defined(__AVX512F__)
    return (FloatPart)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif GRAPHCORE_AVX2 && defined(__F16C__)
    return (FloatPart)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    FloatPart value;
    for (int lane = 0; lane < PART_LANES; lane++) value[lane] = half_to_float(from[lane]);
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
    if (size >= 0x477ff000u) return sign | 0x7c00;  // would round to more than 65504, the largest fp16
    if (size < 0x38800000u) return sign | uint16_t(std::nearbyint(std::ldexp(std::fabs(value), 24)));
    return sign | uint16_t((size - 0x38000000u + 0xfff + ((size >> 13) & 1)) >> 13);
#endif
}

inline FloatPart bf16_to_float(const uint16_t* from) {
#if defined(__AVX512F__)
    return (FloatPart)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif GRAPHCORE_AVX2
    return (FloatPart)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#else
    WordPart bits;
    for (int lane = 0; lane < PART_LANES; lane++) bits[lane] = uint32_t(from[lane]) << 16;
    return (FloatPart)bits;
#endif
}

inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16) | 0x40;  // NaN stays NaN
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Returns the bits of bf16 in the low half of each lane.
inline WordPart bf16_bits(FloatPart value) {
    const WordPart bits = (WordPart)value, high = bits >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? high | 0x40u : (bits + 0x7fffu + (high & 1)) >> 16;  // NaN stays NaN
}

inline FloatPart rounded_to_bf16(FloatPart value) { return (FloatPart)(bf16_bits(value) << 16); }

// Stores the low half of each lane.
inline void store_halves(uint8_t* to, WordPart bits) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)bits));
#elif GRAPHCORE_AVX2
    _mm_storeu_si128((__m128i*)to, _mm_packus_epi32(_mm256_castsi256_si128((__m256i)bits), _mm256_extracti128_si256((__m256i)bits, 1)));
#else
    for (int lane = 0; lane < PART_LANES; lane++) {
        const uint16_t half = uint16_t(bits[lane]);
        std::memcpy(to + 2 * lane, &half, 2);
    }
#endif
}

// ---- Elements of a dtype

inline FloatPart widen(const float* from) { return load<FloatPart>(from); }
struct Bf16 {
    uint16_t bits;
};
struct Fp16 {
    uint16_t bits;
};
inline FloatPart widen(const Bf16* from) { return bf16_to_float((const uint16_t*)from); }
inline FloatPart widen(const Fp16* from) { return halves_to_float((const uint16_t*)from); }
inline float widen_one(const float* from) { return *from; }
inline float widen_one(const Bf16* from) {
    const uint32_t bits = uint32_t(from->bits) << 16;
    return load<float>(&bits);
}
inline float widen_one(const Fp16* from) { return half_to_float(from->bits); }
inline void narrow(float value, float* to) { *to = value; }
inline void narrow(float value, Bf16* to) { to->bits = float_to_bf16(value); }
inline void narrow(float value, Fp16* to) { to->bits = float_to_half(value); }

// ---- Functions of float32 lanes

// Returns exp(x) to within 2 ulp for x in [-87, 88]; below that 0, above it exp(88). It uses Cody and Waite's reduction and
// a polynomial of degree 6.
inline FloatPart exponential(FloatPart x) {
    const FloatPart low = splat(-87.0f), high = splat(88.0f);
    const IntPart vanishes = x < low;
    x = x < low ? low : x;
    x = x > high ? high : x;
    const FloatPart magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const FloatPart scaled = x * splat(1.44269504088896341f) + magic;
    const FloatPart power = scaled - magic;
    FloatPart rest = x - power * splat(0.693359375f);
    rest = rest - power * splat(-2.12194440e-4f);
    FloatPart value = splat(1.0f / 720.0f);
    value = value * rest + splat(1.0f / 120.0f);
    value = value * rest + splat(1.0f / 24.0f);
    value = value * rest + splat(1.0f / 6.0f);
    value = value * rest + splat(0.5f);
    value = value * rest + splat(1.0f);
    value = value * rest + splat(1.0f);
    const IntPart exponent = __builtin_convertvector(power, IntPart) + 127;
    value = value * (FloatPart)(exponent << 23);
    return (FloatPart)((IntPart)value & ~vanishes);
}

inline FloatPart hyperbolic_tangent(FloatPart x) {
    const FloatPart shrunk = exponential(splat(-2.0f) * magnitude(x));
    const FloatPart size = (splat(1.0f) - shrunk) / (splat(1.0f) + shrunk);
    return (FloatPart)((WordPart)size | ((WordPart)x & (WordPart{} + 0x80000000u)));
}

}  // namespace graphcore
