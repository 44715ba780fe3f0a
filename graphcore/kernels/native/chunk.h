// Attention of a chunk of one sequence: many tokens whose keys and values are not in the cache yet.
//
// Every query sees the ring's past and the chunk up to itself. Tokens are dealt out to threads in turn, because later ones
// see more. The ring is written last: it may lose its past to the chunk.
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

template <class T>
void widen_row(const uint8_t* from, int count, float* to) {
    const T* values = (const T*)from;
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, widen(values + i));
    for (; i < count; i++) to[i] = widen_one(values + i);
}

inline void widen_row(const uint8_t* from, int count, int format, float* to) {
    switch (format) {
        case F32: return widen_row<float>(from, count, to);
        case F16: return widen_row<Fp16>(from, count, to);
        default: return widen_row<Bf16>(from, count, to);
    }
}

template <class T>
void narrow_row(const float* from, int count, T* to) {
    for (int i = 0; i < count; i++) narrow(from[i], to + i);
}

inline void narrow_row(const float* from, int count, int format, uint8_t* to) {
    switch (format) {
        case F32: return narrow_row(from, count, (float*)to);
        case F16: return narrow_row(from, count, (Fp16*)to);
        default: return narrow_row(from, count, (Bf16*)to);
    }
}

inline size_t format_nbytes(int format) { return format == F32 ? 4 : 2; }

// The chunk's keys or values in the cache's format, head by head: [kv_heads, tokens, head_dim].
template <class T>
void gather_chunk(const Chunk& a, const uint8_t* from, int thread, int threads, float* work, T* to) {
    const Range mine = share(a.tokens, thread, threads);
    for (int t = mine.begin; t < mine.end; t++)
        for (int k = 0; k < a.kv_heads; k++) {
            widen_row(from + (size_t(t) * a.kv_heads + k) * a.head_dim * format_nbytes(a.format), a.head_dim, a.format, work);
            narrow_row(work, a.head_dim, to + (size_t(k) * a.tokens + t) * a.head_dim);
        }
}

template <class T>
void attend_token(const Chunk& a, int t, int kv_head, const T* new_keys, const T* new_values, float* scratch) {
    const int group = a.heads / a.kv_heads, head_dim = a.head_dim;
    const int64_t position = a.start + t, reach = a.window ? a.window : position + 1;
    const int64_t oldest = std::max<int64_t>(0, position + 1 - reach);
    const size_t cache = size_t(kv_head) * a.slots * head_dim, chunk = size_t(kv_head) * a.tokens * head_dim;
    Run<T> runs[3];
    ring_runs<T>((T*)a.k_cache + cache, (T*)a.v_cache + cache, std::min(oldest, a.start), a.start, a.slots, head_dim, runs);
    const int first_new = int(std::max<int64_t>(0, oldest - a.start));
    const size_t offset = chunk + size_t(first_new) * head_dim;
    runs[2] = {new_keys + offset, new_values + offset, t + 1 - first_new};
    float *q = scratch, *out = q + MOST_HEADS * head_dim, *scores = out + MOST_HEADS * head_dim;
    for (int head = kv_head * group, together; head < (kv_head + 1) * group; head += together) {
        together = std::min((kv_head + 1) * group - head, MOST_HEADS);
        const size_t at = (size_t(t) * a.heads + head) * head_dim;
        widen_row(a.query + at * format_nbytes(a.format), together * head_dim, a.format, q);
        for (int e = 0; e < together * head_dim; e++) q[e] *= a.scale;
        attend_some<T>(together, q, runs, a.sinks ? a.sinks + head : nullptr, head_dim, scores, out);
        narrow_row(out, together * head_dim, a.format, a.out + at * format_nbytes(a.format));
    }
}

// Floats of scratch of one thread.
inline size_t chunk_floats(const Chunk& a) {
    const int64_t seen = a.window ? std::min<int64_t>(a.window, a.start + a.tokens) : a.start + a.tokens;
    return size_t(2 * MOST_HEADS) * a.head_dim + size_t(MOST_HEADS) * (seen + LANES);
}

// Attends; every thread of the team calls it, `meet` is their barrier.
template <class T, class Barrier>
void attend_chunk(const Chunk& a, T* new_keys, T* new_values, int thread, int threads, float* scratch, Barrier meet) {
    gather_chunk(a, a.key, thread, threads, scratch, new_keys);
    gather_chunk(a, a.value, thread, threads, scratch, new_values);
    meet();
    for (int t = thread; t < a.tokens; t += threads)
        for (int k = 0; k < a.kv_heads; k++) attend_token<T>(a, t, k, new_keys, new_values, scratch);
    meet();
    const int kept = std::min(a.tokens, a.slots);
    const Range mine = share(a.kv_heads * kept, thread, threads);
    for (int item = mine.begin; item < mine.end; item++) {
        const int k = item / kept, t = a.tokens - kept + item % kept;
        const size_t from = (size_t(k) * a.tokens + t) * a.head_dim;
        const size_t to = (size_t(k) * a.slots + size_t((a.start + t) % a.slots)) * a.head_dim;
        std::memcpy((T*)a.k_cache + to, new_keys + from, size_t(a.head_dim) * sizeof(T));
        std::memcpy((T*)a.v_cache + to, new_values + from, size_t(a.head_dim) * sizeof(T));
    }
}

}  // namespace graphcore
