// Integer dot products of a block: lane r of the result is the sum over columns of row r's codes times x. The sums are
// exact, so every instruction set returns the same numbers.
//
// VNNI (AVX-512 VNNI and AVX-VNNI) multiplies four bytes of each lane at once. It multiplies 16-bit activations in two passes:
// high bytes, then low bytes. AVX2 without it has two ways:
//
//     bytes   Codes times bytes of x give 16-bit sums of two neighbours. As many quads as cannot overflow are added in 16
//             bits, then the sums are widened to 32 bits.
//     pairs   Even and odd codes are widened to 16 bits separately and multiplied with 16-bit x. 16-bit activations need
//             no second pass.
//
// dot_quads(values, first, end, x, at) multiplies quads first .. end - 1 of a block with x's numbers of the same block.
// values(j): the values of quad j.  at: the index of the block's first number in the arrays of x.
#pragma once

#include "activations.h"

namespace graphcore {

#if GRAPHCORE_NO_VNNI

inline __m256i four_everywhere(const void* from) { return _mm256_set1_epi32(load<int32_t>(from)); }

// Returns how many quads can be added in 16 bits, for codes up to `largest` and any bytes of x; 0 if even one may overflow.
constexpr int quads_in_16_bits(int largest) {
    int quads = QUADS;
    while (quads && quads * 2 * 128 * largest > INT16_MAX) quads /= 2;
    return quads;
}

template <int RUN, class Values>
__attribute__((always_inline)) inline IntPart dot_bytes(const Values& values, int first, int end, const int8_t* q) {
    __m256i total = _mm256_setzero_si256();
    for (int j = first; j < end; j += RUN) {
        __m256i sums = _mm256_maddubs_epi16((__m256i)values(j), four_everywhere(q + 4 * j));
        for (int i = j + 1; i < j + RUN && i < end; i++)
            sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16((__m256i)values(i), four_everywhere(q + 4 * i)));
        total = _mm256_add_epi32(total, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
    }
    return (IntPart)total;
}

template <class Values>
__attribute__((always_inline)) inline IntPart dot_pairs(const Values& values, int first, int end, const int16_t* pairs) {
    __m256i total = _mm256_setzero_si256();
    for (int j = first; j < end; j++) {
        const __m256i bytes = (__m256i)values(j);
        const __m256i even = _mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(bytes, 8);
        total = _mm256_add_epi32(total, _mm256_madd_epi16(even, four_everywhere(pairs + 4 * j)));
        total = _mm256_add_epi32(total, _mm256_madd_epi16(odd, four_everywhere(pairs + 4 * j + 2)));
    }
    return (IntPart)total;
}

template <int LARGEST, bool WIDE, class Values>
__attribute__((always_inline)) inline IntPart dot_quads(const Values& values, int first, int end, const Activations& x, size_t at) {
    constexpr int RUN = quads_in_16_bits(LARGEST);
    if constexpr (WIDE || RUN == 0) return dot_pairs(values, first, end, x.pairs + at);
    else return dot_bytes<RUN>(values, first, end, x.q + at);
}

#else

// Returns total plus, in each lane l, the sum over c of codes[4l + c] * x[c]. x: four signed bytes.
inline IntPart dot4(IntPart total, BytePart codes, int32_t x) {
#if defined(__AVX512VNNI__)
    return (IntPart)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, _mm512_set1_epi32(x));
#elif GRAPHCORE_AVX2 && defined(__AVXVNNI__)
    return (IntPart)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)codes, _mm256_set1_epi32(x));
#elif defined(__AVX512BW__)
    // Even and odd bytes are multiplied separately, as 16-bit numbers, so that no sum of two products saturates.
    const __m512i four = _mm512_set1_epi32(x);
    const __m512i even_x = _mm512_srai_epi16(_mm512_slli_epi16(four, 8), 8), odd_x = _mm512_srai_epi16(four, 8);
    const __m512i even = _mm512_and_si512((__m512i)codes, _mm512_set1_epi16(0xff)), odd = _mm512_srli_epi16((__m512i)codes, 8);
    const __m512i products = _mm512_add_epi32(_mm512_madd_epi16(even, even_x), _mm512_madd_epi16(odd, odd_x));
    return total + (IntPart)products;
#else
    int8_t four[4];
    std::memcpy(four, &x, 4);
    for (int lane = 0; lane < PART_LANES; lane++)
        for (int column = 0; column < 4; column++)
            total[lane] += int32_t(codes[4 * lane + column]) * int32_t(four[column]);
    return total;
#endif
}

inline int32_t four_at(const int8_t* q) { return load<int32_t>(q); }

template <int LARGEST, bool WIDE, class Values>
__attribute__((always_inline)) inline IntPart dot_quads(const Values& values, int first, int end, const Activations& x, size_t at) {
    // Independent sums, so that operations of the next block overlap with the latency of these.
    IntPart total{}, low{};
    for (int j = first; j < end; j++) {
        const BytePart codes = values(j);
        total = dot4(total, codes, four_at(x.q + at + 4 * j));
        if constexpr (WIDE) low = dot4(low, codes, four_at(x.low + at + 4 * j));
    }
    if constexpr (WIDE) total = (total << 8) + low;
    return total;
}

#endif

}  // namespace graphcore
