// Attention of a chunk of one sequence: many tokens whose keys and values are not in the cache yet.
//
// What the chunk sees, past and new, is first widened to float32, keys with one column for each key, so that sixteen keys
// are one vector and no score is a sum across lanes:
//
//     scores[row][16 keys] += q[row][e] * keys[e][16 keys]          out[row] += weights[row][key] * values[key]
//
// A row is one query head of one token; rows of a kv head follow each other token by token. Tiles of rows are dealt out to
// threads in turn, because later tokens see more. The ring is written last: it may lose its past to the chunk.
#pragma once

#include "attend.h"

namespace graphcore {

struct Chunk {
    const uint8_t *query, *key, *value;  // [tokens, heads, head_dim], [tokens, kv_heads, head_dim] twice, of format
    uint8_t* out;                        // as query
    uint8_t *k_cache, *v_cache;          // [kv_heads, slots, head_dim] of cache_format
    const float* sinks;                  // [heads], or null
    int64_t start;                       // tokens that the cache holds
    int32_t tokens, heads, kv_heads, head_dim, slots, window, format, cache_format;
    float scale;
};

constexpr int ROW_TILE = 8;

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

inline size_t format_nbytes(int format) { return format == F32 ? 4 : 2; }

// What a chunk is attended with, for all kv heads.
struct Seen {
    int64_t first;   // position of the oldest key
    int count;       // keys, the chunk's own included
    size_t stride;   // of keys, in floats: count, padded to whole vectors
    float *keys;     // [kv_heads, head_dim, stride]
    float *values;   // [kv_heads, count, head_dim]

    explicit Seen(const Chunk& a) {
        first = a.window ? std::max<int64_t>(0, a.start + 1 - a.window) : 0;
        count = int(a.start + a.tokens - first);
        stride = size_t(count + LANES - 1) / LANES * LANES;
    }

    size_t nbytes(const Chunk& a) const { return size_t(a.kv_heads) * a.head_dim * (stride + count) * 4 + VECTOR_NBYTES; }

    void place(const Chunk& a, void* memory) {
        keys = (float*)((uintptr_t(memory) + 63) / 64 * 64);
        values = keys + size_t(a.kv_heads) * a.head_dim * stride;
    }
};

// Widens one key and value, past ones from the ring, new ones rounded as the cache will hold them.
inline void widen_entry(const Chunk& a, const Seen& seen, int kv_head, int index, float* row) {
    const int64_t position = seen.first + index;
    const int head_dim = a.head_dim;
    const bool is_past = position < a.start;
    const size_t ring = (size_t(kv_head) * a.slots + size_t(position % a.slots)) * head_dim * format_nbytes(a.cache_format);
    const size_t fresh = (size_t(position - a.start) * a.kv_heads + kv_head) * head_dim * format_nbytes(a.format);
    const auto fetch = [&](const uint8_t* cache, const uint8_t* chunk, float* to) {
        if (is_past) return widen_row(cache + ring, head_dim, a.cache_format, to);
        widen_row(chunk + fresh, head_dim, a.format, to);
        if (a.cache_format == a.format) return;
        uint8_t rounded[4];
        for (int e = 0; e < head_dim; e++) narrow_row(to + e, 1, a.cache_format, rounded), widen_row(rounded, 1, a.cache_format, to + e);
    };
    fetch(a.k_cache, a.key, row);
    float* keys = seen.keys + size_t(kv_head) * head_dim * seen.stride + index;
    for (int e = 0; e < head_dim; e++) keys[e * seen.stride] = row[e];
    fetch(a.v_cache, a.value, seen.values + (size_t(kv_head) * seen.count + index) * head_dim);
}

// Scores of ROW_TILE rows with keys begin .. end - 1, begin being a whole number of vectors.
inline void score_tile(const float* q, int head_dim, const float* keys, size_t stride, int begin, int end, float* scores) {
    for (int key = begin; key < end; key += LANES) {
        f32x16 sums[ROW_TILE] = {};
        for (int e = 0; e < head_dim; e++) {
            const f32x16 column = load<f32x16>(keys + e * stride + key);
            for (int r = 0; r < ROW_TILE; r++) sums[r] += splat(q[r * head_dim + e]) * column;
        }
        for (int r = 0; r < ROW_TILE; r++) store(scores + r * stride + key, sums[r]);
    }
}

// out[r] = sum of weights[r][key] * values[key] for four rows.
inline void weigh_values(const float* weights, size_t stride, const float* values, int head_dim, int begin, int end, float* out) {
    constexpr int ROWS = 4, WIDTH = 4;
    int e = 0;
    for (; e + WIDTH * LANES <= head_dim; e += WIDTH * LANES) {
        f32x16 sums[ROWS][WIDTH] = {};
        for (int key = begin; key < end; key++)
            for (int v = 0; v < WIDTH; v++) {
                const f32x16 part = load<f32x16>(values + size_t(key) * head_dim + e + v * LANES);
                for (int r = 0; r < ROWS; r++) sums[r][v] += splat(weights[r * stride + key]) * part;
            }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < WIDTH; v++) store(out + r * head_dim + e + v * LANES, sums[r][v]);
    }
    for (int rest = e; rest < head_dim; rest++)
        for (int r = 0; r < ROWS; r++) {
            float total = 0;
            for (int key = begin; key < end; key++) total += weights[r * stride + key] * values[size_t(key) * head_dim + rest];
            out[r * head_dim + rest] = total;
        }
}

