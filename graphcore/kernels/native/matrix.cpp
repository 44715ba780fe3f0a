// Unpacking, and what can be done with each format. Compiled without contraction into fused multiply-adds where
// weights are unpacked: those values are compared bit by bit with ggml's.
#include "matrix.h"

namespace graphcore {
namespace {

// Row r's four columns of each quad stand in lane r of eight vectors; side by side in the result: rows[i] holds the 32
// codes of row i, then those of row i + 8.
inline void gather_rows(const u8x64 quads[QUADS], u8x64 rows[QUADS]) {
    i32x16 pairs[QUADS], fours[QUADS];
    for (int j = 0; j < 4; j++) {  // lanes 0 1 4 5 8 9 12 13 and the others, of quads j and j + 4, interleaved
        const i32x16 a = (i32x16)quads[j], b = (i32x16)quads[j + 4];
        pairs[2 * j] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
        pairs[2 * j + 1] = __builtin_shufflevector(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int part = 0; part < 2; part++)
        for (int j = 0; j < 2; j++) {  // quads j, j + 2, j + 4, j + 6 of a row together
            const i32x16 a = pairs[2 * j + part], b = pairs[2 * (j + 2) + part];
            fours[4 * part + 2 * j] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
            fours[4 * part + 2 * j + 1] = __builtin_shufflevector(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
        }
    for (int part = 0; part < 2; part++)
        for (int half = 0; half < 2; half++) {
            const i32x16 a = fours[4 * part + half], b = fours[4 * part + 2 + half];
            rows[4 * part + 2 * half] = (u8x64)__builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
            rows[4 * part + 2 * half + 1] = (u8x64)__builtin_shufflevector(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
        }
}

// One block of the group, row by row: 32 codes each, and the rows' scales.
template <class F>
struct Block {
    alignas(64) uint8_t codes[LANES][BLOCK_COLUMNS];
    alignas(64) float scales[2][LANES], minimums[2][LANES];

    Block(const uint8_t* group, int columns, int block) {
        const Stretch<F> here(group, columns, block / CHUNK_BLOCKS);
        const int within = block % CHUNK_BLOCKS, part = here.part_of(within);
        u8x64 quads[QUADS], rows[QUADS];
        expand_values<F>(here.codes_of(within), quads);
        gather_rows(quads, rows);
        for (int i = 0; i < QUADS; i++) {
            std::memcpy(codes[i], &rows[i], BLOCK_COLUMNS);
            std::memcpy(codes[i + 8], (const uint8_t*)&rows[i] + BLOCK_COLUMNS, BLOCK_COLUMNS);
        }
        const uint8_t* meta = here.meta_of(within);
        for (int half = 0; half < (F::HALVES ? 2 : 1); half++) {
            store(scales[half], F::scale(meta, part + half));
            if constexpr (F::HAS_MINIMUM) store(minimums[half], F::minimum(meta, part + half));
        }
    }

    // Columns 16 * half .. + 15 of a row.
    f32x16 weights(int lane, int half, float scale) const {
        const i32x16 values = widen_bytes(codes[lane] + LANES * half) - F::OFFSET;
        const int part = F::HALVES ? half : 0;
        f32x16 result = to_float(values) * splat(F::ONE_SCALE ? scale : scales[part][lane]);
        if constexpr (F::HAS_MINIMUM) result += splat(minimums[part][lane]);
        return result;
    }
};

inline void store_narrow(int target, f32x16 values, uint8_t* row, int column) {
    if (target == F32) return store(row + 4 * column, values);
#if defined(__AVX512BF16__)
    constexpr int SUBNORMAL = 0x20;  // the instruction takes them for zero: MXFP4's smallest scales are some
    if (target == BF16 && !_mm512_fpclass_ps_mask((__m512)values, SUBNORMAL)) {
        _mm256_storeu_si256((__m256i*)(row + 2 * column), (__m256i)_mm512_cvtneps_pbh((__m512)values));
        return;
    }
#endif
#if defined(__AVX512F__)
    if (target == BF16) {
        const u32x16 bits = (u32x16)values, high = bits >> 16;
        const u32x16 rounded = (bits + 0x7fffu + (high & 1)) >> 16;
        const u32x16 kept = (bits & 0x7fffffffu) > 0x7f800000u ? high | 0x40u : rounded;  // NaN stays NaN
        _mm256_storeu_si256((__m256i*)(row + 2 * column), _mm512_cvtepi32_epi16((__m512i)kept));
        return;
    }
#endif
    for (int lane = 0; lane < LANES; lane++) {
        const uint16_t bits = target == BF16 ? float_to_bf16(values[lane]) : float_to_half(values[lane]);
        std::memcpy(row + 2 * (column + lane), &bits, 2);
    }
}

template <class F, int TARGET>
void unpack_group_as(const uint8_t* group, int columns, float scale, int rows, uint8_t* to) {
    const size_t row_nbytes = size_t(columns) * (TARGET == F32 ? 4 : 2);
    for (int block = 0; block < columns / BLOCK_COLUMNS; block++) {
        const Block<F> one(group, columns, block);
        for (int lane = 0; lane < rows; lane++)
            for (int half = 0; half < 2; half++)
                store_narrow(TARGET, one.weights(lane, half, scale), to + lane * row_nbytes, BLOCK_COLUMNS * block + LANES * half);
    }
}

template <class F>
void unpack_group(const uint8_t* group, int columns, float scale, int rows, int target, uint8_t* to) {
    switch (target) {
        case F32: return unpack_group_as<F, F32>(group, columns, scale, rows, to);
        case F16: return unpack_group_as<F, F16>(group, columns, scale, rows, to);
        default: return unpack_group_as<F, BF16>(group, columns, scale, rows, to);
    }
}

template <class F>
void unpack_row(const uint8_t* group, int columns, float scale, int lane, float* to) {
    for (int block = 0; block < columns / BLOCK_COLUMNS; block++) {
        const Block<F> one(group, columns, block);
        for (int half = 0; half < 2; half++) store(to + BLOCK_COLUMNS * block + LANES * half, one.weights(lane, half, scale));
    }
}

template <class F>
constexpr FormatOps operations(Multiply multiply) {
    return {group_nbytes<F>, multiply, pack_group<F>, unpack_group<F>, unpack_row<F>, F::COLUMNS, F::RAW_NBYTES};
}

}  // namespace

// One per format, in products_*.cpp, where contraction is welcome.
#define GRAPHCORE_DECLARE(F) \
    void multiply_##F(const uint8_t*, int, const Activations&, int, int, f32x16*);
GRAPHCORE_FORMATS(GRAPHCORE_DECLARE)

const FormatOps& format_ops(int format) {
#define GRAPHCORE_ENTRY(F) operations<F>(multiply_##F),
    static const FormatOps table[] = {GRAPHCORE_FORMATS(GRAPHCORE_ENTRY)};
    return table[format - DENSE_FORMATS];
}

}  // namespace graphcore
