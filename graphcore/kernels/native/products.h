// Sixteen rows of a packed matrix times the activations of one or several tokens.
//
// With rounded activations (Rounding::PER_BLOCK) the products of a block are whole numbers and exact; the relative RMS
// error is that of the rounding, below 1 %. With float activations every weight is widened to float32, and the error is
// that of float32 sums over 32 columns, then over blocks: below 1e-6.
#pragma once

#include "activations.h"
#include "formats.h"

namespace graphcore {

// A group's memory is one stream: chunks of eight blocks, each its scales and then its codes. The last may be shorter.
constexpr int CHUNK_BLOCKS = 8;
constexpr int CHUNK_COLUMNS = CHUNK_BLOCKS * BLOCK_COLUMNS;

template <class F>
constexpr int meta_nbytes(int blocks) {
    return (blocks * BLOCK_COLUMNS / F::COLUMNS * F::META_NBYTES + VECTOR_NBYTES - 1) / VECTOR_NBYTES * VECTOR_NBYTES;
}

template <class F>
constexpr int chunk_nbytes(int blocks) { return meta_nbytes<F>(blocks) + blocks * Codes<F::BITS>::NBYTES; }

template <class F>
constexpr size_t group_nbytes(int columns) {
    const int blocks = columns / BLOCK_COLUMNS;
    return size_t(blocks / CHUNK_BLOCKS) * chunk_nbytes<F>(CHUNK_BLOCKS) + chunk_nbytes<F>(blocks % CHUNK_BLOCKS);
}

// Some blocks of a group: where their scales and codes begin.
template <class F>
struct Stretch {
    const uint8_t *meta, *codes;
    int first, blocks;

    Stretch(const uint8_t* group, int columns, int chunk) : first(chunk * CHUNK_BLOCKS) {
        const int rest = columns / BLOCK_COLUMNS - first;
        blocks = rest < CHUNK_BLOCKS ? rest : CHUNK_BLOCKS;
        meta = group + size_t(chunk) * chunk_nbytes<F>(CHUNK_BLOCKS);
        codes = meta + meta_nbytes<F>(blocks);
    }

