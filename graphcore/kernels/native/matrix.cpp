// Packing, unpacking and multiplying, for every format. Compiled without contraction into fused multiply-adds where
// weights are unpacked: those values are compared bit by bit with ggml's.
#include "matrix.h"

namespace graphcore {
namespace {

template <class F>
void pack_group(const uint8_t* const rows[LANES], int columns, uint8_t* group) {
    uint8_t* to = const_cast<uint8_t*>(codes_of<F>(group, columns));
    alignas(64) uint8_t codes[LANES][F::COLUMNS];
    for (int stored = 0; stored < columns / F::COLUMNS; stored++) {
        for (int lane = 0; lane < LANES; lane++)
            F::read(rows[lane] + size_t(stored) * F::RAW_NBYTES, lane, group + size_t(stored) * F::META_NBYTES, codes[lane]);
        for (int block = 0; block < F::COLUMNS / BLOCK_COLUMNS; block++) {
            u8x64 quads[QUADS];
            for (int j = 0; j < QUADS; j++) {
                uint8_t four[VECTOR_NBYTES];
                for (int lane = 0; lane < LANES; lane++)
                    std::memcpy(four + 4 * lane, codes[lane] + BLOCK_COLUMNS * block + 4 * j, 4);
                quads[j] = load<u8x64>(four);
            }
            Codes<F::BITS>::pack(quads, to);
            to += Codes<F::BITS>::NBYTES;
        }
    }
}

// Columns 32 * block .. + 31 of one row, as float32.
template <class F>
inline void unpack_part(const uint8_t tile[QUADS][VECTOR_NBYTES], int lane, const f32x16* scales, const f32x16* minimums, float scale, f32x16 out[2]) {
    for (int half = 0; half < 2; half++) {
        uint8_t sixteen[LANES];
        for (int j = 0; j < 4; j++) std::memcpy(sixteen + 4 * j, tile[4 * half + j] + 4 * lane, 4);
        const i32x16 values = __builtin_convertvector(load<u8x16>(sixteen), i32x16) - F::OFFSET;
        const int part = F::HALVES ? half : 0;
        f32x16 weights = to_float(values) * splat(F::ONE_SCALE ? scale : scales[part][lane]);
        if constexpr (F::HAS_MINIMUM) weights += splat(minimums[part][lane]);
        out[half] = weights;
    }
}

template <class F>
inline void load_block(const uint8_t* group, int columns, int block, uint8_t tile[QUADS][VECTOR_NBYTES], f32x16 scales[2], f32x16 minimums[2]) {
    u8x64 quads[QUADS];
    expand_values<F>(codes_of<F>(group, columns) + size_t(block) * Codes<F::BITS>::NBYTES, quads);
    for (int j = 0; j < QUADS; j++) store(tile[j], quads[j]);
    int part;
    const uint8_t* meta = meta_of<F>(group, block, part);
    for (int half = 0; half < (F::HALVES ? 2 : 1); half++)
        scales[half] = F::scale(meta, part + half), minimums[half] = F::minimum(meta, part + half);
}

inline void store_narrow(int target, f32x16 values, uint8_t* row, int column) {
    if (target == F32) return store(row + 4 * column, values);
#if defined(__AVX512BF16__)
    if (target == BF16) {
        const __m256bh narrow = _mm512_cvtneps_pbh((__m512)values);
        std::memcpy(row + 2 * column, &narrow, 32);
        return;
    }
#endif
    for (int lane = 0; lane < LANES; lane++) {
        const uint16_t bits = target == BF16 ? float_to_bf16(values[lane]) : float_to_half(values[lane]);
        std::memcpy(row + 2 * (column + lane), &bits, 2);
    }
}

template <class F>
void unpack_group(const uint8_t* group, int columns, float scale, int rows, int target, uint8_t* to) {
    const size_t row_nbytes = size_t(columns) * (target == F32 ? 4 : 2);
    for (int block = 0; block < columns / BLOCK_COLUMNS; block++) {
        alignas(64) uint8_t tile[QUADS][VECTOR_NBYTES];
        f32x16 scales[2], minimums[2];
        load_block<F>(group, columns, block, tile, scales, minimums);
        for (int lane = 0; lane < rows; lane++) {
            f32x16 weights[2];
            unpack_part<F>(tile, lane, scales, minimums, scale, weights);
            store_narrow(target, weights[0], to + lane * row_nbytes, BLOCK_COLUMNS * block);
            store_narrow(target, weights[1], to + lane * row_nbytes, BLOCK_COLUMNS * block + LANES);
        }
    }
}

template <class F>
void unpack_row(const uint8_t* group, int columns, float scale, int lane, float* to) {
    for (int block = 0; block < columns / BLOCK_COLUMNS; block++) {
        alignas(64) uint8_t tile[QUADS][VECTOR_NBYTES];
        f32x16 scales[2], minimums[2], weights[2];
        load_block<F>(group, columns, block, tile, scales, minimums);
        unpack_part<F>(tile, lane, scales, minimums, scale, weights);
        store(to + BLOCK_COLUMNS * block, weights[0]);
        store(to + BLOCK_COLUMNS * block + LANES, weights[1]);
    }
}

template <class F>
constexpr FormatOps operations(Multiply multiply) {
    return {group_nbytes<F>, multiply, pack_group<F>, unpack_group<F>, unpack_row<F>, F::COLUMNS, F::RAW_NBYTES};
}

}  // namespace

// One per format, in products_*.cpp, where contraction is welcome.
#define GRAPHCORE_FORMATS(X)                                                                                    \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(Iq4Nl) X(Iq4Xs) X(Tq2_0) \
    X(Mxfp4) X(Nvfp4) X(Q1_0) X(Q2_0) X(I2_S)
#define GRAPHCORE_DECLARE(F) \
    void multiply_##F(const uint8_t*, int, const Activations&, int, int, f32x16*);
GRAPHCORE_FORMATS(GRAPHCORE_DECLARE)

const FormatOps& format_ops(int format) {
#define GRAPHCORE_ENTRY(F) operations<F>(multiply_##F),
    static const FormatOps table[] = {GRAPHCORE_FORMATS(GRAPHCORE_ENTRY)};
    return table[format - DENSE_FORMATS];
}

}  // namespace graphcore
