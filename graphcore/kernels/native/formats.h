// The stored formats, as the kernels hold them: sixteen rows at a time, scales first, then codes.
//
//     group of 16 rows:  [ scales of 256 columns | pad to 64 ][ their codes ]  [ scales of the next 256 ][ codes ] ...
//     weight = scale * (value(code) - OFFSET)  (+ minimum)      value: the code itself, or a table's entry
//
// A format's struct says how large its blocks are and how to find the sixteen rows' scales of one part of a block
// (`scale`, `minimum`). A part is 32 columns, or 16 where HALVES is set. How files have them: stored.h.
#pragma once

#include "codes.h"

namespace graphcore {

// ---- numbers of a part of sixteen rows, those from row `lane` on

inline FloatPart fp16_lanes(const uint8_t* from, int lane) { return halves_to_float((const uint16_t*)from + lane); }
inline FloatPart byte_lanes(const uint8_t* from, int lane) { return to_float(widen_bytes(from + lane)); }
inline FloatPart signed_byte_lanes(const uint8_t* from, int lane) { return to_float(widen_signed_bytes(from + lane)); }

// What most formats are: one scale for each part, no minimum, codes that are the values.
template <int COLUMNS_, int RAW_, int META_, int BITS_, int OFFSET_>
struct Plain {
    static constexpr int COLUMNS = COLUMNS_;      // of a stored block
    static constexpr int RAW_NBYTES = RAW_;       // of a stored block
    static constexpr int META_NBYTES = META_;     // of sixteen stored blocks' scales
    static constexpr int BITS = BITS_;            // of a code
    static constexpr int OFFSET = OFFSET_;        // of a value
    static constexpr int LARGEST = (1 << BITS_) - 1;  // value, before the offset is taken off
    static constexpr bool HALVES = false;         // a scale for 16 columns, not 32
    static constexpr bool HAS_MINIMUM = false;    // weight = scale * code + minimum
    static constexpr bool ONE_SCALE = false;      // a single scale for the whole tensor
    static constexpr bool HAS_TABLE = false;      // values of the codes are a table's (`table`)
    static inline const uint8_t* table() { return nullptr; }
    static inline FloatPart minimum(const uint8_t*, int, int) { return FloatPart{}; }
};

struct Q4_0 : Plain<32, 18, 32, 4, 8> {
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

struct Q4_1 : Plain<32, 20, 64, 4, 0> {
    static constexpr bool HAS_MINIMUM = true;
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
    static inline FloatPart minimum(const uint8_t* meta, int, int lane) { return fp16_lanes(meta + 32, lane); }
};

struct Q5_0 : Plain<32, 22, 32, 5, 16> {
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

struct Q5_1 : Plain<32, 24, 64, 5, 0> {
    static constexpr bool HAS_MINIMUM = true;
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
    static inline FloatPart minimum(const uint8_t* meta, int, int lane) { return fp16_lanes(meta + 32, lane); }
};

struct Q8_0 : Plain<32, 34, 32, 8, 128> {
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

// 2^(exponent - 128); the two smallest are subnormal.
inline FloatPart half_powers_of_two(const uint8_t* exponents) {
    const IntPart e = widen_bytes(exponents);
    const IntPart normal = (e - 1) << 23, subnormal = splat_int(0x00200000) << (e & 1);
    return (FloatPart)(e >= 2 ? normal : subnormal);
}

inline constexpr uint8_t E2M1_DOUBLED_PLUS_12[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct Mxfp4 : Plain<32, 17, 16, 4, 12> {
    static constexpr int LARGEST = 24;
    static constexpr bool HAS_TABLE = true;
    static inline const uint8_t* table() { return E2M1_DOUBLED_PLUS_12; }
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return half_powers_of_two(meta + lane); }
};

struct Nvfp4 : Plain<64, 36, 64, 4, 12> {
    static constexpr bool HALVES = true;
    static constexpr int LARGEST = 24;
    static constexpr bool HAS_TABLE = true;
    static inline const uint8_t* table() { return E2M1_DOUBLED_PLUS_12; }
    // half of an unsigned E4M3: 0 and 0x7f are 0, and bit 7 is ignored (0xff is 480)
    static inline FloatPart scale(const uint8_t* meta, int part, int lane) {
        const IntPart bits = widen_bytes(meta + 16 * part + lane);
        const IntPart exponent = (bits >> 3) & 15, mantissa = bits & 7;
        const FloatPart small = to_float(mantissa) * splat(1.0f / 1024.0f);
        const FloatPart normal = (FloatPart)(((exponent + 119) << 23) | (mantissa << 20));  // 2^(e - 8) (1 + m / 8)
        const FloatPart size = exponent == 0 ? small : normal;
        return bits == 0x7f ? FloatPart{} : size;
    }
};

inline constexpr uint8_t IQ4_PLUS_127[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};

struct Iq4Nl : Plain<32, 18, 32, 4, 127> {
    static constexpr int LARGEST = 240;
    static constexpr bool HAS_TABLE = true;
    static inline const uint8_t* table() { return IQ4_PLUS_127; }
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

struct Iq4Xs : Plain<256, 136, 160, 4, 127> {
    static constexpr int LARGEST = 240;
    static constexpr bool HAS_TABLE = true;
    static inline const uint8_t* table() { return IQ4_PLUS_127; }
    static inline FloatPart scale(const uint8_t* meta, int part, int lane) {
        return fp16_lanes(meta, lane) * signed_byte_lanes(meta + 32 + 16 * part, lane);
    }
};

// ---- blocks of 256 with six-bit scales and minimums: d[16] dmin[16] scales[8][16] minimums[8][16]

template <int RAW_, int BITS_>
struct SixBitScales : Plain<256, RAW_, 320, BITS_, 0> {
    static constexpr bool HAS_MINIMUM = true;
    static inline FloatPart scale(const uint8_t* meta, int part, int lane) { return fp16_lanes(meta, lane) * byte_lanes(meta + 64 + 16 * part, lane); }
    static inline FloatPart minimum(const uint8_t* meta, int part, int lane) {
        return -(fp16_lanes(meta + 32, lane) * byte_lanes(meta + 192 + 16 * part, lane));
    }
};

struct Q4_K : SixBitScales<144, 4> {
};

struct Q5_K : SixBitScales<176, 5> {
};

// ---- blocks of 256 with a scale for each 16 columns: scales[16][16], then d[16] (and dmin[16])

struct Q6_K : Plain<256, 210, 288, 6, 32> {
    static constexpr bool HALVES = true;
    static inline FloatPart scale(const uint8_t* meta, int part, int lane) {
        return fp16_lanes(meta, lane) * signed_byte_lanes(meta + 32 + 16 * part, lane);
    }
};

struct Q3_K : Plain<256, 110, 288, 3, 4> {
    static constexpr bool HALVES = true;
    static inline FloatPart scale(const uint8_t* meta, int part, int lane) { return Q6_K::scale(meta, part, lane); }
};

struct Q2_K : Plain<256, 84, 320, 2, 0> {
    static constexpr bool HALVES = true;
    static constexpr bool HAS_MINIMUM = true;
    static inline IntPart nibbles(const uint8_t* meta, int part, int lane) {
        return widen_bytes(meta + 64 + 16 * part + lane);
    }
    static inline FloatPart scale(const uint8_t* meta, int part, int lane) {
        return fp16_lanes(meta, lane) * to_float(nibbles(meta, part, lane) & 15);
    }
    static inline FloatPart minimum(const uint8_t* meta, int part, int lane) {
        return -(fp16_lanes(meta + 32, lane) * to_float(nibbles(meta, part, lane) >> 4));
    }
};

// ---- one and two bits

struct Tq2_0 : Plain<256, 66, 32, 2, 1> {
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

struct Q2_0 : Plain<64, 18, 32, 2, 1> {
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

inline constexpr uint8_t MINUS_PLUS[16] = {0, 2};  // one bit: minus or plus one, OFFSET 1 taken off

struct Q1_0 : Plain<128, 18, 32, 1, 1> {
    static constexpr int LARGEST = 2;
    static constexpr bool HAS_TABLE = true;
    static inline const uint8_t* table() { return MINUS_PLUS; }
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

// BitNet's ternary codes, whose scale belongs to the tensor; here a stored block is 128 columns of one row.
struct I2_S : Plain<128, 32, 0, 2, 1> {
    static constexpr bool ONE_SCALE = true;
    static inline FloatPart scale(const uint8_t*, int, int) { return splat(1.0f); }
};

}  // namespace graphcore
