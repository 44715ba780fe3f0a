// Entries of the KV cache's pages: dense, or multiplied with a Hadamard matrix and quantised to codes.
//
// The entries of one kv head in one page are contiguous: dense ones one after another, quantised ones in planes, each for all
// slots of the page: codes, fifth bits (Q5_0), scales. graphcore/kernels/ops/kv_formats.py defines the sizes and the matrix.
#pragma once

#include "products.h"

namespace graphcore {

constexpr int CACHE_BLOCK = 32;  // numbers that share a scale

constexpr bool is_mixed(int format) { return format >= DENSE_FORMATS; }

// The bytes of each plane for one block of 32 numbers, or for one dense number.
struct PlaneSizes {
    int codes, fifths, scales;
    constexpr int total() const { return codes + fifths + scales; }
};

constexpr PlaneSizes plane_sizes(int format) {
    switch (format) {
        case F32: return {4, 0, 0};
        case F16:
        case BF16: return {2, 0, 0};
        case FORMAT_Q8_0: return {32, 0, 2};
        case FORMAT_Q5_0: return {16, 4, 2};
        default: return {16, 0, 2};  // Q4_0
    }
}

inline int num_units(int format, int head_dim) { return is_mixed(format) ? head_dim / CACHE_BLOCK : head_dim; }
inline size_t entry_nbytes(int format, int head_dim) { return size_t(plane_sizes(format).total()) * num_units(format, head_dim); }

// Returns the size of the Hadamard matrix for heads of a width.
inline int mix_size(int head_dim) { return head_dim & -head_dim; }

// Multiplies each `size` of a head's numbers with the Hadamard matrix, which is its own inverse.
void mix_head(float* x, int count, int size);
inline void mix_head(float* x, int head_dim) { mix_head(x, head_dim, mix_size(head_dim)); }

// The entries of one kv head in one page, or others in the same layout.
struct Entries {
    uint8_t* base;
    int format, head_dim, slots;

    // Calls use(address, bytes) for each plane's part of a slot's entry.
    template <class F>
    void for_each_part(int slot, F use) const {
        const PlaneSizes sizes = plane_sizes(format);
        const size_t units = size_t(num_units(format, head_dim));
        uint8_t* plane = base;
        const int parts[] = {sizes.codes, sizes.fifths, sizes.scales};
        for (const int size : parts) {
            const size_t nbytes = units * size;
            if (nbytes) use(plane + slot * nbytes, nbytes);
            plane += slots * nbytes;
        }
    }

