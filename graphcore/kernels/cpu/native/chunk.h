// Prefill attention: a chunk of one sequence, many tokens whose keys and values are not in the cache yet.
//
// First all keys and values that the chunk sees, old and new, are widened to float32. New ones are first rounded to the
// cache's format, so that outputs do not depend on the chunking. Keys are transposed sixteen at a time, so that a vector has
// one feature of sixteen keys, and no score is a sum across lanes:
//
//     scores[row][16 keys] += q[row][e] * keys[e][16 keys]          out[row] += weights[row][key] * values[key]
//
// With AVX512-BF16, bf16 keys and values stay bf16: keys in pairs of features, values in pairs of neighbouring keys, and weights
// are rounded to bf16, too (bf16_pairs.h). Pairs begin at even positions, whatever the chunk sees.
//
// A row is one query head of one token. The rows of a kv head are ordered by token. Later tokens see more keys, so threads
// take tiles one at a time. The pages are written last, because the chunk may overwrite old keys that it sees.
#pragma once

#include "attend.h"
#include "bf16_pairs.h"

namespace graphcore {

struct Chunk {
    // [tokens, heads, head_dim], and twice [tokens, kv_heads, head_dim], of format. If key is null, the tokens are in the pages.
    const uint8_t *query, *key, *value;
    uint8_t* out;                        // [tokens, heads, value_dim] of format
    uint8_t *k_cache, *v_cache;          // [pages, kv_heads, page entries] of k_format and of v_format
    const int32_t* pages;                // [num_pages], pages of the sequence
    const float* sinks;                  // [heads], or null
    int64_t start;                       // position of the chunk's first token
    int32_t tokens, heads, kv_heads, head_dim, page, num_pages, window, format, k_format, v_format;
    float scale;
    float cap;  // scores become cap * tanh(score / cap); 0: no cap
    int32_t values_from;  // 0, or the first feature of the value in a key: then value and v_cache are not read

    int value_dim() const { return head_dim - values_from; }
    Places places() const { return {pages, num_pages, page, kv_heads}; }
};

constexpr int ROW_TILE = 16;
constexpr int SCORE_ROWS = 8, VALUE_ROWS = 4;  // rows of a tile whose sums are in registers together
constexpr int VALUE_KEYS = 64;  // keys whose values all rows of a tile are multiplied with while they are in the L1 cache

inline void widen_row(const uint8_t* from, int count, int format, float* to) {
    for (int i = 0; i < count; i++)
        to[i] = format == F32    ? widen_one((const float*)from + i)
                : format == BF16 ? widen_one((const Bf16*)from + i)
                                 : widen_one((const Fp16*)from + i);
}

inline void narrow_row(const float* from, int count, int format, uint8_t* to) {
    for (int i = 0; i < count; i++)
        format == F32 ? narrow(from[i], (float*)to + i) : format == BF16 ? narrow(from[i], (Bf16*)to + i) : narrow(from[i], (Fp16*)to + i);
}

inline float rounded_to(float value, int format) {
    if (format == F32) return value;
    Bf16 brief;
    Fp16 half;
    if (format == BF16) return narrow(value, &brief), widen_one(&brief);
    return narrow(value, &half), widen_one(&half);
}

inline size_t format_nbytes(int format) { return format == F32 ? 4 : 2; }

// The keys and values that a chunk sees, widened or in pairs, for all kv heads.
struct Seen {
    bool in_pairs;
    int64_t first;   // position of the oldest key; in pairs it may be before the window, up to a multiple of LANES
    int count;       // number of keys, the chunk's own included
    size_t stride;   // count, rounded up to PAIR_KEYS: floats of one row of scores
    float *keys;     // [kv_heads, stride / LANES, head_dim, LANES]; in pairs [kv_heads, stride / LANES, head_dim / 2, LANES] uint32
    float *values;   // [kv_heads, count, value_dim]; in pairs [kv_heads, stride / 2, value_dim] uint32

    explicit Seen(const Chunk& a) {
        in_pairs = has_bf16_pairs() && a.format == BF16 && a.k_format == BF16 && a.v_format == BF16 && a.head_dim % BLOCK_COLUMNS == 0 && a.value_dim() % BLOCK_COLUMNS == 0;
        first = oldest(a) / (in_pairs ? LANES : 1) * (in_pairs ? LANES : 1);
        count = int(a.start + a.tokens - first);
        stride = size_t(count + PAIR_KEYS - 1) / PAIR_KEYS * PAIR_KEYS;
    }

    static int64_t oldest(const Chunk& a) { return a.window ? std::max<int64_t>(0, a.start + 1 - a.window) : 0; }

