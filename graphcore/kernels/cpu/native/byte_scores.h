// Attention scores with quantised keys by integer products of bytes, for processors with AVX-512 VNNI.
//
// A query is rounded to 24 bits, the precision of float32 for its largest number, and split into three digits of 8 bits.
// Each digit is multiplied with the codes, four at a time, and the sums are exact. So a key's numbers are never widened, and
// its scale is multiplied once for each block:
//
//     q . key  =  step * sum over blocks of scale * sum over j of (65536 high + 256 middle + low)[j] * code[j]
//
// Codes are multiplied as unsigned bytes, code + zero. The sums begin at -zero * sum(digit), which cancels the offset.
#pragma once

#include "heads.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define GRAPHCORE_BYTE_SCORES 1

namespace graphcore {

constexpr int DIGITS = 3;  // digits of a query's number: high, middle, low

// Transposes four words of 16 slots' entries: byte 4 r + c of words[w] is byte 4 w + c of slot r. Slots from `count` on
// repeat the last.
inline void load_words(const uint8_t* first, size_t stride, int count, __m512i words[4]) {
    __m512i rows[4];
    for (int i = 0; i < 4; i++) {
        __m128i chunks[4];
        for (int four = 0; four < 4; four++) {
            const int slot = 4 * four + i;
            chunks[four] = _mm_loadu_si128((const __m128i*)(first + stride * size_t(slot < count ? slot : count - 1)));
        }
        rows[i] = _mm512_inserti32x4(_mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(chunks[0]), chunks[1], 1), chunks[2], 2), chunks[3], 3);
    }
    const __m512i low01 = _mm512_unpacklo_epi32(rows[0], rows[1]), high01 = _mm512_unpackhi_epi32(rows[0], rows[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(rows[2], rows[3]), high23 = _mm512_unpackhi_epi32(rows[2], rows[3]);
    words[0] = _mm512_unpacklo_epi64(low01, low23), words[1] = _mm512_unpackhi_epi64(low01, low23);
    words[2] = _mm512_unpacklo_epi64(high01, high23), words[3] = _mm512_unpackhi_epi64(high01, high23);
}

// Gives a block of 16 slots as quads of unsigned bytes: lane r of quads[j] has code + zero of numbers 4 j .. 4 j + 3 of slot r.
template <int FORMAT>
inline void load_quads(const CodeReader<FORMAT>& keys, int slot, int count, int block, __m512i quads[QUADS]) {
    constexpr PlaneSizes sizes = plane_sizes(FORMAT);
    const size_t at = size_t(slot) * keys.blocks + block, stride = size_t(keys.blocks) * sizes.codes;
    load_words(keys.codes + at * sizes.codes, stride, count, quads);
    if constexpr (FORMAT == FORMAT_Q8_0) {
        load_words(keys.codes + at * sizes.codes + 16, stride, count, quads + 4);
        for (int j = 0; j < QUADS; j++) quads[j] = _mm512_xor_si512(quads[j], _mm512_set1_epi8(char(0x80)));
        return;
    }
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int j = 0; j < QUADS / 2; j++) {
        quads[j + 4] = _mm512_and_si512(_mm512_srli_epi16(quads[j], 4), nibble);
        quads[j] = _mm512_and_si512(quads[j], nibble);
    }
    if constexpr (FORMAT == FORMAT_Q5_0) {
        alignas(64) uint32_t bits[LANES];
        for (int lane = 0; lane < LANES; lane++) bits[lane] = load<uint32_t>(keys.fifths + (at + size_t(lane < count ? lane : count - 1) * keys.blocks) * sizes.fifths);
        const __m512i fifths = _mm512_load_si512(bits);
        for (int j = 0; j < QUADS; j++) {  // byte j / 2 of a lane has the quad's bits
            const __m512i copies = _mm512_shuffle_epi8(fifths, _mm512_add_epi8(_mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0), _mm512_set1_epi8(char(j / 2))));
            const __mmask64 is_high = _mm512_test_epi8_mask(copies, _mm512_set1_epi32(j % 2 ? int(0x80402010) : 0x08040201));
            quads[j] = _mm512_mask_add_epi8(quads[j], is_high, quads[j], _mm512_set1_epi8(16));
        }
    }
}

constexpr int zero_of(int format) { return format == FORMAT_Q8_0 ? 128 : format == FORMAT_Q5_0 ? 16 : 8; }

// Queries of some heads in digits.
template <int HEADS>
struct Digits {
    int head_dim;
    int32_t* begins;  // [blocks, HEADS, DIGITS], initial values of a block's sums
    int8_t* digits;   // [head_dim / 4, HEADS, DIGITS, 4]
    float steps[HEADS];

    // memory: 4 * HEADS * head_dim bytes.
    Digits(const float* q, int dim, int zero, void* memory) : head_dim(dim), begins((int32_t*)memory), digits((int8_t*)(begins + dim / CACHE_BLOCK * HEADS * DIGITS)) {
        for (int h = 0; h < HEADS; h++) round_head(q + h * head_dim, h, zero);
    }

