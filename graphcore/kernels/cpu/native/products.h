// Products of sixteen rows of a packed matrix and the activations of one or more tokens.
//
// With rounded activations (Rounding::PER_BLOCK) the sum of a block is an exact integer, and the relative RMS error is that of
// the rounding, below 1 %. With float activations every weight is widened to float32, and the relative error is that of
// float32 sums over 32 columns and then over blocks, below 1e-6.
#pragma once

#include "dot.h"
#include "formats.h"

namespace graphcore {

// A group is stored as consecutive chunks of eight blocks. A chunk has the scales of its blocks, then their codes. The last
// chunk may have fewer blocks.
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

// One chunk of a group: pointers to its scales and its codes.
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
    // meta_of: the scales of the stored block that this block belongs to. part_of: the first of its parts in this block.
    const uint8_t* meta_of(int within) const { return meta + size_t(within * BLOCK_COLUMNS / F::COLUMNS) * F::META_NBYTES; }
    static constexpr int part_of(int within) { return within % (F::COLUMNS / BLOCK_COLUMNS) * (F::HALVES ? 2 : 1); }
};

inline int num_chunks(int columns) { return (columns + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS; }

// Returns the values of a quad's codes, before the offset is subtracted.
template <class F>
inline BytePart values_of(const uint8_t* codes, int quad) {
    const BytePart bytes = Codes<F::BITS>::quad(codes, quad);
    if constexpr (F::HAS_TABLE) return lookup16(F::table(), bytes);
    return bytes;
}

template <class F>
inline void expand_values(const uint8_t* codes, BytePart quads[QUADS]) {
    for (int j = 0; j < QUADS; j++) quads[j] = values_of<F>(codes, j);
}

// Distance of software prefetches into L1 ahead of a thread's reads. A thread's groups are contiguous, so it reads these bytes
// next. The hardware prefetcher alone restarts at each of a layer's small matrices and reaches half of the bandwidth.
constexpr int PREFETCH_NBYTES = 4096;

__attribute__((always_inline)) inline void prefetch(const uint8_t* here) { __builtin_prefetch(here + PREFETCH_NBYTES); }

// Prefetches codes of fewer than eight bits. AVX-512 multiplies them faster than L1's few outstanding misses can fetch them, so
// they go to L2.
__attribute__((always_inline)) inline void prefetch_codes(const uint8_t* here) {
#if defined(__AVX512F__)
    __builtin_prefetch(here + 2 * PREFETCH_NBYTES, 0, 2);
#else
    prefetch(here);
#endif
}

// Always inlined: GCC removes calls of functions that only prefetch, because these have no side effects.
template <class F>
__attribute__((always_inline)) inline void prefetch_block(const uint8_t* chunk, int within) {
    constexpr int STRIDE = chunk_nbytes<F>(CHUNK_BLOCKS) / CHUNK_BLOCKS;
    const uint8_t* here = chunk + size_t(within) * STRIDE;
    for (int line = 0; line < STRIDE; line += VECTOR_NBYTES) F::BITS < 8 ? prefetch_codes(here + line) : prefetch(here + line);
}

// Returns the factor of sum(x) in a row's sum, which subtracts the offset of the unsigned codes and adds the minimum.
template <class F>
inline FloatPart correction(const uint8_t* meta, int part, int lane, FloatPart scale) {
    FloatPart per_unit = F::OFFSET ? scale * splat(-float(F::OFFSET)) : FloatPart{};
    if constexpr (F::HAS_MINIMUM) per_unit += F::minimum(meta, part, lane);
    return per_unit;
}

// Returns weights from codes. Unpacked weights are ggml's to the bit only in sources without contraction (compiler.py).
// shift: result of shift_of.
template <class F>
__attribute__((always_inline)) inline FloatPart weights_of(IntPart codes, FloatPart scale, FloatPart shift) {
    if constexpr (F::HAS_FLOATS) return F::level(codes) * scale;
    if constexpr (F::HAS_ZERO) return (to_float(codes) - shift) * scale;
    const FloatPart weights = to_float(codes - F::OFFSET) * scale;
    if constexpr (F::HAS_MINIMUM) return weights + shift;
    return weights;
}

// Returns the shifts of a part's weights: zero points, which are subtracted from codes, or minimums, which are added to products of
// code and scale, or zeros if the format has neither.
template <class F>
inline FloatPart shift_of(const uint8_t* meta, int part, int lane) {
    if constexpr (F::HAS_ZERO) return F::zero(meta, part, lane);
    return F::minimum(meta, part, lane);
}

template <class F>
constexpr bool HAS_CORRECTION = F::HALVES || F::OFFSET || F::HAS_MINIMUM;

// Returns a row's sum with one more block. product: of codes and whole numbers of x, times the scales of the codes.
// first, second: the corrections of the block's halves, or the first of the whole block.  index: of the block in x.
template <bool HALVES, bool CORRECTS>
__attribute__((always_inline)) inline FloatPart with_block(FloatPart sum, FloatPart product, FloatPart first, FloatPart second, const Activations& x, size_t index) {
    if constexpr (HALVES) {
        sum += first * splat(x.half_q_sums[2 * index]);
        sum += second * splat(x.half_q_sums[2 * index + 1]);
    } else if constexpr (CORRECTS) {
        sum += first * splat(x.q_sums[index]);
    }
    return sum + product * splat(x.scales[index]);
}

// Multiplies one block of 32 columns with several tokens, for the rows of one register, which begin at `lane`. Codes are
// widened once for all tokens.
template <class F, int TOKENS, bool WIDE>
__attribute__((always_inline)) inline void multiply_block(const uint8_t* codes, const uint8_t* meta, int part, int lane, int block, const Activations& x, const size_t (&firsts)[TOKENS], FloatPart (*sums)[PARTS]) {
#if GRAPHCORE_AVX2
    asm volatile("" ::: "memory");  // otherwise GCC spills the values of x that it has read for the next part
#endif
    // AVX2 has too few registers for all quads. For a single token each quad is expanded when it is needed.
    constexpr bool IS_EXPANDED = TOKENS > 1 || PARTS == 1;
    BytePart quads[QUADS];
    if constexpr (IS_EXPANDED) expand_values<F>(codes + 4 * lane, quads);
    const auto values = [&](int j) {
        if constexpr (IS_EXPANDED) return quads[j];
        else return values_of<F>(codes + 4 * lane, j);
    };
    FloatPart scales[2], corrections[2] = {};
    for (int half = 0; half < (F::HALVES ? 2 : 1); half++) {
        scales[half] = F::scale(meta, part + half, lane);
        corrections[half] = correction<F>(meta, part + half, lane, scales[half]);
    }
#pragma GCC unroll 16
    for (int t = 0; t < TOKENS; t++) {
        const size_t index = firsts[t] + block, at = index * BLOCK_COLUMNS;
        FloatPart& sum = sums[t][lane / PART_LANES];
        FloatPart product = to_float(dot_quads<F::LARGEST, WIDE>(values, 0, F::HALVES ? QUADS / 2 : QUADS, x, at)) * scales[0];
        if constexpr (F::HALVES)
            product += to_float(dot_quads<F::LARGEST, WIDE>(values, QUADS / 2, QUADS, x, at)) * scales[1];
        sum = with_block<F::HALVES, HAS_CORRECTION<F>>(sum, product, corrections[0], corrections[1], x, index);
    }
}

template <class F, int TOKENS, bool WIDE>
inline void multiply_rounded(const uint8_t* group, int columns, const Activations& x, const int* rows, f32x16* totals) {
    FloatPart sums[TOKENS][PARTS] = {};
    size_t firsts[TOKENS];  // index of each row's first block
    for (int t = 0; t < TOKENS; t++) firsts[t] = size_t(rows[t]) * (x.columns / BLOCK_COLUMNS);
    for (int chunk = 0; chunk < num_chunks(columns); chunk++) {
        const Stretch<F> here(group, columns, chunk);
        const auto add_block = [&](int within) __attribute__((always_inline)) {
            prefetch_block<F>(here.meta, within);
#pragma GCC unroll 2
            for (int lane = 0; lane < LANES; lane += PART_LANES)
                multiply_block<F, TOKENS, WIDE>(
                    here.codes_of(within), here.meta_of(within), here.part_of(within), lane, here.first + within, x, firsts, sums);
        };
        if constexpr (TOKENS <= 2) {
#if defined(__AVX512F__)  // with other instruction sets the compiler would need a minute
#pragma GCC unroll 8
#endif
            for (int within = 0; within < CHUNK_BLOCKS; within++) {
                if (within >= here.blocks) break;
                add_block(within);
            }
        } else {
            for (int within = 0; within < here.blocks; within++) add_block(within);
        }
    }
    for (int t = 0; t < TOKENS; t++) std::memcpy(totals + t, sums[t], sizeof(f32x16));
}

#if GRAPHCORE_AVX2
// Multiplies ternary codes with activations that have one scale for each row. Sums stay integers until the end.
template <class F>
inline f32x16 multiply_ternary(const uint8_t* group, int columns, const Activations& x, int row) {
    static_assert(F::META_NBYTES == 0, "codes lie one after another");
    IntPart sums[PARTS] = {};
    for (int block = 0; block < columns / BLOCK_COLUMNS; block++) {
        const uint8_t* codes = group + size_t(block) * Codes<2>::NBYTES;
        for (int h = 0; h < 2; h++) prefetch_codes(codes + h * VECTOR_NBYTES);
        for (int part = 0; part < PARTS; part++) {
            const auto values = [&](int j) { return Codes<2>::quad(codes + 4 * PART_LANES * part, j); };
            sums[part] += dot_quads<F::LARGEST, false>(values, 0, QUADS, x, size_t(row) * columns + size_t(block) * BLOCK_COLUMNS);
        }
    }
    const IntPart offset = splat_int(F::OFFSET * x.token_sums[row]);
    const FloatPart scale = splat(x.scales[size_t(row) * columns / 32]);
    return by_parts([&](int lane) { return to_float(sums[lane / PART_LANES] - offset) * scale; });
}
#else
// Multiplies ternary codes without shifting them: each is multiplied at its place in the byte (0, 2, 4 or 6 bits up), and the
// four sums are shifted back once.
template <class F>
inline f32x16 multiply_ternary(const uint8_t* group, int columns, const Activations& x, int row) {
    static_assert(F::META_NBYTES == 0, "codes lie one after another");
    const int8_t* q = x.q_row(row);
    IntPart sums[2][4] = {};
    for (int block = 0; block < columns / BLOCK_COLUMNS; block++) {
        const uint8_t* codes = group + size_t(block) * Codes<2>::NBYTES;
        for (int h = 0; h < 2; h++) {
            const BytePart bits = load<BytePart>(codes + h * VECTOR_NBYTES);
            prefetch_codes(codes + h * VECTOR_NBYTES);
            for (int s = 0; s < 4; s++)
                sums[h][s] = dot4(sums[h][s], bits & splat_byte(uint8_t(3 << 2 * s)), four_at(q + 32 * block + 16 * h + 4 * s));
        }
    }
    IntPart total = splat_int(-F::OFFSET * x.token_sums[row]);
    for (int s = 0; s < 4; s++) total += (sums[0][s] >> (2 * s)) + (sums[1][s] >> (2 * s));
    return to_float(total) * splat(x.scales[size_t(row) * columns / 32]);
}
#endif

template <class F, int TOKENS>
inline void multiply_float(const uint8_t* group, int columns, const Activations& x, const int* rows, f32x16* totals) {
    // Codes with a minimum are centred, so that scale * code and the minimum do not cancel each other.
    constexpr int CENTRE = F::HAS_MINIMUM ? 1 << (F::BITS - 1) : F::OFFSET;
    FloatPart all[TOKENS][PARTS] = {};
    for (int block = 0; block < columns / BLOCK_COLUMNS; block++)
        for (int lane = 0; lane < LANES; lane += PART_LANES) {
            const Stretch<F> here(group, columns, block / CHUNK_BLOCKS);
            const int within = block % CHUNK_BLOCKS, part = here.part_of(within);
            const uint8_t* meta = here.meta_of(within);
            BytePart quads[QUADS];
            expand_values<F>(here.codes_of(within) + 4 * lane, quads);
            for (int half = 0; half < 2; half++) {
                FloatPart sums[TOKENS] = {};
                for (int j = 4 * half; j < 4 * half + 4; j++)
                    for (int c = 0; c < 4; c++) {
                        const FloatPart weight = to_float((((IntPart)quads[j] >> (8 * c)) & 255) - CENTRE);
                        for (int t = 0; t < TOKENS; t++) sums[t] += weight * splat(x.x_row(rows[t])[32 * block + 4 * j + c]);
                    }
                const FloatPart scale = F::scale(meta, part + (F::HALVES ? half : 0), lane);
                FloatPart minimum = F::minimum(meta, part + (F::HALVES ? half : 0), lane);
                if constexpr (F::HAS_MINIMUM) minimum += splat(float(CENTRE)) * scale;
                for (int t = 0; t < TOKENS; t++) {
                    FloatPart& total = all[t][lane / PART_LANES];
                    total += scale * sums[t];
                    if constexpr (F::HAS_MINIMUM)
                        total += minimum * splat(x.half_sums[size_t(rows[t]) * columns / 16 + 2 * block + half]);
                }
            }
        }
    for (int t = 0; t < TOKENS; t++) std::memcpy(totals + t, all[t], sizeof(f32x16));
}

}  // namespace graphcore
