// The quantised formats in the kernels' layout: sixteen rows interleaved, scales first, then codes.
//
//     group of 16 rows:  [ scales of 256 columns | pad to 64 ][ their codes ]  [ scales of the next 256 ][ codes ] ...
//     weight = scale * (value(code) - OFFSET)  (+ minimum)      value: the code itself, or a table's entry
//     weight = scale * (code - zero)                            if HAS_ZERO is set; minimum = -scale * zero in products
//     weight = scale * level(code)                              if HAS_FLOATS is set; level: a float
//
// A format's struct says how large its blocks are. Its functions `scale`, `minimum` and `zero` return the sixteen rows' numbers
// for one part of a block. A part has 32 columns, or 16 if HALVES is set. stored.h has the layout in files.
#pragma once

#include "codes.h"
#include "encodings.h"

namespace graphcore {

// ---- Numbers of sixteen rows as float32, for the rows of one register, which begin at `lane`

inline FloatPart fp32_lanes(const uint8_t* from, int lane) { return load<FloatPart>(from + 4 * lane); }
inline FloatPart fp16_lanes(const uint8_t* from, int lane) { return halves_to_float((const uint16_t*)from + lane); }
inline FloatPart byte_lanes(const uint8_t* from, int lane) { return to_float(widen_bytes(from + lane)); }
inline FloatPart signed_byte_lanes(const uint8_t* from, int lane) { return to_float(widen_signed_bytes(from + lane)); }

// Properties that most formats share: one scale for each part, no minimum.
template <Format NUMBER_, int META_>
struct Plain {
    static constexpr Format NUMBER = NUMBER_;
    static constexpr int COLUMNS = ENCODINGS[NUMBER].columns;    // columns of a stored block
    static constexpr int RAW_NBYTES = ENCODINGS[NUMBER].nbytes;  // bytes of a stored block
    static constexpr int META_NBYTES = META_;                    // bytes of sixteen stored blocks' scales
    static constexpr int BITS = ENCODINGS[NUMBER].bits;          // bits of a code
    static constexpr int OFFSET = ENCODINGS[NUMBER].offset;      // number that is subtracted from values
    static constexpr int LARGEST = ENCODINGS[NUMBER].largest;    // largest value, before the offset is subtracted
    static constexpr bool HALVES = false;                        // a part has 16 columns, not 32
    static constexpr bool HAS_MINIMUM = false;                   // weight = scale * code + minimum
    static constexpr bool HAS_ZERO = false;                      // a part has a zero point, and minimum = -scale * zero
    static constexpr bool HAS_FLOATS = false;                    // values of codes are floats, which `level` returns
    static constexpr bool ONE_SCALE = has_tensor_scale(NUMBER);  // a single scale for the whole tensor
    static constexpr bool HAS_TABLE = ENCODINGS[NUMBER].values != nullptr;  // values of codes are looked up in `table`
    static inline const uint8_t* table() { return ENCODINGS[NUMBER].values; }
    static inline FloatPart minimum(const uint8_t*, int, int) { return FloatPart{}; }
};

struct Q4_0 : Plain<FORMAT_Q4_0, 32> {
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

struct Q4_1 : Plain<FORMAT_Q4_1, 64> {
    static constexpr bool HAS_MINIMUM = true;
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
    static inline FloatPart minimum(const uint8_t* meta, int, int lane) { return fp16_lanes(meta + 32, lane); }
};

struct Q5_0 : Plain<FORMAT_Q5_0, 32> {
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

struct Q5_1 : Plain<FORMAT_Q5_1, 64> {
    static constexpr bool HAS_MINIMUM = true;
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
    static inline FloatPart minimum(const uint8_t* meta, int, int lane) { return fp16_lanes(meta + 32, lane); }
};

struct Q8_0 : Plain<FORMAT_Q8_0, 32> {
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

// Returns 2^(exponent - 128). The two smallest results are subnormal.
inline FloatPart half_powers_of_two(const uint8_t* exponents) {
    const IntPart e = widen_bytes(exponents);
    const IntPart normal = (e - 1) << 23, subnormal = splat_int(0x00200000) << (e & 1);
    return (FloatPart)(e >= 2 ? normal : subnormal);
}

struct MXFP4 : Plain<FORMAT_MXFP4, 16> {
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return half_powers_of_two(meta + lane); }
};

struct NVFP4 : Plain<FORMAT_NVFP4, 64> {
    static constexpr bool HALVES = true;
    // Returns half of an unsigned E4M3 number. 0 and 0x7f give 0. Otherwise bit 7 is ignored, so 0xff stands for 480.
    static inline FloatPart scale(const uint8_t* meta, int part, int lane) {
        const IntPart bits = widen_bytes(meta + 16 * part + lane);
        const IntPart exponent = (bits >> 3) & 15, mantissa = bits & 7;
        const FloatPart small = to_float(mantissa) * splat(1.0f / 1024.0f);
        const FloatPart normal = (FloatPart)(((exponent + 119) << 23) | (mantissa << 20));  // 2^(e - 8) (1 + m / 8)
        const FloatPart size = exponent == 0 ? small : normal;
        return bits == 0x7f ? FloatPart{} : size;
    }
};

struct NVFP4_F32 : Plain<FORMAT_NVFP4_F32, 128> {
    static constexpr bool HALVES = true;
    static inline FloatPart scale(const uint8_t* meta, int part, int lane) { return fp32_lanes(meta + 64 * part, lane); }
};

struct IQ4_NL : Plain<FORMAT_IQ4_NL, 32> {
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

struct IQ4_XS : Plain<FORMAT_IQ4_XS, 160> {
    static inline FloatPart scale(const uint8_t* meta, int part, int lane) {
        return fp16_lanes(meta, lane) * signed_byte_lanes(meta + 32 + 16 * part, lane);
    }
};

// ---- Blocks of 256 with six-bit scales and minimums: d[16] dmin[16] scales[8][16] minimums[8][16]

template <Format NUMBER_>
struct SixBitScales : Plain<NUMBER_, 320> {
    static constexpr bool HAS_MINIMUM = true;
    static inline FloatPart scale(const uint8_t* meta, int part, int lane) { return fp16_lanes(meta, lane) * byte_lanes(meta + 64 + 16 * part, lane); }
    static inline FloatPart minimum(const uint8_t* meta, int part, int lane) {
        return -(fp16_lanes(meta + 32, lane) * byte_lanes(meta + 192 + 16 * part, lane));
    }
};

struct Q4_K : SixBitScales<FORMAT_Q4_K> {
};

struct Q5_K : SixBitScales<FORMAT_Q5_K> {
};

// ---- Blocks of 256 with a scale for each 16 columns: scales[16][16], then d[16] (and dmin[16])

struct Q6_K : Plain<FORMAT_Q6_K, 288> {
    static constexpr bool HALVES = true;
    static inline FloatPart scale(const uint8_t* meta, int part, int lane) {
        return fp16_lanes(meta, lane) * signed_byte_lanes(meta + 32 + 16 * part, lane);
    }
};

struct Q3_K : Plain<FORMAT_Q3_K, 288> {
    static constexpr bool HALVES = true;
    static inline FloatPart scale(const uint8_t* meta, int part, int lane) { return Q6_K::scale(meta, part, lane); }
};

struct Q2_K : Plain<FORMAT_Q2_K, 320> {
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

// ---- One and two bits

struct TQ2_0 : Plain<FORMAT_TQ2_0, 32> {
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

struct Q2_0 : Plain<FORMAT_Q2_0, 32> {
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

struct Q1_0 : Plain<FORMAT_Q1_0, 32> {
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp16_lanes(meta, lane); }
};

// ---- Levels: scales of four bits, two in a byte: d[16], then scales[parts / 2][16]

template <Format NUMBER_, bool HALVES_, int EIGHTHS>
struct Levels : Plain<NUMBER_, HALVES_ ? 160 : 96> {
    static constexpr bool HALVES = HALVES_;
    static inline FloatPart scale(const uint8_t* meta, int part, int lane) {
        const IntPart four = (widen_bytes(meta + 32 + 16 * (part / 2) + lane) >> (4 * (part % 2))) & 15;
        return fp16_lanes(meta, lane) * (to_float(2 * four + 1) * splat(EIGHTHS / 8.0f));
    }
};

struct IQ1_S : Levels<FORMAT_IQ1_S, false, 1> {
};
struct IQ1_M : Levels<FORMAT_IQ1_M, true, 1> {
};
struct IQ2_XXS : Levels<FORMAT_IQ2_XXS, false, 1> {
};
struct IQ2_XS : Levels<FORMAT_IQ2_XS, true, 1> {
};
struct IQ2_S : Levels<FORMAT_IQ2_S, true, 1> {
};
struct IQ3_XXS : Levels<FORMAT_IQ3_XXS, false, 2> {
};
struct IQ3_S : Levels<FORMAT_IQ3_S, false, 8> {
};

// BitNet's ternary codes. Their scale belongs to the whole tensor. A stored block is 128 columns of one row.
struct I2_S : Plain<FORMAT_I2_S, 0> {
    static inline FloatPart scale(const uint8_t*, int, int) { return splat(1.0f); }
};

// ---- Weights of Hugging Face's folders: blocks of 32 with a zero point, or with codes that are floats

// SCALE_NBYTES: bytes of a row's scale, which the zeros follow.
template <Format NUMBER_, int SCALE_NBYTES>
struct ZeroPoint : Plain<NUMBER_, (SCALE_NBYTES + 1) * LANES> {
    static constexpr bool HAS_MINIMUM = true, HAS_ZERO = true;
    static inline FloatPart scale(const uint8_t* meta, int, int lane) {
        return SCALE_NBYTES == 2 ? fp16_lanes(meta, lane) : fp32_lanes(meta, lane);
    }
    static inline FloatPart zero(const uint8_t* meta, int, int lane) { return byte_lanes(meta + SCALE_NBYTES * LANES, lane); }
    static inline FloatPart minimum(const uint8_t* meta, int part, int lane) {
        return -(scale(meta, part, lane) * zero(meta, part, lane));
    }
};

struct AFFINE4 : ZeroPoint<FORMAT_AFFINE4, 2> {
};
struct AFFINE8 : ZeroPoint<FORMAT_AFFINE8, 4> {
};

template <Format NUMBER_>
struct Floats : Plain<NUMBER_, 4 * LANES> {
    static constexpr bool HAS_FLOATS = true;
    static inline FloatPart scale(const uint8_t* meta, int, int lane) { return fp32_lanes(meta, lane); }
};

struct FP8 : Floats<FORMAT_FP8> {
    static inline FloatPart level(IntPart code) {
        const IntPart exponent = (code >> 3) & 15, mantissa = code & 7;
        const FloatPart small = to_float(mantissa) * splat(1.0f / 512.0f);
        const FloatPart normal = (FloatPart)(((exponent + 120) << 23) | (mantissa << 20));  // 2^(e - 7) (1 + m / 8)
        const FloatPart size = exponent == 0 ? small : normal;
        return (FloatPart)((IntPart)size | ((code & 128) << 24));
    }
};

struct NF4 : Floats<FORMAT_NF4> {
    static inline FloatPart level(IntPart code) { return lookup_floats(NF4_LEVELS, code); }
};
struct FP4 : Floats<FORMAT_FP4> {
    static inline FloatPart level(IntPart code) { return lookup_floats(FP4_LEVELS, code); }
};

}  // namespace graphcore