    int32_t begin(int h, int digit, int block) const { return begins[(block * HEADS + h) * DIGITS + digit]; }
    int32_t four(int h, int digit, int e) const { return load<int32_t>(digits + at(h, digit, e)); }

  private:
    void round_head(const float* q, int h, int zero) {
        FloatPart size{}, faults{};
        for (int e = 0; e < head_dim; e += LANES) {
            const FloatPart part = load<FloatPart>(q + e);
            size = larger(magnitude(part), size), faults += part - part;
        }
        const float most = largest(size), range = 127.0f * 65536.0f, inverse = most > 1e-30f ? range / most : 0.0f;
        steps[h] = most / range + sum(&faults);  // not finite if a number is not
        for (int block = 0; block < head_dim / CACHE_BLOCK; block++) {
            __m512i totals[DIGITS] = {};
            for (int e = block * CACHE_BLOCK; e < (block + 1) * CACHE_BLOCK; e += LANES) {
                const __m512i whole = _mm512_cvtps_epi32((__m512)(load<FloatPart>(q + e) * splat(inverse)));
                const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
                const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(upper, _mm512_set1_epi32(128)), 8);
                const __m512i parts[DIGITS] = {high, _mm512_sub_epi32(upper, _mm512_slli_epi32(high, 8)), _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8))};
                for (int digit = 0; digit < DIGITS; digit++) {
                    int8_t bytes[LANES];
                    _mm_storeu_si128((__m128i*)bytes, _mm512_cvtepi32_epi8(parts[digit]));
                    for (int four = 0; four < LANES; four += 4) std::memcpy(digits + at(h, digit, e + four), bytes + four, 4);
                    totals[digit] = _mm512_add_epi32(totals[digit], parts[digit]);
                }
            }
            for (int digit = 0; digit < DIGITS; digit++) begins[(block * HEADS + h) * DIGITS + digit] = -zero * _mm512_reduce_add_epi32(totals[digit]);
        }
    }

    size_t at(int h, int digit, int e) const { return size_t((e / 4 * HEADS + h) * DIGITS + digit) * 4; }
};

// Computes scores[h][i] = q[h] . key i of `count` keys from a slot on, at most LANES of them; further lanes repeat the last.
template <int FORMAT, int HEADS>
__attribute__((always_inline)) inline void score_lanes(const Digits<HEADS>& q, const CodeReader<FORMAT>& keys, int slot, int count, float* scores, size_t score_stride) {
    FloatPart totals[HEADS] = {};
    for (int block = 0; block < keys.blocks; block++) {
        __m512i quads[QUADS], sums[HEADS][DIGITS];
        load_quads<FORMAT>(keys, slot, count, block, quads);
        for (int h = 0; h < HEADS; h++)
            for (int digit = 0; digit < DIGITS; digit++) sums[h][digit] = _mm512_set1_epi32(q.begin(h, digit, block));
#pragma GCC unroll 8
        for (int j = 0; j < QUADS; j++)  // outermost, so that consecutive operations use different sums
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 3
                for (int digit = 0; digit < DIGITS; digit++)
                    sums[h][digit] = _mm512_dpbusd_epi32(sums[h][digit], quads[j], _mm512_set1_epi32(q.four(h, digit, block * CACHE_BLOCK + 4 * j)));
        const FloatPart scales = keys.scales_of(slot, count, block);
        for (int h = 0; h < HEADS; h++) {
            const FloatPart upper = to_float((IntPart)_mm512_add_epi32(_mm512_slli_epi32(sums[h][0], 8), sums[h][1]));
            totals[h] += (upper * splat(256.0f) + to_float((IntPart)sums[h][2])) * scales;
        }
    }
    for (int h = 0; h < HEADS; h++) store(scores + h * score_stride, totals[h] * splat(q.steps[h]));
}

// Computes scores[h][i] = q[h] . key i for the keys of a run; up to LANES - 1 floats after a head's last score are written, too.
template <int FORMAT, int HEADS>
void score_codes(const Digits<HEADS>& q, const Run& run, float* scores, size_t score_stride) {
    const CodeReader<FORMAT> keys(run.entries);
    const size_t nbytes = run.nbytes();
    const auto fetch = [&](int first, int count) {
        for (int i = 0; i < count; i++) fetch_ahead(run.next, first + i, nbytes);
    };
    int first = 0;
    for (; first + LANES <= run.count; first += LANES) {
        fetch(first, LANES);
        score_lanes<FORMAT, HEADS>(q, keys, run.first + first, LANES, scores + first, score_stride);
    }
    if (first == run.count) return;
    fetch(first, run.count - first);
    score_lanes<FORMAT, HEADS>(q, keys, run.first + first, run.count - first, scores + first, score_stride);
}

}  // namespace graphcore
#endif
