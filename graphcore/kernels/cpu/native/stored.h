// The quantised formats as stored in files. Stored<F> reads a block of sixteen rows and returns its codes in the kernels'
// order.
//
//     Stored<F> block{rows}        reads one block of each of sixteen rows, at the same columns, and transposes it to words
//     block.scales(meta)           writes the sixteen rows' scales where formats.h reads them
//     block.codes(b, from, quads)  gives the codes of columns 32b .. 32b + 31 of the block as quads (codes.h). If the
//                                  processor's vectors hold only some of the rows, it gives those whose bytes begin at
//                                  byte `from` of a quad
//
// A word has four neighbouring bytes of each row. Formats keep neighbouring columns in neighbouring bytes, so some bits of
// each byte of a word are a quad, for all rows at once. The layouts are ggml's (ggml/src/ggml-common.h); the modules in
// graphcore/quant/formats/ have a picture of each.
#pragma once

#include "formats.h"
#include "grids.h"
#include "transpose.h"

namespace graphcore {

template <class F>
struct Stored;

// ---- Codes

// Reads words first .. first + 3, which have columns 0 .. 15 in their low nibbles and 16 .. 31 in their high nibbles.
template <int NBYTES>
inline void low_high_halves(const Words<NBYTES>& words, int first, int from, Bytes quads[QUADS]) {
    for (int j = 0; j < 4; j++) {
        quads[j] = words.at(first + j, from) & 15;
        quads[j + 4] = shift_right(words.at(first + j, from), 4, 15);
    }
}

// Reads a block's nibbles. Two blocks share eight words: even blocks have the low nibbles, odd blocks the high nibbles.
inline void nibble_chunks(const Words<128>& words, int block, int from, Bytes quads[QUADS]) {
    for (int j = 0; j < QUADS; j++) quads[j] = bits_at(words.at(8 * (block / 2) + j, from), 4 * (block % 2), 0, 15);
}

// Reads a block's codes of two bits. Four blocks share eight words, and each has two bits of every byte.
inline void two_bit_planes(const Words<64>& words, int block, int from, Bytes quads[QUADS]) {
    for (int j = 0; j < QUADS; j++) quads[j] = bits_at(words.at(8 * (block / 4) + j, from), 2 * (block % 4), 0, 3);
}

// Adds bit `to` to a block's codes. Eight blocks share eight words, and each has one bit of every byte.
inline void add_bit_planes(const Words<32>& words, int block, int to, int from, Bytes quads[QUADS]) {
    for (int j = 0; j < QUADS; j++) quads[j] |= bits_at(words.at(j, from), block, to, uint8_t(1 << to));
}

// Adds bit `to` to codes. Bit j of a row's word belongs to column j.
inline void add_bits(Fours words, int to, Bytes quads[QUADS]) {
    for (int j = 0; j < QUADS; j++) {
        const Fours four = (words >> (4 * j)) & 15u;            // 0000dcba
        const Fours pairs = (four | four << 14) & 0x00030003u;  // dc and ba, sixteen bits apart
        quads[j] |= (Bytes)(((pairs | pairs << 7) & 0x01010101u) << to);
    }
}

// ---- Scales

inline void put_columns(const Columns& columns, int first, int count, uint8_t* to) {
    for (int i = 0; i < count; i++) store(to + 16 * i, columns[first + i]);
}

// Writes the scales of blocks that begin with d[2], dmin[2] and twelve bytes of six-bit scales and minimums.
inline void six_bit_scales(const Rows& rows, uint8_t* meta) {
    put_halves(rows, meta);
    put_halves(rows.at(2), meta + 32);
    const Columns bytes(rows);
    for (int part = 0; part < 4; part++) {
        const u8x16 a = bytes[4 + part], b = bytes[8 + part], c = bytes[12 + part];
        store(meta + 64 + 16 * part, a & 63);
        store(meta + 64 + 16 * (part + 4), (c & 15) | (a >> 6 << 4));
        store(meta + 192 + 16 * part, b & 63);
        store(meta + 192 + 16 * (part + 4), (c >> 4) | (b >> 6 << 4));
    }
}

// ---- Blocks of 32

// A stored block of HALVES float16 numbers, then nibbles.
template <int HALVES>
struct StoredNibbles {
    Rows rows;
    Words<16> words{rows.at(2 * HALVES)};

