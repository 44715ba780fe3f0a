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

template <class T>
inline float dot(const float* q, const T* key, int head_dim) {
    f32x16 total{};
    int e = 0;
    for (; e + LANES <= head_dim; e += LANES) total += load<f32x16>(q + e) * widen(key + e);
    float rest = sum(total);
    for (; e < head_dim; e++) rest += q[e] * widen_one(key + e);
    return rest;
}

template <class T>
inline void add_scaled(float weight, const T* value, int head_dim, float* out) {
    int e = 0;
    for (; e + LANES <= head_dim; e += LANES) store(out + e, load<f32x16>(out + e) + splat(weight) * widen(value + e));
    for (; e < head_dim; e++) out[e] += weight * widen_one(value + e);
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

template <class T>
void attend_heads(const Attend& a, int first_head, int last_head, bool writes, float* scratch) {
    const int group = a.heads / a.kv_heads, kv_head = first_head / group, head_dim = a.head_dim;
    const int64_t position = *a.position;
    const Live live = live_slots(position, a.slots, a.window);
    const float* rope = a.rope ? a.rope + position * head_dim : nullptr;
    T* keys = (T*)a.k_cache + size_t(kv_head) * a.slots * head_dim;
    T* values = (T*)a.v_cache + size_t(kv_head) * a.slots * head_dim;
    float* work = scratch;  // one head
    T* own = (T*)(scratch + head_dim);  // the new key, then the new value, as the cache will hold them
    float* scores = scratch + 3 * head_dim;
    normalise(a.k_norm, a.k + size_t(kv_head) * head_dim, head_dim, work);
    if (rope) rotate(work, rope, head_dim);
    for (int e = 0; e < head_dim; e++) {
        narrow(work[e], own + e);
        narrow(a.v[size_t(kv_head) * head_dim + e], own + head_dim + e);
    }
    for (int head = first_head; head < last_head; head++) {
        normalise(a.q_norm, a.q + size_t(head) * head_dim, head_dim, work);
        if (rope) rotate(work, rope, head_dim);
        float* score = scores;
        for (int run = 0; run < 2; run++)
            for (int slot = live.begin[run]; slot < live.end[run]; slot++)
                *score++ = a.scale * dot(work, keys + size_t(slot) * head_dim, head_dim);
        *score = a.scale * dot(work, own, head_dim);
        softmax(scores, live.count + 1, a.sinks ? a.sinks + head : nullptr);
        float* out = a.out + size_t(head) * head_dim;
        std::memset(out, 0, size_t(head_dim) * 4);
        score = scores;
        for (int run = 0; run < 2; run++)
            for (int slot = live.begin[run]; slot < live.end[run]; slot++)
                add_scaled(*score++, values + size_t(slot) * head_dim, head_dim, out);
        add_scaled(*score, own + head_dim, head_dim, out);
    }
    if (writes) {
        const size_t slot = size_t(position % a.slots) * head_dim;
        std::memcpy(keys + slot, own, size_t(head_dim) * sizeof(T));
        std::memcpy(values + slot, own + head_dim, size_t(head_dim) * sizeof(T));
    }
}

}  // namespace graphcore
