// The memory layout of sixteen rows' codes, for each number of bits.
//
//     a block: 16 rows x 32 columns.     quad j: columns 4j .. 4j+3     a vector: 64 bytes
//     vector of quad j, byte 4r + c  =  code of row r, column 4j + c
//
// One instruction then multiplies four columns of all sixteen rows with four activations and adds the products of each
// row, so no sum crosses lanes. Codes of fewer than eight bits share vectors, quad by quad:
//
//     4 bits   vector v (0..3): quad v in the low nibble, quad v + 4 in the high one
//     5 bits   like 4, and one vector whose bit j is the fifth bit of quad j
//     6 bits   like 4, and two vectors p whose bits 2s, 2s+1 are the upper bits of quad 4p + s
//     3 bits   like 2, and one vector whose bit j is the third bit of quad j
//     2 bits   vector h (0..1): bits 2s, 2s+1 are quad 4h + s
//     1 bit    one vector: bit j is quad j
//
// Rows are independent, so narrow registers take some of the rows at a time. `quad` reads one quad of the rows whose bytes
// begin at `from` in the first vector. `pack` may get the same part of every vector, as a type V of fewer than 64 bytes.
#pragma once

#include "vec.h"

namespace graphcore {

constexpr int BLOCK_COLUMNS = 32;
constexpr int QUADS = 8;
constexpr int VECTOR_NBYTES = 64;

template <class V>
inline V bits_at(V bytes, int shift, int to, uint8_t mask) {
    // Moves the bits that begin at bit `shift` to bit `to`. mask: the bits of each resulting byte to keep.
    return shift > to ? shift_right(bytes, shift - to, mask) : shift_left(bytes, to - shift, mask);
}

template <int BITS>
struct Codes;

template <>
struct Codes<1> {
    static constexpr int NBYTES = VECTOR_NBYTES;
    static inline BytePart quad(const uint8_t* from, int j) { return bits_at(load<BytePart>(from), j, 0, 1); }
    template <class V>
    static void pack(const V quads[QUADS], uint8_t* to) {
        V bits{};
        for (int j = 0; j < QUADS; j++) bits |= shift_left(quads[j], j, uint8_t(1 << j));
        store(to, bits);
    }
};

template <>
struct Codes<2> {
    static constexpr int NBYTES = 2 * VECTOR_NBYTES;
    static inline BytePart quad(const uint8_t* from, int j) {
        return bits_at(load<BytePart>(from + j / 4 * VECTOR_NBYTES), 2 * (j % 4), 0, 3);
    }
    template <class V>
    static void pack(const V quads[QUADS], uint8_t* to) {
        for (int h = 0; h < 2; h++) {
            V bits{};
            for (int s = 0; s < 4; s++) bits |= shift_left(quads[4 * h + s], 2 * s, uint8_t(3 << 2 * s));
            store(to + h * VECTOR_NBYTES, bits);
        }
    }
};

template <>
struct Codes<3> {
    static constexpr int NBYTES = 3 * VECTOR_NBYTES;
    static inline BytePart quad(const uint8_t* from, int j) {
        return Codes<2>::quad(from, j) | bits_at(load<BytePart>(from + Codes<2>::NBYTES), j, 2, 4);
    }
    template <class V>
    static void pack(const V quads[QUADS], uint8_t* to) {
        V low[QUADS], high[QUADS];
        for (int j = 0; j < QUADS; j++) low[j] = quads[j] & 3, high[j] = shift_right(quads[j], 2, 1);
        Codes<2>::pack(low, to);
        Codes<1>::pack(high, to + Codes<2>::NBYTES);
    }
};

template <>
struct Codes<4> {
    static constexpr int NBYTES = 4 * VECTOR_NBYTES;
    static inline BytePart quad(const uint8_t* from, int j) {
        const BytePart both = load<BytePart>(from + j % 4 * VECTOR_NBYTES);
        return j < 4 ? both & splat_byte(15) : shift_right(both, 4, 15);
    }
    template <class V>
    static void pack(const V quads[QUADS], uint8_t* to) {
        for (int v = 0; v < 4; v++) store(to + v * VECTOR_NBYTES, quads[v] | shift_left(quads[v + 4], 4, 0xf0));
    }
};

template <>
struct Codes<5> {
    static constexpr int NBYTES = 5 * VECTOR_NBYTES;
    static inline BytePart quad(const uint8_t* from, int j) {
        return Codes<4>::quad(from, j) | bits_at(load<BytePart>(from + Codes<4>::NBYTES), j, 4, 16);
    }
    template <class V>
    static void pack(const V quads[QUADS], uint8_t* to) {
        V low[QUADS], high[QUADS];
        for (int j = 0; j < QUADS; j++) low[j] = quads[j] & 15, high[j] = shift_right(quads[j], 4, 1);
        Codes<4>::pack(low, to);
        Codes<1>::pack(high, to + Codes<4>::NBYTES);
    }
};

template <>
struct Codes<6> {
    static constexpr int NBYTES = 6 * VECTOR_NBYTES;
    static inline BytePart quad(const uint8_t* from, int j) {
        const BytePart upper = load<BytePart>(from + Codes<4>::NBYTES + j / 4 * VECTOR_NBYTES);
        return Codes<4>::quad(from, j) | bits_at(upper, 2 * (j % 4), 4, 0x30);
    }
    template <class V>
    static void pack(const V quads[QUADS], uint8_t* to) {
        V low[QUADS], high[QUADS];
        for (int j = 0; j < QUADS; j++) low[j] = quads[j] & 15, high[j] = shift_right(quads[j], 4, 3);
        Codes<4>::pack(low, to);
        Codes<2>::pack(high, to + Codes<4>::NBYTES);
    }
};

template <>
struct Codes<8> {
    static constexpr int NBYTES = QUADS * VECTOR_NBYTES;
    static inline BytePart quad(const uint8_t* from, int j) { return load<BytePart>(from + j * VECTOR_NBYTES); }
    template <class V>
    static void pack(const V quads[QUADS], uint8_t* to) {
        for (int j = 0; j < QUADS; j++) store(to + j * VECTOR_NBYTES, quads[j]);
    }
};

}  // namespace graphcore