    void scales(uint8_t* meta) const {
        for (int i = 0; i < HALVES; i++) put_halves(rows.at(2 * i), meta + 32 * i);
    }
    void codes(int, int from, Bytes quads[QUADS]) const { low_high_halves(words, 0, from, quads); }
};

template <> struct Stored<Q4_0> : StoredNibbles<1> {};
template <> struct Stored<Q4_1> : StoredNibbles<2> {};
template <> struct Stored<IQ4_NL> : StoredNibbles<1> {};

// A stored block of HALVES float16 numbers, the fifth bits of 32 codes, then nibbles.
template <int HALVES>
struct StoredFiveBits {
    Rows rows;
    Words<4> fifths{rows.at(2 * HALVES)};
    Words<16> words{rows.at(2 * HALVES + 4)};

    void scales(uint8_t* meta) const {
        for (int i = 0; i < HALVES; i++) put_halves(rows.at(2 * i), meta + 32 * i);
    }
    void codes(int, int from, Bytes quads[QUADS]) const {
        low_high_halves(words, 0, from, quads);
        add_bits((Fours)fifths.at(0, from), 4, quads);
    }
};

template <> struct Stored<Q5_0> : StoredFiveBits<1> {};
template <> struct Stored<Q5_1> : StoredFiveBits<2> {};

template <>
struct Stored<Q8_0> {
    Rows rows;
    Words<32> words{rows.at(2)};

    void scales(uint8_t* meta) const { put_halves(rows, meta); }
    void codes(int, int from, Bytes quads[QUADS]) const {
        for (int j = 0; j < QUADS; j++) quads[j] = words.at(j, from) ^ 0x80;
    }
};

template <>
struct Stored<MXFP4> {
    Rows rows;
    Words<16> words{rows.at(1)};

    void scales(uint8_t* meta) const {
        for (int lane = 0; lane < LANES; lane++) meta[lane] = *rows[lane];
    }
    void codes(int, int from, Bytes quads[QUADS]) const { low_high_halves(words, 0, from, quads); }
};

// A stored block of parts of 16 columns, each in 8 bytes: columns 0 .. 7 in the low nibbles, 8 .. 15 in the high nibbles.
template <>
struct Stored<NVFP4> {
    Rows rows;
    Words<32> words{rows.at(4)};

    void scales(uint8_t* meta) const { put_columns(Columns(rows), 0, 4, meta); }
    void codes(int block, int from, Bytes quads[QUADS]) const {
        for (int j = 0; j < QUADS; j++) quads[j] = bits_at(words.at(4 * block + j / 4 * 2 + j % 2, from), j % 4 / 2 * 4, 0, 15);
    }
};

// ---- Blocks of 256

template <>
struct Stored<IQ4_XS> {
    Rows rows;
    Words<128> words{rows.at(8)};

    void scales(uint8_t* meta) const {
        put_halves(rows, meta);
        const Columns bytes(rows);
        for (int part = 0; part < 8; part++) {
            const u8x16 low = (bytes[4 + part / 2] >> (4 * (part % 2))) & 15;
            const u8x16 high = (bytes[2 + part / 4] >> (2 * (part % 4))) & 3;
            store(meta + 32 + 16 * part, (low | high << 4) - 32);
        }
    }
    void codes(int block, int from, Bytes quads[QUADS]) const { low_high_halves(words, 4 * block, from, quads); }
};

template <>
struct Stored<Q4_K> {
    Rows rows;
    Words<128> words{rows.at(16)};