// Floats of one thread's scratch.
inline size_t tile_floats(const Chunk& a, const Seen& seen) { return ROW_TILE * (2 * size_t(a.head_dim) + seen.stride) + LANES; }

// One tile of rows of a kv head; rows beyond the last repeat it and are not stored.
inline void attend_tile(const Chunk& a, const Seen& seen, int kv_head, int tile, float* scratch) {
    const int group = a.heads / a.kv_heads, head_dim = a.head_dim, num_rows = a.tokens * group, first_row = tile * ROW_TILE;
    float *q = scratch, *out = q + ROW_TILE * head_dim, *scores = out + ROW_TILE * head_dim;
    const auto place_of = [&](int row) { return (size_t(row / group) * a.heads + kv_head * group + row % group) * head_dim; };
    const auto row_of = [&](int r) { return std::min(first_row + r, num_rows - 1); };
    for (int r = 0; r < ROW_TILE; r++) {
        widen_row(a.query + place_of(row_of(r)) * format_nbytes(a.format), head_dim, a.format, q + r * head_dim);
        for (int e = 0; e < head_dim; e++) q[r * head_dim + e] *= a.scale;
    }
    // keys that row r sees, as indices into what the chunk sees
    const auto end_of = [&](int r) { return int(a.start + row_of(r) / group + 1 - seen.first); };
    const auto begin_of = [&](int r) { return a.window ? std::max(0, end_of(r) - a.window) : 0; };
    const int begin = begin_of(0) / LANES * LANES, end = end_of(ROW_TILE - 1);
    score_tile(q, head_dim, seen.keys + size_t(kv_head) * head_dim * seen.stride, seen.stride, begin, end, scores);
    for (int r = 0; r < ROW_TILE; r++) {
        float* row = scores + r * seen.stride;
        const int from = begin_of(r), to = end_of(r);
        softmax(row + from, to - from, a.sinks ? a.sinks + kv_head * group + row_of(r) % group : nullptr);
        std::fill(row + begin, row + from, 0.0f);
        std::fill(row + to, row + end, 0.0f);
    }
    const float* values = seen.values + size_t(kv_head) * seen.count * head_dim;
    for (int r = 0; r < ROW_TILE; r += 4) weigh_values(scores + r * seen.stride, seen.stride, values, head_dim, begin, end, out + r * head_dim);
    for (int r = 0; r < ROW_TILE && first_row + r < num_rows; r++)
        narrow_row(out + r * head_dim, head_dim, a.format, a.out + place_of(first_row + r) * format_nbytes(a.format));
}

// Attends; every thread of the team calls it, `meet` is their barrier.
template <class Barrier>
void attend_chunk(const Chunk& a, const Seen& seen, int thread, int threads, float* scratch, Barrier meet) {
    const Range mine = share(seen.count * a.kv_heads, thread, threads);
    for (int item = mine.begin; item < mine.end; item++) widen_entry(a, seen, item / seen.count, item % seen.count, scratch);
    meet();
    const int tiles = (a.tokens * (a.heads / a.kv_heads) + ROW_TILE - 1) / ROW_TILE;
    for (int item = thread; item < tiles * a.kv_heads; item += threads) attend_tile(a, seen, item % a.kv_heads, item / a.kv_heads, scratch);
    meet();
    const int kept = std::min(a.tokens, a.slots), head_dim = a.head_dim;
    const Range writes = share(a.kv_heads * kept, thread, threads);
    for (int item = writes.begin; item < writes.end; item++) {
        const int k = item / kept, t = a.tokens - kept + item % kept;
        const size_t from = (size_t(t) * a.kv_heads + k) * head_dim * format_nbytes(a.format);
        const size_t to = (size_t(k) * a.slots + size_t((a.start + t) % a.slots)) * head_dim * format_nbytes(a.cache_format);
        widen_row(a.key + from, head_dim, a.format, scratch);
        narrow_row(scratch, head_dim, a.cache_format, a.k_cache + to);
        widen_row(a.value + from, head_dim, a.format, scratch);
        narrow_row(scratch, head_dim, a.cache_format, a.v_cache + to);
    }
}

}  // namespace graphcore