    size_t nbytes(const Chunk& a) const { return size_t(a.kv_heads) * a.head_dim * 2 * stride * (in_pairs ? 2 : 4) + VECTOR_NBYTES; }

    // Returns sixteen keys, which begin at a multiple of sixteen.
    float* keys_at(int kv_head, int head_dim, int key) const { return keys + (size_t(kv_head) * stride + key) * head_dim; }
    uint32_t* key_pairs_at(int kv_head, int head_dim, int key) const { return (uint32_t*)keys + (size_t(kv_head) * stride + key) * head_dim / 2; }
    uint32_t* value_pairs_at(int kv_head, int value_dim, int key) const { return (uint32_t*)values + (size_t(kv_head) * stride + key) * value_dim / 2; }

    void place(const Chunk& a, void* memory) {
        keys = (float*)((uintptr_t(memory) + 63) / 64 * 64);
        values = keys + size_t(a.kv_heads) * a.head_dim * stride / (in_pairs ? 2 : 1);
    }
};

// Arranges sixteen keys and values in pairs. zeros: [head_dim] scratch, for those that the chunk does not see.
inline void arrange_entries(const Chunk& a, const Seen& seen, int kv_head, int index, float* zeros) {
    const uint8_t *keys[LANES], *values[LANES];
    const size_t nbytes = size_t(a.head_dim) * 2;
    std::memset(zeros, 0, nbytes);
    const auto find = [&](uint8_t* cache, const uint8_t* chunk, int64_t position) -> const uint8_t* {
        if (position < Seen::oldest(a) || position >= seen.first + seen.count) return (const uint8_t*)zeros;
        const Places places = a.places();
        if (position < a.start || !a.key) return places.of(cache, BF16, a.head_dim, position, kv_head).base + places.slot(position) * nbytes;
        return chunk + (size_t(position - a.start) * a.kv_heads + kv_head) * nbytes;
    };
    for (int i = 0; i < LANES; i++) {
        keys[i] = find(a.k_cache, a.key, seen.first + index + i);
        values[i] = a.values_from ? keys[i] + a.values_from * 2 : find(a.v_cache, a.value, seen.first + index + i);
    }
    arrange_keys(keys, a.head_dim, seen.key_pairs_at(kv_head, a.head_dim, index));
    arrange_values(values, a.value_dim(), seen.value_pairs_at(kv_head, a.value_dim(), index));
}

// Widens one key and value, from the pages, or a new one after rounding it to the cache's format. row: [2 * head_dim] scratch.
inline void widen_entry(const Chunk& a, const Seen& seen, int kv_head, int index, float* row) {
    const int64_t position = seen.first + index;
    const int head_dim = a.head_dim;
    const auto fetch = [&](uint8_t* cache, int format, const uint8_t* chunk, float* to) {
        const Places places = a.places();
        if (position < a.start || !a.key) return places.of(cache, format, head_dim, position, kv_head).get(places.slot(position), to);
        widen_row(chunk + (size_t(position - a.start) * a.kv_heads + kv_head) * head_dim * format_nbytes(a.format), head_dim, a.format, to);
        if (format == a.format) return;
        const Entries rounded{(uint8_t*)(row + head_dim), format, head_dim, 1};
        rounded.put(0, to);
        rounded.get(0, to);
    };
    fetch(a.k_cache, a.k_format, a.key, row);
    float* keys = seen.keys_at(kv_head, head_dim, index / LANES * LANES) + index % LANES;
    for (int e = 0; e < head_dim; e++) keys[e * LANES] = row[e];
    float* values = seen.values + (size_t(kv_head) * seen.count + index) * a.value_dim();
    if (a.values_from) std::memcpy(values, row + a.values_from, size_t(a.value_dim()) * 4);
    else fetch(a.v_cache, a.v_format, a.value, values);
}

// Computes the scores of SCORE_ROWS rows with sixteen keys.
inline void score_keys(const float* q, int head_dim, const float* keys, size_t stride, float* scores) {
    for (int lane = 0; lane < LANES; lane += PART_LANES) {
        FloatPart sums[SCORE_ROWS] = {};
        for (int e = 0; e < head_dim; e++) {
            const FloatPart column = load<FloatPart>(keys + e * LANES + lane);
            for (int r = 0; r < SCORE_ROWS; r++) sums[r] += splat(q[r * head_dim + e]) * column;
        }
        for (int r = 0; r < SCORE_ROWS; r++) store(scores + r * stride + lane, sums[r]);
    }
}

// Computes out[r] += sum over key of weights[r][key] * values[key] for VALUE_ROWS rows.
inline void add_weighted(const float* weights, size_t stride, const float* values, int head_dim, int begin, int end, float* out) {
    constexpr int WIDTH = PARTS > 1 ? 2 : 4;
    int e = 0;
    for (; e + WIDTH * PART_LANES <= head_dim; e += WIDTH * PART_LANES) {
        FloatPart sums[VALUE_ROWS][WIDTH];
        for (int r = 0; r < VALUE_ROWS; r++)
            for (int v = 0; v < WIDTH; v++) sums[r][v] = load<FloatPart>(out + r * head_dim + e + v * PART_LANES);
        for (int key = begin; key < end; key++)
            for (int v = 0; v < WIDTH; v++) {
                const FloatPart part = load<FloatPart>(values + size_t(key) * head_dim + e + v * PART_LANES);
                for (int r = 0; r < VALUE_ROWS; r++) sums[r][v] += splat(weights[r * stride + key]) * part;
            }
        for (int r = 0; r < VALUE_ROWS; r++)
            for (int v = 0; v < WIDTH; v++) store(out + r * head_dim + e + v * PART_LANES, sums[r][v]);
    }
    for (int rest = e; rest < head_dim; rest++)
        for (int r = 0; r < VALUE_ROWS; r++)
            for (int key = begin; key < end; key++) out[r * head_dim + rest] += weights[r * stride + key] * values[size_t(key) * head_dim + rest];
}

// Returns the floats of one thread's scratch.
inline size_t tile_floats(const Chunk& a, const Seen& seen) { return ROW_TILE * (2 * size_t(a.head_dim) + seen.stride) + LANES; }

// One tile of rows of a kv head. Rows beyond the last row repeat it and are not stored.
struct RowTile {
    const Chunk& a;
    const Seen& seen;
    int kv_head, first_row;
    int group = a.heads / a.kv_heads, num_rows = a.tokens * group;