    void scales(uint8_t* meta) const { six_bit_scales(rows, meta); }
    void codes(int block, int from, Bytes quads[QUADS]) const { nibble_chunks(words, block, from, quads); }
};

template <>
struct Stored<Q5_K> {
    Rows rows;
    Words<32> high{rows.at(16)};
    Words<128> words{rows.at(48)};

    void scales(uint8_t* meta) const { six_bit_scales(rows, meta); }
    void codes(int block, int from, Bytes quads[QUADS]) const {
        nibble_chunks(words, block, from, quads);
        add_bit_planes(high, block, 4, from, quads);
    }
};

template <>
struct Stored<Q6_K> {
    Rows rows;
    Words<128> low{rows};
    Words<64> high{rows.at(128)};

    void scales(uint8_t* meta) const {
        put_halves(rows.at(208), meta);
        put_columns(Columns(rows.at(192)), 0, 16, meta + 32);
    }
    void codes(int block, int from, Bytes quads[QUADS]) const {
        const int half = block / 4, s = block % 4;
        for (int j = 0; j < QUADS; j++)
            quads[j] = bits_at(low.at(16 * half + 8 * (s % 2) + j, from), s / 2 * 4, 0, 15) | bits_at(high.at(8 * half + j, from), 2 * s, 4, 0x30);
    }
};

template <>
struct Stored<Q3_K> {
    Rows rows;
    Words<32> high{rows};  // third bits of the codes: a clear bit means 4 less
    Words<64> words{rows.at(32)};

    void scales(uint8_t* meta) const {
        put_halves(rows.at(108), meta);
        const Columns bytes(rows.at(94));  // begins two bytes early, so that sixteen bytes end with the block
        for (int part = 0; part < 16; part++) {
            const u8x16 low = (bytes[2 + part % 8] >> (part / 8 * 4)) & 15;
            const u8x16 upper = (bytes[10 + part % 4] >> (2 * (part / 4))) & 3;
            store(meta + 32 + 16 * part, (low | upper << 4) - 32);
        }
    }
    void codes(int block, int from, Bytes quads[QUADS]) const {
        two_bit_planes(words, block, from, quads);
        add_bit_planes(high, block, 2, from, quads);
    }
};

template <>
struct Stored<Q2_K> {
    Rows rows;
    Words<64> words{rows.at(16)};

    void scales(uint8_t* meta) const {
        put_halves(rows.at(80), meta);
        put_halves(rows.at(82), meta + 32);
        put_columns(Columns(rows), 0, 16, meta + 64);
    }
    void codes(int block, int from, Bytes quads[QUADS]) const { two_bit_planes(words, block, from, quads); }
};

// ---- Grids: blocks of 256, whose codes are looked up row by row (graphcore/quant/level_formats.py)

// A grid's entries: eight codes of two bits as bytes, or four of three bits.
template <class Entry, int SIZE>
struct Grid {
    Entry entries[SIZE];

    explicit constexpr Grid(const uint16_t (&words)[SIZE]) : entries{} {
        constexpr int BITS = sizeof(Entry) == 8 ? 2 : 3;
        for (int i = 0; i < SIZE; i++)
            for (unsigned j = 0; j < sizeof(Entry); j++) entries[i] |= Entry(words[i] >> (BITS * j) & ((1 << BITS) - 1)) << (8 * j);
    }
};

inline constexpr Grid<uint64_t, 2048> IQ1_GRID(IQ1_S_WORDS);
inline constexpr Grid<uint64_t, 256> IQ2_XXS_GRID(IQ2_XXS_WORDS);
inline constexpr Grid<uint64_t, 512> IQ2_XS_GRID(IQ2_XS_WORDS);
inline constexpr Grid<uint64_t, 1024> IQ2_S_GRID(IQ2_S_WORDS);
inline constexpr Grid<uint32_t, 256> IQ3_XXS_GRID(IQ3_XXS_WORDS);
inline constexpr Grid<uint32_t, 512> IQ3_S_GRID(IQ3_S_WORDS);

// Returns the signs of 32 columns from four numbers of seven bits: the eighth sign makes their number even.
inline uint32_t even_signs(uint32_t word) {
    uint32_t signs = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t seven = word >> (7 * i) & 127;
        signs |= (seven | uint32_t(__builtin_parity(seven)) << 7) << (8 * i);
    }
    return signs;
}