    const uint8_t* codes_of(int within) const { return codes + size_t(within) * Codes<F::BITS>::NBYTES; }
    // the stored block's scales, and which of its parts this block begins with
    const uint8_t* meta_of(int within) const { return meta + size_t(within * BLOCK_COLUMNS / F::COLUMNS) * F::META_NBYTES; }
    static constexpr int part_of(int within) { return within % (F::COLUMNS / BLOCK_COLUMNS) * (F::HALVES ? 2 : 1); }
};

inline int num_chunks(int columns) { return (columns + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS; }

template <class F>
inline void expand_values(const uint8_t* codes, u8x64 quads[QUADS]) {
    Codes<F::BITS>::expand(codes, quads);
    if constexpr (F::HAS_TABLE)
        for (int j = 0; j < QUADS; j++) quads[j] = lookup16(F::table(), quads[j]);
}

// Has the cache fetch what lies PREFETCH_NBYTES on; a thread's groups are one run of memory, so that this is what it reads
// next. The hardware's own prefetcher starts anew at each of a layer's small matrices and reaches half of the bandwidth.
constexpr int PREFETCH_NBYTES = 4096;

template <class F>
inline void prefetch_block(const uint8_t* chunk, int within) {
    constexpr int STRIDE = chunk_nbytes<F>(CHUNK_BLOCKS) / CHUNK_BLOCKS;
    const uint8_t* ahead = chunk + size_t(within) * STRIDE + PREFETCH_NBYTES;
    for (int line = 0; line < STRIDE; line += VECTOR_NBYTES) __builtin_prefetch(ahead + line);
}

inline int32_t four_at(const int8_t* q) { return load<int32_t>(q); }

// What is added for each unit of sum(x): codes are unsigned, values are not.
template <class F>
inline f32x16 correction(const uint8_t* meta, int part, f32x16 scale) {
    f32x16 per_unit = F::OFFSET ? scale * splat(-float(F::OFFSET)) : f32x16{};
    if constexpr (F::HAS_MINIMUM) per_unit += F::minimum(meta, part);
    return per_unit;
}

// One block of 16 rows x 32 columns, widened once and multiplied with several tokens.
template <class F, int TOKENS, bool WIDE>
__attribute__((always_inline)) inline void multiply_block(const uint8_t* codes, const uint8_t* meta, int part, int block, const Activations& x, int first, f32x16* sums) {
    u8x64 quads[QUADS];
    expand_values<F>(codes, quads);
    f32x16 scales[2], corrections[2];
    for (int half = 0; half < (F::HALVES ? 2 : 1); half++) {
        scales[half] = F::scale(meta, part + half);
        corrections[half] = correction<F>(meta, part + half, scales[half]);
    }
    const size_t blocks = x.columns / BLOCK_COLUMNS;
#pragma GCC unroll 16
    for (int t = 0; t < TOKENS; t++) {
        const size_t index = (first + t) * blocks + block;
        const int8_t* q = x.q + index * BLOCK_COLUMNS;
        i32x16 left{}, right{};
        for (int j = 0; j < QUADS; j++)
            (F::HALVES && j >= 4 ? right : left) = dot4(F::HALVES && j >= 4 ? right : left, quads[j], four_at(q + 4 * j));
        if constexpr (WIDE) {
            const int8_t* low = x.low + index * BLOCK_COLUMNS;
            left <<= 8, right <<= 8;
            for (int j = 0; j < QUADS; j++)
                (F::HALVES && j >= 4 ? right : left) = dot4(F::HALVES && j >= 4 ? right : left, quads[j], four_at(low + 4 * j));
        }
        f32x16 product = to_float(left) * scales[0];
        if constexpr (F::HALVES) {
            product += to_float(right) * scales[1];
            sums[t] += corrections[0] * splat(x.half_q_sums[2 * index]);
            sums[t] += corrections[1] * splat(x.half_q_sums[2 * index + 1]);
        } else if constexpr (F::OFFSET || F::HAS_MINIMUM) {
            sums[t] += corrections[0] * splat(x.q_sums[index]);
        }
        sums[t] += product * splat(x.scales[index]);
    }
}

template <class F, int TOKENS, bool WIDE>
inline void multiply_rounded(const uint8_t* group, int columns, const Activations& x, int first, f32x16* totals) {
    f32x16 sums[TOKENS] = {};
    for (int chunk = 0; chunk < num_chunks(columns); chunk++) {
        const Stretch<F> here(group, columns, chunk);
#if defined(__AVX512F__)  // else it takes the compiler a minute
#pragma GCC unroll 8
#endif
        for (int within = 0; within < CHUNK_BLOCKS; within++) {
            if (within >= here.blocks) break;
            if (TOKENS == 1) prefetch_block<F>(here.meta, within);
            multiply_block<F, TOKENS, WIDE>(
                here.codes_of(within), here.meta_of(within), here.part_of(within), here.first + within, x, first, sums);
        }
    }
    for (int t = 0; t < TOKENS; t++) totals[t] = sums[t];
}

// Ternary codes and one scale per row of activations: whole numbers to the end. Codes are multiplied where they stand
// in their bytes (0, 2, 4 or 6 bits up) and the four sums are shifted back once.
template <class F>
inline f32x16 multiply_ternary(const uint8_t* group, int columns, const Activations& x, int row) {
    static_assert(F::META_NBYTES == 0, "codes lie one after another");
    const int8_t* q = x.q_row(row);
    i32x16 sums[2][4] = {};
    for (int block = 0; block < columns / BLOCK_COLUMNS; block++) {
        const uint8_t* codes = group + size_t(block) * Codes<2>::NBYTES;
        for (int h = 0; h < 2; h++) {
            const u8x64 bits = load<u8x64>(codes + h * VECTOR_NBYTES);
            __builtin_prefetch(codes + h * VECTOR_NBYTES + PREFETCH_NBYTES);
            for (int s = 0; s < 4; s++)
                sums[h][s] = dot4(sums[h][s], bits & splat_byte(uint8_t(3 << 2 * s)), four_at(q + 32 * block + 16 * h + 4 * s));
        }
    }
    i32x16 total = splat_int(-F::OFFSET * x.token_sums[row]);
    for (int s = 0; s < 4; s++) total += (sums[0][s] >> (2 * s)) + (sums[1][s] >> (2 * s));
    return to_float(total) * splat(x.scales[size_t(row) * columns / 32]);
}

template <class F, int TOKENS>
inline void multiply_float(const uint8_t* group, int columns, const Activations& x, int first, f32x16* totals) {
    // affine codes are centred, so that scale * code and the minimum do not cancel
    constexpr int CENTRE = F::HAS_MINIMUM ? 1 << (F::BITS - 1) : F::OFFSET;
    for (int t = 0; t < TOKENS; t++) totals[t] = f32x16{};
    for (int block = 0; block < columns / BLOCK_COLUMNS; block++) {
        const Stretch<F> here(group, columns, block / CHUNK_BLOCKS);
        const int within = block % CHUNK_BLOCKS, part = here.part_of(within);
        const uint8_t* meta = here.meta_of(within);
        u8x64 quads[QUADS];
        expand_values<F>(here.codes_of(within), quads);
        for (int half = 0; half < 2; half++) {
            f32x16 sums[TOKENS] = {};
            for (int j = 4 * half; j < 4 * half + 4; j++)
                for (int c = 0; c < 4; c++) {
                    const f32x16 weight = to_float((((i32x16)quads[j] >> (8 * c)) & 255) - CENTRE);
                    for (int t = 0; t < TOKENS; t++) sums[t] += weight * splat(x.x_row(first + t)[32 * block + 4 * j + c]);
                }
            const f32x16 scale = F::scale(meta, part + (F::HALVES ? half : 0));
            f32x16 minimum = F::minimum(meta, part + (F::HALVES ? half : 0));
            if constexpr (F::HAS_MINIMUM) minimum += splat(float(CENTRE)) * scale;
            for (int t = 0; t < TOKENS; t++) {
                totals[t] += scale * sums[t];
                if constexpr (F::HAS_MINIMUM)
                    totals[t] += minimum * splat(x.half_sums[size_t(first + t) * columns / 16 + 2 * block + half]);
            }
        }
    }
}

// ---- dense rows, as torch has them: [rows, columns], one after another

inline f32x16 widen(const float* from) { return load<f32x16>(from); }
struct Bf16 {
    uint16_t bits;
};
struct Fp16 {
    uint16_t bits;
};
inline f32x16 widen(const Bf16* from) { return bf16_to_float((const uint16_t*)from); }
inline f32x16 widen(const Fp16* from) { return halves_to_float((const uint16_t*)from); }
inline float widen_one(const float* from) { return *from; }
inline float widen_one(const Bf16* from) {
    const uint32_t bits = uint32_t(from->bits) << 16;
    return load<float>(&bits);
}
inline float widen_one(const Fp16* from) { return half_to_float(from->bits); }

template <class T>
inline f32x16 multiply_dense(const T* rows, int num_rows, int columns, const float* x) {
    constexpr int WIDTH = 4;  // sums apart, so that one addition need not wait for the last
    f32x16 result{};
    for (int row = 0; row < num_rows; row++) {
        const T* from = rows + size_t(row) * columns;
        f32x16 sums[WIDTH] = {};
        int c = 0;
        for (; c + WIDTH * LANES <= columns; c += WIDTH * LANES) {
            for (size_t line = 0; line < WIDTH * LANES * sizeof(T); line += VECTOR_NBYTES)
                __builtin_prefetch((const uint8_t*)(from + c) + line + PREFETCH_NBYTES);
            for (int i = 0; i < WIDTH; i++) sums[i] += widen(from + c + i * LANES) * load<f32x16>(x + c + i * LANES);
        }
        for (; c + LANES <= columns; c += LANES) sums[0] += widen(from + c) * load<f32x16>(x + c);
        float rest = 0;
        for (; c < columns; c++) rest += widen_one(from + c) * x[c];
        result[row] = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
    }
    return result;
}

}  // namespace graphcore