    int row_of(int r) const { return std::min(first_row + r, num_rows - 1); }
    size_t head_of(int r) const { return size_t(row_of(r) / group) * a.heads + kv_head * group + row_of(r) % group; }  // among those of all tokens

    // Row r sees keys begin_of(r) .. end_of(r) - 1. Index 0 is the chunk's oldest key.
    int end_of(int r) const { return int(a.start + row_of(r) / group + 1 - seen.first); }
    int begin_of(int r) const { return a.window ? std::max(0, end_of(r) - a.window) : 0; }
    int begin() const { return begin_of(0) / PAIR_KEYS * PAIR_KEYS; }
    int end() const { return (end_of(ROW_TILE - 1) + 1) / 2 * 2; }  // of whole pairs

    // q: [ROW_TILE, head_dim] floats.  scores: [ROW_TILE, stride].
    void score(float* q, float* scores) const {
        for (int r = 0; r < ROW_TILE; r++) {
            float* row = q + r * a.head_dim;
            widen_row(a.query + head_of(r) * a.head_dim * format_nbytes(a.format), a.head_dim, a.format, row);
            if (is_mixed(a.k_format)) mix_head(row, a.head_dim);
            for (int e = 0; e < a.head_dim; e++) row[e] *= a.scale;
        }
        for (int key = begin(); key < end(); key += LANES)
            for (int r = 0; r < ROW_TILE; r += SCORE_ROWS)
                score_keys(q + r * a.head_dim, a.head_dim, seen.keys_at(kv_head, a.head_dim, key), seen.stride, scores + r * seen.stride + key);
    }

    // q: [ROW_TILE, head_dim] of bf16.
    void score_in_pairs(uint8_t* q, float* scores) const {
        const size_t nbytes = size_t(a.head_dim) * 2;
        for (int r = 0; r < ROW_TILE; r++) std::memcpy(q + r * nbytes, a.query + head_of(r) * nbytes, nbytes);
        for (int key = begin(); key < end(); key += PAIR_KEYS)
            for (int r = 0; r < ROW_TILE; r += PAIR_ROWS)
                score_pairs(q + r * nbytes, a.head_dim, seen.key_pairs_at(kv_head, a.head_dim, key), a.scale, seen.stride, scores + r * seen.stride + key);
    }

    void weigh(float* row, int r) const {
        const int from = begin_of(r), to = end_of(r);
        if (a.cap) cap_scores(row + from, to - from, a.cap);
        softmax(row + from, to - from, a.sinks ? a.sinks + kv_head * group + row_of(r) % group : nullptr);
        std::fill(row + begin(), row + from, 0.0f);
        std::fill(row + to, row + end(), 0.0f);
        if (seen.in_pairs)
            for (int key = begin(); key < end(); key += PART_LANES) store_halves((uint8_t*)row + 2 * key, bf16_bits(load<FloatPart>(row + key)));
    }