// Codes and signs of sixteen rows, and their scales where formats.h reads them.
template <int BITS>
struct GridCodes {
    alignas(64) uint8_t words[CHUNK_BLOCKS][QUADS][VECTOR_NBYTES];
    alignas(64) uint32_t signs[CHUNK_BLOCKS][LANES];
    alignas(16) uint8_t fours[8][LANES];
    uint16_t unit[LANES];

    void put_eight(int lane, int block, int eighth, uint64_t codes) {
        std::memcpy(words[block][2 * eighth] + 4 * lane, &codes, 4);
        std::memcpy(words[block][2 * eighth + 1] + 4 * lane, (const uint8_t*)&codes + 4, 4);
    }
    void put_four(int lane, int block, int quad, uint32_t codes) { std::memcpy(words[block][quad] + 4 * lane, &codes, 4); }
    void put_scale(int lane, int part, uint32_t scale) {
        uint8_t& both = fours[part / 2][lane];
        both = uint8_t(part % 2 ? both | scale << 4 : scale);
    }
    void scales(uint8_t* meta, int count) const {
        std::memcpy(meta, unit, sizeof(unit));
        std::memcpy(meta + 32, fours, size_t(count) * LANES);
    }
    void codes(int block, int from, Bytes quads[QUADS]) const {
        for (int j = 0; j < QUADS; j++) quads[j] = load<Bytes>(words[block][j] + from);
        add_bits(load<Fours>((const uint8_t*)signs[block] + from), BITS - 1, quads);
    }
};

// A stored block that begins with d. read(lane, row) puts a row's codes, signs and scales.
template <class F>
struct StoredGrid : GridCodes<F::BITS> {
    explicit StoredGrid(const Rows& rows) {
        for (int lane = 0; lane < LANES; lane++) {
            std::memcpy(this->unit + lane, rows[lane], 2);
            static_cast<Stored<F>*>(this)->read(lane, rows[lane]);
        }
    }
    void scales(uint8_t* meta) const { GridCodes<F::BITS>::scales(meta, F::HALVES ? 8 : 4); }
};

template <>
struct Stored<IQ2_XXS> : StoredGrid<IQ2_XXS> {
    using StoredGrid::StoredGrid;
    void read(int lane, const uint8_t* row) {
        for (int block = 0; block < CHUNK_BLOCKS; block++) {
            const uint8_t* group = row + 2 + 8 * block;
            const uint32_t word = load<uint32_t>(group + 4);
            for (int i = 0; i < 4; i++) put_eight(lane, block, i, IQ2_XXS_GRID.entries[group[i]]);
            signs[block][lane] = even_signs(word);
            put_scale(lane, block, word >> 28);
        }
    }
};

template <>
struct Stored<IQ2_XS> : StoredGrid<IQ2_XS> {
    using StoredGrid::StoredGrid;
    void read(int lane, const uint8_t* row) {
        for (int block = 0; block < CHUNK_BLOCKS; block++) {
            uint32_t sevens = 0;
            for (int i = 0; i < 4; i++) {
                const uint16_t word = load<uint16_t>(row + 2 + 8 * block + 2 * i);
                put_eight(lane, block, i, IQ2_XS_GRID.entries[word & 511]);
                sevens |= uint32_t(word >> 9) << (7 * i);
            }
            signs[block][lane] = even_signs(sevens);
            fours[block][lane] = row[66 + block];
        }
    }
};

