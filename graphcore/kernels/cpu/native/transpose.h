// Transposition of sixteen rows' bytes: bytes that the rows have in the same place become neighbours.
//
// `Words` and `Columns` do it in rounds. A round interleaves vectors i and i + n / 2 of n vectors, which moves one bit of
// the row number into the place within a vector. Vectors have 16 bytes; every instruction set interleaves two of these in
// one instruction.
#pragma once

#include "vec.h"

namespace graphcore {

typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

// Size of the instruction set's vectors. GCC 12 splits wider ones through memory, at a tenth of the speed.
#if defined(__AVX512BW__)
constexpr int NATIVE_NBYTES = 64;
#elif defined(__AVX2__)
constexpr int NATIVE_NBYTES = 32;
#else
constexpr int NATIVE_NBYTES = 16;
#endif
typedef uint8_t Bytes __attribute__((vector_size(NATIVE_NBYTES)));
typedef uint32_t Fours __attribute__((vector_size(NATIVE_NBYTES)));

// Addresses in sixteen rows: byte `offset` of each row.
struct Rows {
    const uint8_t* const* first_bytes;
    size_t offset;

    const uint8_t* operator[](int lane) const { return first_bytes[lane] + offset; }
    Rows at(size_t more) const { return {first_bytes, offset + more}; }
};

// Words of 4 bytes of each row: byte 4r + c of word w is byte 4w + c of row r. This is the order of quads in codes.h.
template <int NBYTES>
struct Words {
    static_assert(NBYTES % 16 == 0 || NBYTES == 4);
    alignas(64) uint8_t bytes[NBYTES / 4][4 * LANES];

    explicit Words(const Rows& rows) {
        for (int four = 0; four < LANES; four += 4)
            for (int first = 0; first < NBYTES; first += 16) {
                i32x4 words[4], next[4];
                for (int i = 0; i < 4; i++) words[i] = load<i32x4>(rows[four + i] + first);
                interleave(words, next);
                interleave(next, words);
                for (int i = 0; i < 4; i++) store(bytes[first / 4 + i] + 4 * four, words[i]);
            }
    }

    // Returns the bytes of a word that begin at byte `from`, which belong to some of the rows.
    Bytes at(int word, int from) const { return load<Bytes>(bytes[word] + from); }

  private:
    static void interleave(const i32x4 from[4], i32x4 to[4]) {
        for (int i = 0; i < 2; i++) {
            to[2 * i] = __builtin_shufflevector(from[i], from[i + 2], 0, 4, 1, 5);
            to[2 * i + 1] = __builtin_shufflevector(from[i], from[i + 2], 2, 6, 3, 7);
        }
    }
};

// Sixteen bytes of each row: lane r of bytes[i] is byte i of row r.
struct Columns {
    u8x16 bytes[16];

    explicit Columns(const Rows& rows) {
        u8x16 next[16];
        for (int i = 0; i < 16; i++) bytes[i] = load<u8x16>(rows[i]);
        for (int round = 0; round < 2; round++) interleave(bytes, next), interleave(next, bytes);
    }

    u8x16 operator[](int byte) const { return bytes[byte]; }

  private:
    static void interleave(const u8x16 from[16], u8x16 to[16]) {
        for (int i = 0; i < 8; i++) {
            const u8x16 a = from[i], b = from[i + 8];
            to[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            to[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
    }
};

// Copies the 2 bytes that each row has at the offset, one row after another.
inline void put_halves(const Rows& rows, uint8_t* to) {
    for (int lane = 0; lane < LANES; lane++) std::memcpy(to + 2 * lane, rows[lane], 2);
}

template <>
inline Words<4>::Words(const Rows& rows) {
    for (int lane = 0; lane < LANES; lane++) std::memcpy(bytes[0] + 4 * lane, rows[lane], 4);
}

}  // namespace graphcore