    void put(int slot, float* head) const;             // quantises a head, after mix_head in place if the format is mixed
    void get(int slot, float* head) const;             // dequantises an entry, without undoing mix_head
    void copy(int slot, const Entries& from, int other) const {
        const uint8_t* parts[3];
        int count = 0;
        from.for_each_part(other, [&](const uint8_t* part, size_t) { parts[count++] = part; });
        count = 0;
        for_each_part(slot, [&](uint8_t* part, size_t nbytes) { std::memcpy(part, parts[count++], nbytes); });
    }
};

// Prefetches one entry's share of the next run into L2; null for none. The hardware prefetcher does not follow jumps to another
// page.
inline void fetch_ahead(const uint8_t* next, int index, size_t nbytes) {
    if (!next) return;
    const uint8_t* from = next + size_t(index) * nbytes;
    for (size_t byte = 0; byte < nbytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

// Entries of slots first .. first + count - 1, and a pointer to the run after them in the pages; null for the last.
struct Run {
    Entries entries;
    int first, count;
    const uint8_t* next;

    size_t nbytes() const { return entry_nbytes(entries.format, entries.head_dim); }
};

// ---- Reading entries as vectors. widen<N>(slot, e, parts) reads N parts from feature e of a slot's entry on. Whole blocks are
// fastest; half a block is the minimum.

template <class T>
struct DenseReader {
    static constexpr int FORMAT = F32;  // or another dense one
    static constexpr int UNIT = 1;          // parts that are best read together
    static constexpr bool HAS_REST = true;  // a head may not be a whole number of parts
    const T* first;
    int head_dim;

    explicit DenseReader(const Entries& entries) : first((const T*)entries.base), head_dim(entries.head_dim) {}

    template <int N>
    void widen(int slot, int e, FloatPart* parts) const {
        for (int p = 0; p < N; p++) parts[p] = graphcore::widen(first + size_t(slot) * head_dim + e + p * PART_LANES);
    }
    float one(int slot, int e) const { return widen_one(first + size_t(slot) * head_dim + e); }
};

inline FloatPart splat_half(uint16_t bits) {
#if defined(__AVX512F__)
    return (FloatPart)_mm512_cvtph_ps(_mm256_set1_epi16(short(bits)));
#elif GRAPHCORE_AVX2 && defined(__F16C__)
    return (FloatPart)_mm256_cvtph_ps(_mm_set1_epi16(short(bits)));
#else
    return splat(half_to_float(bits));
#endif
}

inline FloatPart lane_numbers() {
    FloatPart numbers;
    for (int lane = 0; lane < PART_LANES; lane++) numbers[lane] = float(lane);
    return numbers;
}

// The numbers of a block's codes, before they are multiplied with its scale. part(codes, fifths, e): the part that begins with
// number e of the block.
template <int FORMAT>
struct Block;

template <>
struct Block<FORMAT_Q8_0> {
    static FloatPart part(const uint8_t* codes, const uint8_t*, int e) { return to_float(widen_signed_bytes(codes + e)); }
};

// Numbers 0 .. 15 are in the low nibbles of a block's bytes, 16 .. 31 in the high ones.
inline IntPart nibbles_at(const uint8_t* codes, int e) { return widen_bytes(codes + e % LANES) >> (e / LANES * 4); }

template <>
struct Block<FORMAT_Q4_0> {
    static FloatPart part(const uint8_t* codes, const uint8_t*, int e) {
#if defined(__AVX512F__)
        const __m512 levels = (__m512)(lane_numbers() - splat(8.0f));
        return (FloatPart)_mm512_permutexvar_ps((__m512i)nibbles_at(codes, e), levels);  // which reads four bits of an index
#else
        return to_float((nibbles_at(codes, e) & 15) - 8);
#endif
    }
};

template <>
struct Block<FORMAT_Q5_0> {
    static FloatPart part(const uint8_t* codes, const uint8_t* fifths, int e) {
#if defined(__AVX512F__)
        const __m512 low = (__m512)(lane_numbers() - splat(16.0f)), high = (__m512)lane_numbers();
        const __m512i index = (__m512i)nibbles_at(codes, e);
        const __m512 below = _mm512_permutexvar_ps(index, low);
        return (FloatPart)_mm512_mask_permutexvar_ps(below, load<uint16_t>(fifths + e / 8), index, high);
#else
        const IntPart bits = splat_int(load<int32_t>(fifths) >> e) >> __builtin_convertvector(lane_numbers(), IntPart);
        return to_float(((nibbles_at(codes, e) & 15) | ((bits & 1) << 4)) - 16);
#endif
    }
};

template <int NUMBER>
struct CodeReader {
    static constexpr int FORMAT = NUMBER;
    static constexpr int UNIT = CACHE_BLOCK / PART_LANES;
    static constexpr bool HAS_REST = false;
    const uint8_t *codes, *fifths, *scales;
    int blocks;

    explicit CodeReader(const Entries& entries) : codes(entries.base), blocks(entries.head_dim / CACHE_BLOCK) {
        const PlaneSizes sizes = plane_sizes(FORMAT);
        fifths = codes + size_t(entries.slots) * blocks * sizes.codes;
        scales = fifths + size_t(entries.slots) * blocks * sizes.fifths;
    }

    // Gives N parts as `widen` does, before they are multiplied with their blocks' scales.
    template <int N>
    void levels(int slot, int e, FloatPart* parts) const {
        constexpr PlaneSizes sizes = plane_sizes(FORMAT);
        for (int p = 0; p < N; p++) {
            const int number = N < UNIT ? e % CACHE_BLOCK + p * PART_LANES : p % UNIT * PART_LANES;
            const size_t at = size_t(slot) * blocks + e / CACHE_BLOCK + (N < UNIT ? 0 : p / UNIT);
            parts[p] = Block<FORMAT>::part(codes + at * sizes.codes, fifths + at * sizes.fifths, number);
        }
    }

    template <int N>
    void widen(int slot, int e, FloatPart* parts) const {
        levels<N>(slot, e, parts);
        for (int p = 0; p < N; p++) {
            const size_t at = size_t(slot) * blocks + e / CACHE_BLOCK + (N < UNIT ? 0 : p / UNIT);
            parts[p] *= splat_half(load<uint16_t>(scales + 2 * at));
        }
    }

    // Returns the scales of a block of slots slot .. slot + count - 1, at most PART_LANES of them; further lanes repeat the last.
    FloatPart scales_of(int slot, int count, int block) const {
#if defined(__AVX512F__)
        const __m512i pairs = _mm512_srl_epi32(scale_pairs(slot, count, block / 2), _mm_cvtsi32_si128(block % 2 * 16));
        return (FloatPart)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
#else
        const uint8_t* first = scales + 2 * (size_t(slot) * blocks + block);
        uint16_t halves[PART_LANES];
        for (int lane = 0; lane < PART_LANES; lane++) halves[lane] = load<uint16_t>(first + 2 * blocks * (lane < count ? lane : count - 1));
        return halves_to_float(halves);
#endif
    }
    float one(int, int) const { return 0; }

#if defined(__AVX512F__)
  private:
    // Returns the scales of blocks 2 pair and 2 pair + 1 of each slot, in the low and high half of a lane.
    __m512i scale_pairs(int slot, int count, int pair) const {
        const uint8_t* first = scales + 2 * size_t(slot) * blocks;
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        if (count == LANES && blocks == 2) return _mm512_loadu_si512(first);
        if (count == LANES && blocks == 4) {
            const __m512i index = _mm512_add_epi32(_mm512_add_epi32(lanes, lanes), _mm512_set1_epi32(pair));
            return _mm512_permutex2var_epi32(_mm512_loadu_si512(first), index, _mm512_loadu_si512(first + 64));
        }
        const __m512i steps = _mm512_mullo_epi32(_mm512_min_epi32(lanes, _mm512_set1_epi32(count - 1)), _mm512_set1_epi32(blocks));
        if (2 * pair + 1 < blocks) return _mm512_i32gather_epi32(steps, first + 4 * pair, 2);
        return _mm512_srli_epi32(_mm512_i32gather_epi32(steps, first + 4 * pair - 2, 2), 16);  // the last half alone: a page may end after it
    }
#endif
};

// Calls use(type) with a null pointer of the reader's type of a format.
template <class F>
inline void with_reader(int format, F use) {
    switch (format) {
        case F32: return use((DenseReader<float>*)nullptr);
        case F16: return use((DenseReader<Fp16>*)nullptr);
        case BF16: return use((DenseReader<Bf16>*)nullptr);
        case FORMAT_Q8_0: return use((CodeReader<FORMAT_Q8_0>*)nullptr);
        case FORMAT_Q5_0: return use((CodeReader<FORMAT_Q5_0>*)nullptr);
        default: return use((CodeReader<FORMAT_Q4_0>*)nullptr);
    }
}

}  // namespace graphcore
