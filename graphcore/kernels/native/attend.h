// Attention of one token over a cache of fp32, fp16 or bf16 keys and values.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace graphcore {

inline void narrow(float value, float* to) { *to = value; }
inline void narrow(float value, Bf16* to) { to->bits = float_to_bf16(value); }
inline void narrow(float value, Fp16* to) { to->bits = float_to_half(value); }

// The live slots of a ring, as at most two runs, without the slot of the new token.
struct Live {
    int begin[2], end[2], count;
};

inline Live live_slots(int64_t position, int slots, int window) {
    const int64_t reach = window && window < slots ? window : slots;
    const int count = int(std::min<int64_t>(position + 1, reach)) - 1;  // older tokens that are seen
    const int slot = int(position % slots), first = slot - count;
    if (first >= 0) return {{first, 0}, {slot, 0}, count};
    return {{first + slots, 0}, {slots, slot}, count};
}

constexpr int MOST_HEADS = 4;  // query heads of one kv head that are attended together: keys are widened once for all

// [sum(rows[0]), ..., sum(rows[15])]: halves are folded onto each other until each lane holds one row's sum.
inline f32x16 sums_of_rows(const f32x16 rows[LANES]) {
    f32x16 eight[8], four[4], two[2];
    for (int i = 0; i < 8; i++) {
        const f32x16 a = rows[2 * i], b = rows[2 * i + 1];
        eight[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                   __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (int i = 0; i < 4; i++) {
        const f32x16 a = eight[2 * i], b = eight[2 * i + 1];
        four[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    for (int i = 0; i < 2; i++) {
        const f32x16 a = four[2 * i], b = four[2 * i + 1];
        two[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                 __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    }
    return __builtin_shufflevector(two[0], two[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(two[0], two[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// scores[h][i] = q[h] . keys[i] for `count` keys, one after another.
template <class T, int HEADS>
void score_keys(const float* q, const T* keys, int count, int head_dim, float* scores, size_t score_stride) {
    const int whole = head_dim / LANES * LANES;
    for (int first = 0; first < count; first += LANES) {
        f32x16 products[HEADS][LANES] = {};
        const int here = count - first < LANES ? count - first : LANES;
        for (int i = 0; i < here; i++) {
            const T* key = keys + size_t(first + i) * head_dim;
            f32x16 totals[HEADS] = {};
            for (int e = 0; e < whole; e += LANES) {
                const f32x16 part = widen(key + e);
                for (int h = 0; h < HEADS; h++) totals[h] += load<f32x16>(q + h * head_dim + e) * part;
            }
            for (int e = whole; e < head_dim; e++)
                for (int h = 0; h < HEADS; h++) totals[h][0] += q[h * head_dim + e] * widen_one(key + e);
            for (int h = 0; h < HEADS; h++) products[h][i] = totals[h];
        }
        for (int h = 0; h < HEADS; h++) {
            const f32x16 sums = sums_of_rows(products[h]);
            std::memcpy(scores + h * score_stride + first, &sums, size_t(here) * 4);
        }
    }
}

// out[h] += sum over i of weights[h][i] * values[i]
template <class T, int HEADS>
void add_values(const float* weights, size_t weight_stride, const T* values, int count, int head_dim, float* out) {
    constexpr int WIDTH = 4;  // vectors of each head that stay in registers
    int e = 0;
    for (; e + WIDTH * LANES <= head_dim; e += WIDTH * LANES) {
        f32x16 totals[HEADS][WIDTH];
        for (int h = 0; h < HEADS; h++)
            for (int v = 0; v < WIDTH; v++) totals[h][v] = load<f32x16>(out + h * head_dim + e + v * LANES);
        for (int i = 0; i < count; i++)
            for (int v = 0; v < WIDTH; v++) {
                const f32x16 part = widen(values + size_t(i) * head_dim + e + v * LANES);
                for (int h = 0; h < HEADS; h++) totals[h][v] += splat(weights[h * weight_stride + i]) * part;
            }
        for (int h = 0; h < HEADS; h++)
            for (int v = 0; v < WIDTH; v++) store(out + h * head_dim + e + v * LANES, totals[h][v]);
    }
    for (int i = 0; i < count; i++)
        for (int rest = e; rest < head_dim; rest++)
            for (int h = 0; h < HEADS; h++)
                out[h * head_dim + rest] += weights[h * weight_stride + i] * widen_one(values + size_t(i) * head_dim + rest);
}

// scores become weights; a sink takes its share of the softmax and gives nothing.
inline void softmax(float* scores, int count, const float* sink) {
    float most = sink ? *sink : -INFINITY;
    for (int i = 0; i < count; i++) most = std::max(most, scores[i]);
    const f32x16 shift = splat(most);
    f32x16 total{};
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        const f32x16 weight = exponential(load<f32x16>(scores + i) - shift);
        store(scores + i, weight);
        total += weight;
    }
    float rest = sum(total) + (sink ? std::exp(*sink - most) : 0.0f);
    for (; i < count; i++) rest += scores[i] = std::exp(scores[i] - most);
    const float scale = 1.0f / rest;
    for (i = 0; i < count; i++) scores[i] *= scale;
}

// Floats of scratch that attend_heads needs.
inline size_t attend_floats(int head_dim, int slots) { return size_t(2 + MOST_HEADS) * head_dim + size_t(MOST_HEADS) * (slots + LANES); }

// The new key and value as the cache will hold them: [2, head_dim].
template <class T>
void make_entry(const Attend& a, int kv_head, const float* rope, float* work, T* entry) {
    const int head_dim = a.head_dim;
    normalise(a.k_norm, a.k + size_t(kv_head) * head_dim, head_dim, work);
    if (rope) rotate(work, rope, head_dim);
    for (int e = 0; e < head_dim; e++) {
        narrow(work[e], entry + e);
        narrow(a.v[size_t(kv_head) * head_dim + e], entry + head_dim + e);
    }
}

// Query heads first_head .. first_head + HEADS - 1, which share a kv head; the new token's entry is not in the cache yet.
template <class T, int HEADS>
void attend_together(const Attend& a, int first_head, const T* keys, const T* values, const T* entry, const float* rope, float* scratch) {
    const int head_dim = a.head_dim;
    const Live live = live_slots(*a.position, a.slots, a.window);
    const size_t stride = size_t(a.slots) + LANES;
    float *q = scratch, *scores = scratch + MOST_HEADS * head_dim;
    for (int h = 0; h < HEADS; h++) {
        float* head = q + h * head_dim;
        normalise(a.q_norm, a.q + size_t(first_head + h) * head_dim, head_dim, head);
        if (rope) rotate(head, rope, head_dim);
        for (int e = 0; e < head_dim; e++) head[e] *= a.scale;
    }
    const int runs[2] = {live.end[0] - live.begin[0], live.end[1] - live.begin[1]};
    for (int run = 0, at = 0; run < 2; at += runs[run++])
        score_keys<T, HEADS>(q, keys + size_t(live.begin[run]) * head_dim, runs[run], head_dim, scores + at, stride);
    score_keys<T, HEADS>(q, entry, 1, head_dim, scores + live.count, stride);
    for (int h = 0; h < HEADS; h++)
        softmax(scores + h * stride, live.count + 1, a.sinks ? a.sinks + first_head + h : nullptr);
    float* out = a.out + size_t(first_head) * head_dim;
    std::memset(out, 0, size_t(HEADS) * head_dim * 4);
    for (int run = 0, at = 0; run < 2; at += runs[run++])
        add_values<T, HEADS>(scores + at, stride, values + size_t(live.begin[run]) * head_dim, runs[run], head_dim, out);
    add_values<T, HEADS>(scores + live.count, stride, entry + head_dim, 1, head_dim, out);
}

// Heads first .. last - 1, all of one kv head; the thread that has the kv head's first query head writes the cache.
template <class T>
void attend_heads(const Attend& a, int first, int last, float* scratch) {
    const int group = a.heads / a.kv_heads, kv_head = first / group, head_dim = a.head_dim;
    const int64_t position = *a.position;
    const float* rope = a.rope ? a.rope + position * head_dim : nullptr;
    T* keys = (T*)a.k_cache + size_t(kv_head) * a.slots * head_dim;
    T* values = (T*)a.v_cache + size_t(kv_head) * a.slots * head_dim;
    T* entry = (T*)scratch;
    float* rest = scratch + 2 * head_dim;
    make_entry(a, kv_head, rope, rest, entry);
    const bool writes = first % group == 0;
    while (first < last) {
        const int together = std::min(last - first, MOST_HEADS);
        switch (together) {
            case 1: attend_together<T, 1>(a, first, keys, values, entry, rope, rest); break;
            case 2: attend_together<T, 2>(a, first, keys, values, entry, rope, rest); break;
            case 3: attend_together<T, 3>(a, first, keys, values, entry, rope, rest); break;
            default: attend_together<T, MOST_HEADS>(a, first, keys, values, entry, rope, rest);
        }
        first += together;
    }
    if (!writes) return;
    const size_t slot = size_t(position % a.slots) * head_dim;
    std::memcpy(keys + slot, entry, size_t(head_dim) * sizeof(T));
    std::memcpy(values + slot, entry + head_dim, size_t(head_dim) * sizeof(T));
}

}  // namespace graphcore
