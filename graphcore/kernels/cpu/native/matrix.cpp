// Unpacking, and the table of operations for each format. This file is compiled without fused multiply-adds (contraction), so
// that unpacked weights are bit-identical to ggml's.
#include "matrix.h"

namespace graphcore {
namespace {

typedef uint8_t RowCodes[BLOCK_COLUMNS];

// Transposes eight quads. Lane r of quads[j] has columns 4j .. 4j+3 of row r; afterwards rows[r] has all 32 in order.
#if GRAPHCORE_AVX2
inline IntPart interleave_low(IntPart a, IntPart b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13); }
inline IntPart interleave_high(IntPart a, IntPart b) { return __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15); }

inline void gather_rows(const BytePart quads[QUADS], RowCodes* rows) {
    IntPart pairs[QUADS], fours[QUADS];
    for (int j = 0; j < 4; j++) {  // interleaves lanes 0 1 4 5, and lanes 2 3 6 7, of quads j and j + 4
        pairs[2 * j] = interleave_low((IntPart)quads[j], (IntPart)quads[j + 4]);
        pairs[2 * j + 1] = interleave_high((IntPart)quads[j], (IntPart)quads[j + 4]);
    }
    for (int part = 0; part < 2; part++)
        for (int j = 0; j < 2; j++) {  // quads j, j + 2, j + 4, j + 6 of a row together
            fours[4 * part + 2 * j] = interleave_low(pairs[2 * j + part], pairs[2 * (j + 2) + part]);
            fours[4 * part + 2 * j + 1] = interleave_high(pairs[2 * j + part], pairs[2 * (j + 2) + part]);
        }
    for (int i = 0; i < 4; i++) {
        const IntPart a = fours[i / 2 * 4 + i % 2], b = fours[i / 2 * 4 + i % 2 + 2];
        const IntPart first = interleave_low(a, b), second = interleave_high(a, b);  // sixteen columns of rows i and i + 4
        store(rows[i], __builtin_shufflevector(first, second, 0, 1, 2, 3, 8, 9, 10, 11));
        store(rows[i + 4], __builtin_shufflevector(first, second, 4, 5, 6, 7, 12, 13, 14, 15));
    }
}
#else
inline void gather_rows(const BytePart quads[QUADS], RowCodes* rows) {
    i32x16 pairs[QUADS], fours[QUADS];
    for (int j = 0; j < 4; j++) {  // interleaves lanes 0 1 4 5 8 9 12 13, and the other lanes, of quads j and j + 4
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
            const int row = 4 * part + 2 * half;  // each result has the codes of this row, then those of row + 8
            const auto put = [&](int row, i32x16 both) {
                std::memcpy(rows[row], &both, BLOCK_COLUMNS);
                std::memcpy(rows[row + 8], (const uint8_t*)&both + BLOCK_COLUMNS, BLOCK_COLUMNS);
            };
            put(row, __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27));
            put(row + 1, __builtin_shufflevector(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31));
        }
}
#endif

// One block of a group, row by row: 32 codes of each row, and the rows' scales.
template <class F>
struct Block {
    alignas(64) RowCodes codes[LANES];
    alignas(64) float scales[2][LANES], shifts[2][LANES];

    Block(const uint8_t* group, int columns, int block) {
        const Stretch<F> here(group, columns, block / CHUNK_BLOCKS);
        const int within = block % CHUNK_BLOCKS, part = here.part_of(within);
        for (int lane = 0; lane < LANES; lane += PART_LANES) {
            BytePart quads[QUADS];
            expand_values<F>(here.codes_of(within) + 4 * lane, quads);
            gather_rows(quads, codes + lane);
        }
        const uint8_t* meta = here.meta_of(within);
        for (int half = 0; half < (F::HALVES ? 2 : 1); half++)
            for (int lane = 0; lane < LANES; lane += PART_LANES) {
                store(scales[half] + lane, F::scale(meta, part + half, lane));
                if constexpr (F::HAS_MINIMUM) store(shifts[half] + lane, shift_of<F>(meta, part + half, lane));
            }
    }

    // Returns the weights of columns column .. column + PART_LANES - 1 of row `lane`.
    FloatPart weights(int lane, int column, float scale) const {
        const int part = F::HALVES ? column / 16 : 0;
        const FloatPart shift = F::HAS_MINIMUM ? splat(shifts[part][lane]) : FloatPart{};
        return weights_of<F>(widen_bytes(codes[lane] + column), splat(F::ONE_SCALE ? scale : scales[part][lane]), shift);
    }
};

inline void store_narrow(int target, FloatPart values, uint8_t* row, int column) {
    if (target == F32) return store(row + 4 * column, values);
#if defined(__AVX512BF16__)
    constexpr int SUBNORMAL = 0x20;  // a class of numbers that the instruction turns to zero, such as MXFP4's smallest scales
    if (target == BF16 && !_mm512_fpclass_ps_mask((__m512)values, SUBNORMAL)) {
        _mm256_storeu_si256((__m256i*)(row + 2 * column), (__m256i)_mm512_cvtneps_pbh((__m512)values));
        return;
    }
#endif
    if (target == BF16) return store_halves(row + 2 * column, bf16_bits(values));
#if GRAPHCORE_AVX2 && defined(__F16C__)
    return store(row + 2 * column, _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT));
#endif
    for (int lane = 0; lane < PART_LANES; lane++) {
        const uint16_t bits = float_to_half(values[lane]);
        std::memcpy(row + 2 * (column + lane), &bits, 2);
    }
}

template <class F, int TARGET>
void unpack_group_as(const uint8_t* group, int columns, float scale, int rows, uint8_t* to) {
    const size_t row_nbytes = size_t(columns) * (TARGET == F32 ? 4 : 2);
    for (int block = 0; block < columns / BLOCK_COLUMNS; block++) {
        const Block<F> one(group, columns, block);
        for (int lane = 0; lane < rows; lane++)
            for (int column = 0; column < BLOCK_COLUMNS; column += PART_LANES)
                store_narrow(TARGET, one.weights(lane, column, scale), to + lane * row_nbytes, BLOCK_COLUMNS * block + column);
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
        for (int column = 0; column < BLOCK_COLUMNS; column += PART_LANES)
            store(to + BLOCK_COLUMNS * block + column, one.weights(lane, column, scale));
    }
}

template <class F>
constexpr FormatOps operations(Multiply multiply) {
    return {group_nbytes<F>, multiply, pack_group<F>, unpack_group<F>, unpack_row<F>, F::COLUMNS, F::RAW_NBYTES};
}

}  // namespace

// One function for each format, defined in products_*.cpp, which are compiled with contraction.
#define GRAPHCORE_DECLARE(F) \
    void multiply_##F(const uint8_t*, int, const Activations&, const int*, int, f32x16*);
GRAPHCORE_FORMATS(GRAPHCORE_DECLARE)

#define GRAPHCORE_CHECK(F) static_assert(F::NUMBER == FORMAT_##F, "a format has the number of its name");
GRAPHCORE_FORMATS(GRAPHCORE_CHECK)

const FormatOps& format_ops(int format) {
#define GRAPHCORE_ENTRY(F) operations<F>(multiply_##F),
    static const FormatOps table[] = {GRAPHCORE_FORMATS(GRAPHCORE_ENTRY)};
    return table[format - DENSE_FORMATS];
}

}  // namespace graphcore