template <>
struct Stored<IQ2_S> : StoredGrid<IQ2_S> {
    using StoredGrid::StoredGrid;
    void read(int lane, const uint8_t* row) {
        for (int block = 0; block < CHUNK_BLOCKS; block++) {
            for (int i = 0; i < 4; i++)
                put_eight(lane, block, i, IQ2_S_GRID.entries[row[2 + 4 * block + i] | (row[66 + block] >> (2 * i) & 3) << 8]);
            signs[block][lane] = load<uint32_t>(row + 34 + 4 * block);
            fours[block][lane] = row[74 + block];
        }
    }
};

template <>
struct Stored<IQ3_XXS> : StoredGrid<IQ3_XXS> {
    using StoredGrid::StoredGrid;
    void read(int lane, const uint8_t* row) {
        for (int block = 0; block < CHUNK_BLOCKS; block++) {
            const uint32_t word = load<uint32_t>(row + 66 + 4 * block);
            for (int j = 0; j < QUADS; j++) put_four(lane, block, j, IQ3_XXS_GRID.entries[row[2 + 8 * block + j]]);
            signs[block][lane] = even_signs(word);
            put_scale(lane, block, word >> 28);
        }
    }
};

template <>
struct Stored<IQ3_S> : StoredGrid<IQ3_S> {
    using StoredGrid::StoredGrid;
    void read(int lane, const uint8_t* row) {
        for (int block = 0; block < CHUNK_BLOCKS; block++) {
            for (int j = 0; j < QUADS; j++)
                put_four(lane, block, j, IQ3_S_GRID.entries[row[2 + 8 * block + j] | (row[66 + block] >> j & 1) << 8]);
            signs[block][lane] = load<uint32_t>(row + 74 + 4 * block);
        }
        for (int i = 0; i < 4; i++) fours[i][lane] = row[106 + i];
    }
};

// The sign of the eighth that is added or subtracted is that of its columns' codes.
template <>
struct Stored<IQ1_S> : StoredGrid<IQ1_S> {
    using StoredGrid::StoredGrid;
    void read(int lane, const uint8_t* row) {
        for (int block = 0; block < CHUNK_BLOCKS; block++) {
            const uint16_t word = load<uint16_t>(row + 34 + 2 * block);
            for (int i = 0; i < 4; i++) put_eight(lane, block, i, IQ1_GRID.entries[row[2 + 4 * block + i] | (word >> (3 * i) & 7) << 8]);
            signs[block][lane] = word & 0x8000 ? ~0u : 0u;
            put_scale(lane, block, word >> 12 & 7);
        }
    }
};

template <>
struct Stored<IQ1_M> : StoredGrid<IQ1_M> {
    using StoredGrid::StoredGrid;
    void read(int lane, const uint8_t* row) {
        unit[lane] = 0;
        for (int i = 0; i < 4; i++) unit[lane] |= uint16_t(row[49 + 2 * i] >> 4 << (4 * i));
        for (int block = 0; block < CHUNK_BLOCKS; block++) {
            uint32_t eighths = 0;
            for (int i = 0; i < 4; i++) {
                const int high = row[32 + 2 * block + i / 2] >> (4 * (i % 2));
                put_eight(lane, block, i, IQ1_GRID.entries[row[4 * block + i] | (high & 7) << 8]);
                eighths |= high & 8 ? 0xffu << (8 * i) : 0u;
            }
            signs[block][lane] = eighths;
            const int scales = load<uint16_t>(row + 48 + block / 2 * 2) >> (6 * (block % 2));
            fours[block][lane] = uint8_t((scales & 7) | (scales >> 3 & 7) << 4);
        }
    }
};

// ---- One and two bits

template <>
struct Stored<TQ2_0> {
    Rows rows;
    Words<64> words{rows};

    void scales(uint8_t* meta) const { put_halves(rows.at(64), meta); }
    void codes(int block, int from, Bytes quads[QUADS]) const { two_bit_planes(words, block, from, quads); }
};

// A stored block whose bytes each hold four neighbouring columns, so that a quad is one byte of each row.
template <>
struct Stored<Q2_0> {
    Rows rows;
    Words<16> words{rows.at(2)};