    // Computes the sums of values of VALUE_ROWS rows. weights: of the first row, as `weigh` leaves them.
    void add_values(const float* weights, float* out) const {
        const int value_dim = a.value_dim();
        for (int key = begin(), last; key < end(); key = last) {
            last = std::min(key + VALUE_KEYS, end());
            for (int r = 0; r < ROW_TILE; r += VALUE_ROWS) {
                const float* row = weights + r * seen.stride;
                if (seen.in_pairs)
                    add_weighted_pairs((const uint8_t*)row, seen.stride * 4, seen.value_pairs_at(kv_head, value_dim, 0), value_dim, key / 2, last / 2, out + r * value_dim);
                else
                    add_weighted(row, seen.stride, seen.values + size_t(kv_head) * seen.count * value_dim, value_dim, key, std::min(last, end_of(ROW_TILE - 1)), out + r * value_dim);
            }
        }
    }
};

// Computes attention for one tile. scratch: tile_floats.
inline void attend_tile(const Chunk& a, const Seen& seen, int kv_head, int tile, float* scratch) {
    const RowTile rows{a, seen, kv_head, tile * ROW_TILE};
    float *q = scratch, *out = q + ROW_TILE * a.head_dim, *scores = out + ROW_TILE * a.head_dim;
    seen.in_pairs ? rows.score_in_pairs((uint8_t*)q, scores) : rows.score(q, scores);
    for (int r = 0; r < ROW_TILE; r++) rows.weigh(scores + r * seen.stride, r);
    std::fill(out, out + ROW_TILE * a.value_dim(), 0.0f);
    rows.add_values(scores, out);
    for (int r = 0; r < ROW_TILE && rows.first_row + r < rows.num_rows; r++) {
        float* row = out + r * a.value_dim();
        if (is_mixed(a.v_format)) mix_head(row, a.value_dim(), mix_size(a.head_dim));
        narrow_row(row, a.value_dim(), a.format, a.out + rows.head_of(r) * a.value_dim() * format_nbytes(a.format));
    }
}

// The attention of a chunk as a job of three phases: gather keys and values, attend, and write the pages if there are new keys.
class ChunkJob final : public Job {
  public:
    // scratch: [threads, tile_floats]
    ChunkJob(const Chunk& chunk, const Seen& seen, float* scratch, size_t stride) : a_(chunk), seen_(seen), scratch_(scratch), stride_(stride) {}

    int phases() const override { return a_.key ? 3 : 2; }

    Deal deal(int phase, int threads) const override {
        if (phase == GATHER) return Deal::even(gather_units() * a_.kv_heads, threads);
        return phase == ATTEND ? Deal{tiles() * a_.kv_heads, 1} : Deal::even(a_.kv_heads * kept(), threads);
    }

    void carry_out(int phase, Range units, int thread) override {
        float* scratch = scratch_ + thread * stride_;
        for (int item = units.begin; item < units.end; item++) {
            if (phase == GATHER) gather(item / gather_units(), item % gather_units(), scratch);
            if (phase == ATTEND) attend_tile(a_, seen_, item % a_.kv_heads, item / a_.kv_heads, scratch);
            if (phase == WRITE) write_entry(item / kept(), a_.tokens - kept() + item % kept(), scratch);
        }
    }

  private:
    enum { GATHER, ATTEND, WRITE };

    int gather_units() const { return seen_.in_pairs ? int(seen_.stride) / LANES : seen_.count; }  // of a kv head

    void gather(int kv_head, int unit, float* scratch) const {
        seen_.in_pairs ? arrange_entries(a_, seen_, kv_head, unit * LANES, scratch) : widen_entry(a_, seen_, kv_head, unit, scratch);
    }

    int kept() const { return int(std::min<int64_t>(a_.tokens, a_.places().slots())); }  // new entries that the chunk does not overwrite itself
    int tiles() const { return (a_.tokens * (a_.heads / a_.kv_heads) + ROW_TILE - 1) / ROW_TILE; }

    void write_entry(int kv_head, int token, float* row) const {
        const size_t from = (size_t(token) * a_.kv_heads + kv_head) * a_.head_dim * format_nbytes(a_.format);
        const auto write = [&](uint8_t* cache, int format, const uint8_t* chunk) {
            const Places places = a_.places();
            widen_row(chunk + from, a_.head_dim, a_.format, row);
            places.of(cache, format, a_.head_dim, a_.start + token, kv_head).put(places.slot(a_.start + token), row);
        };
        write(a_.k_cache, a_.k_format, a_.key);
        if (!a_.values_from) write(a_.v_cache, a_.v_format, a_.value);
    }

    const Chunk& a_;
    const Seen& seen_;
    float* scratch_;
    size_t stride_;
};

}  // namespace graphcore