    void scales(uint8_t* meta) const { put_halves(rows, meta); }
    void codes(int block, int from, Bytes quads[QUADS]) const {
        for (int j = 0; j < QUADS; j++) {
            const Fours four = ((Fours)words.at(2 * block + j / 4, from) >> (8 * (j % 4))) & 0xffu;  // ddccbbaa
            const Fours pairs = (four | four << 12) & 0x000f000fu;
            quads[j] = (Bytes)((pairs | pairs << 6) & 0x03030303u);
        }
    }
};

template <>
struct Stored<Q1_0> {
    Rows rows;
    Words<16> words{rows.at(2)};

    void scales(uint8_t* meta) const { put_halves(rows, meta); }
    void codes(int block, int from, Bytes quads[QUADS]) const {
        for (int j = 0; j < QUADS; j++) quads[j] = Bytes{};
        add_bits((Fours)words.at(block, from), 0, quads);
    }
};

// A stored block of four blocks of 32 columns that share eight words. The first of them has the highest bits.
template <>
struct Stored<I2_S> {
    Rows rows;
    Words<32> words{rows};

    void scales(uint8_t*) const {}
    void codes(int block, int from, Bytes quads[QUADS]) const {
        for (int j = 0; j < QUADS; j++) quads[j] = bits_at(words.at(j, from), 6 - 2 * block, 0, 3);
    }
};

// ---- Weights of Hugging Face's folders

// Copies the NBYTES bytes that each row begins with, one row after another, then the byte after them.
template <int NBYTES>
inline void put_scales_and_zeros(const Rows& rows, uint8_t* meta) {
    for (int lane = 0; lane < LANES; lane++) {
        std::memcpy(meta + NBYTES * lane, rows[lane], NBYTES);
        meta[NBYTES * LANES + lane] = rows[lane][NBYTES];
    }
}

inline void put_floats(const Rows& rows, uint8_t* meta) {
    for (int lane = 0; lane < LANES; lane++) std::memcpy(meta + 4 * lane, rows[lane], 4);
}

template <>
struct Stored<AFFINE4> {
    Rows rows;
    Words<16> words{rows.at(3)};

    void scales(uint8_t* meta) const { put_scales_and_zeros<2>(rows, meta); }
    void codes(int, int from, Bytes quads[QUADS]) const { low_high_halves(words, 0, from, quads); }
};

template <>
struct Stored<AFFINE8> {
    Rows rows;
    Words<32> words{rows.at(5)};

    void scales(uint8_t* meta) const { put_scales_and_zeros<4>(rows, meta); }
    void codes(int, int from, Bytes quads[QUADS]) const {
        for (int j = 0; j < QUADS; j++) quads[j] = words.at(j, from);
    }
};

template <>
struct Stored<FP8> {
    Rows rows;
    Words<32> words{rows.at(4)};

    void scales(uint8_t* meta) const { put_floats(rows, meta); }
    void codes(int, int from, Bytes quads[QUADS]) const {
        for (int j = 0; j < QUADS; j++) quads[j] = words.at(j, from);
    }
};

struct StoredFloatNibbles {
    Rows rows;
    Words<16> words{rows.at(4)};

    void scales(uint8_t* meta) const { put_floats(rows, meta); }
    void codes(int, int from, Bytes quads[QUADS]) const { low_high_halves(words, 0, from, quads); }
};

template <>
struct Stored<NVFP4_F32> {
    Rows rows;
    Words<16> words{rows.at(8)};

    void scales(uint8_t* meta) const {
        put_floats(rows, meta);
        put_floats(rows.at(4), meta + 4 * LANES);
    }
    void codes(int, int from, Bytes quads[QUADS]) const { low_high_halves(words, 0, from, quads); }
};

template <> struct Stored<NF4> : StoredFloatNibbles {};
template <> struct Stored<FP4> : StoredFloatNibbles {};

}  // namespace graphcore
