// Attention of one token over a cache of fp32, fp16 or bf16 keys and values.
//
// A cache is a pool of pages, [pages, kv_heads, page, head_dim], and a sequence has a row of a table: position p lies in page
// table[(p / page) % num_pages], place p % page. Keys are always taken in the order of their positions, so that no number
// depends on where they lie.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace graphcore {

inline void narrow(float value, float* to) { *to = value; }
inline void narrow(float value, Bf16* to) { to->bits = float_to_bf16(value); }
inline void narrow(float value, Fp16* to) { to->bits = float_to_half(value); }

constexpr int MOST_HEADS = 4;  // most query heads of one kv head that share the widening of its keys

// Returns [sum(rows[0]), sum(rows[1]), ...]. It folds halves onto each other until each lane holds one row's sum.
#if GRAPHCORE_AVX2
inline FloatPart sums_of_rows(const FloatPart rows[PART_LANES]) {
    __m256 four[2];
    for (int i = 0; i < 2; i++) {
        const __m256 first = _mm256_hadd_ps((__m256)rows[4 * i], (__m256)rows[4 * i + 1]);
        four[i] = _mm256_hadd_ps(first, _mm256_hadd_ps((__m256)rows[4 * i + 2], (__m256)rows[4 * i + 3]));
    }
    return (FloatPart)_mm256_permute2f128_ps(four[0], four[1], 0x20) + (FloatPart)_mm256_permute2f128_ps(four[0], four[1], 0x31);
}
#else
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
#endif

// Brings a vector of the next run into the second cache; null for none. Hardware foresees no jump to another page.
template <class T>
inline void fetch_ahead(const T* next, int index, int head_dim) {
    if (!next) return;
    const char* from = (const char*)(next + size_t(index) * head_dim);
    for (size_t byte = 0; byte < head_dim * sizeof(T); byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

// Computes scores[h][i] = q[h] . keys[i] for `count` contiguous keys. next: the keys after them, or null.
template <class T, int HEADS>
void score_keys(const float* q, const T* keys, const T* next, int count, int head_dim, float* scores, size_t score_stride) {
    const int whole = head_dim / PART_LANES * PART_LANES;
    for (int first = 0; first < count; first += PART_LANES) {
        FloatPart products[HEADS][PART_LANES] = {};
        const int here = count - first < PART_LANES ? count - first : PART_LANES;
        for (int i = 0; i < here; i++) {
            const T* key = keys + size_t(first + i) * head_dim;
            fetch_ahead(next, first + i, head_dim);
            FloatPart totals[HEADS] = {};
            for (int e = 0; e < whole; e += PART_LANES) {
                const FloatPart part = widen(key + e);
                for (int h = 0; h < HEADS; h++) totals[h] += load<FloatPart>(q + h * head_dim + e) * part;
            }
            for (int e = whole; e < head_dim; e++)
                for (int h = 0; h < HEADS; h++) totals[h][0] += q[h * head_dim + e] * widen_one(key + e);
            for (int h = 0; h < HEADS; h++) products[h][i] = totals[h];
        }
        for (int h = 0; h < HEADS; h++) {
            const FloatPart sums = sums_of_rows(products[h]);
            std::memcpy(scores + h * score_stride + first, &sums, size_t(here) * 4);
        }
    }
}

// Computes out[h] += sum over i of weights[h][i] * values[i]. next: the values after them, or null.
template <class T, int HEADS>
void add_values(const float* weights, size_t weight_stride, const T* values, const T* next, int count, int head_dim, float* out) {
    constexpr int WIDTH = PARTS > 1 && HEADS > 3 ? 2 : 4;  // vectors of each head that stay in registers
    int e = 0;
    for (; e + WIDTH * PART_LANES <= head_dim; e += WIDTH * PART_LANES) {
        FloatPart totals[HEADS][WIDTH];
        for (int h = 0; h < HEADS; h++)
            for (int v = 0; v < WIDTH; v++) totals[h][v] = load<FloatPart>(out + h * head_dim + e + v * PART_LANES);
        for (int i = 0; i < count; i++) {
            if (e == 0) fetch_ahead(next, i, head_dim);
            for (int v = 0; v < WIDTH; v++) {
                const FloatPart part = widen(values + size_t(i) * head_dim + e + v * PART_LANES);
                for (int h = 0; h < HEADS; h++) totals[h][v] += splat(weights[h * weight_stride + i]) * part;
            }
        }
        for (int h = 0; h < HEADS; h++)
            for (int v = 0; v < WIDTH; v++) store(out + h * head_dim + e + v * PART_LANES, totals[h][v]);
    }
    for (int i = 0; i < count; i++)
        for (int rest = e; rest < head_dim; rest++)
            for (int h = 0; h < HEADS; h++)
                out[h * head_dim + rest] += weights[h * weight_stride + i] * widen_one(values + size_t(i) * head_dim + rest);
}

// Replaces each score by cap * tanh(score / cap), to within cap * 2^-22.
inline void cap_scores(float* scores, int count, float cap) {
    const float steps = 1.0f / cap;
    int i = 0;
    for (; i + PART_LANES <= count; i += PART_LANES)
        store(scores + i, splat(cap) * hyperbolic_tangent(load<FloatPart>(scores + i) * splat(steps)));
    for (; i < count; i++) scores[i] = cap * std::tanh(scores[i] * steps);
}

// Replaces scores by their softmax. A sink (which may be null) counts in the sum like one more score, but has no value.
inline void softmax(float* scores, int count, const float* sink) {
    float most = sink ? *sink : -INFINITY;
    for (int i = 0; i < count; i++) most = std::max(most, scores[i]);
    const FloatPart shift = splat(most);
    FloatPart total[PARTS] = {};
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int p = 0; p < PARTS; p++) {
            const FloatPart weight = exponential(load<FloatPart>(scores + i + p * PART_LANES) - shift);
            store(scores + i + p * PART_LANES, weight);
            total[p] += weight;
        }
    float rest = sum(total) + (sink ? std::exp(*sink - most) : 0.0f);
    for (; i < count; i++) rest += scores[i] = std::exp(scores[i] - most);
    const float scale = 1.0f / rest;
    for (i = 0; i < count; i++) scores[i] *= scale;
}

// Contiguous keys and values, and those of the run after them in the pages; null for the last.
template <class T>
struct Run {
    const T *keys, *values;
    int count;
    const T *next_keys = nullptr, *next_values = nullptr;
};

// The places of one sequence's positions in a pool.
struct Places {
    const int32_t* pages;  // [num_pages]
    int num_pages, page, kv_heads;

    int64_t slots() const { return int64_t(num_pages) * page; }

    // Returns the index of a position's vector, among those of the pool.
    size_t of(int64_t position, int kv_head) const {
        const size_t in_page = size_t(position % page);
        return (size_t(pages[position / page % num_pages]) * kv_heads + kv_head) * page + in_page;
    }
};

// The keys and values that a token sees: those of positions begin .. end - 1 from one kv head's pages, then new ones.
template <class T>
struct Visible {
    const T *keys, *values;  // pools
    Places places;
    int kv_head, head_dim;
    int64_t begin, end;
    Run<T> fresh;

    int count() const { return int(end - begin) + fresh.count; }

    // Calls use(run) for each run, in the order of positions.
    template <class F>
    void for_each_run(F use) const {
        size_t first = begin < end ? places.of(begin, kv_head) * head_dim : 0;
        for (int64_t at = begin; at < end;) {
            const int here = int(std::min(end - at, places.page - at % places.page));
            Run<T> run{keys + first, values + first, here};
            at += here;
            if (at < end) {
                first = places.of(at, kv_head) * head_dim;
                run.next_keys = keys + first, run.next_values = values + first;
            }
            use(run);
        }
        use(fresh);
    }
};

// Returns the floats of scratch that attention takes: the new entries of a sequence's rows, the queries of MOST_HEADS heads, and
// their scores.
inline size_t attend_floats(int head_dim, int keys, int rows) {
    return size_t(2 * rows + MOST_HEADS) * head_dim + size_t(MOST_HEADS) * (keys + LANES);
}

// Computes out[h] = softmax(capped(q[h] . keys)) values for HEADS rows of q.
template <class T, int HEADS>
void attend_rows(const float* q, const Visible<T>& seen, const float* sinks, float cap, float* scores, float* out) {
    const int count = seen.count(), head_dim = seen.head_dim;
    const size_t stride = size_t(count) + LANES;
    int at = 0;
    seen.for_each_run([&](const Run<T>& run) {
        score_keys<T, HEADS>(q, run.keys, run.next_keys, run.count, head_dim, scores + at, stride);
        at += run.count;
    });
    for (int h = 0; h < HEADS; h++) {
        if (cap) cap_scores(scores + h * stride, count, cap);
        softmax(scores + h * stride, count, sinks ? sinks + h : nullptr);
    }
    std::memset(out, 0, size_t(HEADS) * head_dim * 4);
    at = 0;
    seen.for_each_run([&](const Run<T>& run) {
        add_values<T, HEADS>(scores + at, stride, run.values, run.next_values, run.count, head_dim, out);
        at += run.count;
    });
}

template <class T>
void attend_some(int heads, const float* q, const Visible<T>& seen, const float* sinks, float cap, float* scores, float* out) {
    switch (heads) {
        case 1: return attend_rows<T, 1>(q, seen, sinks, cap, scores, out);
        case 2: return attend_rows<T, 2>(q, seen, sinks, cap, scores, out);
        case 3: return attend_rows<T, 3>(q, seen, sinks, cap, scores, out);
        default: return attend_rows<T, MOST_HEADS>(q, seen, sinks, cap, scores, out);
    }
}

// Returns the rope of a row's token, or null.
inline const float* rope_of(const Attend& a, int row) { return a.rope ? a.rope + a.starts[row] * (a.head_dim - a.unrotated) : nullptr; }

// Makes the key and value of a row's token in the cache's format: [head_dim] each.
template <class T>
void make_entry(const Attend& a, int row, int kv_head, float* work, T* key, T* value) {
    const int head_dim = a.head_dim;
    const float* rope = rope_of(a, row);
    normalise(a.k_norm, a.k.at(row) + size_t(kv_head) * head_dim, head_dim, work);
    if (rope) rotate(work, rope, head_dim - a.unrotated);
    for (int e = 0; e < head_dim; e++) narrow(work[e], key + e);
    normalise(a.v_norm, a.v.at(row) + size_t(kv_head) * head_dim, head_dim, work);
    for (int e = 0; e < head_dim; e++) narrow(work[e], value + e);
}

// Attends with heads first .. last - 1 of the nth row's token, which belong to one kv head. Every thread makes the new entries
// that the row sees for itself, its own and those of the sequence's earlier rows. The thread that has the kv head's first query
// head also writes the row's own entry to the cache; nobody reads that slot before the next phase.
template <class T>
void attend_heads(const Attend& a, const Rows& rows, int nth, int first, int last, float* scratch) {
    const int row = rows.index[nth];
    const int group = a.heads / a.kv_heads, kv_head = first / group, head_dim = a.head_dim;
    const int64_t position = a.starts[row];
    const float* rope = rope_of(a, row);
    const Places places{a.table + a.sequences[row] * a.num_pages, a.num_pages, a.page, a.kv_heads};
    T *keys = (T*)a.k_cache, *values = (T*)a.v_cache;
    const int64_t reach = a.window && a.window < places.slots() ? a.window : places.slots();
    const int64_t begin = std::max<int64_t>(0, position + 1 - reach), end = position + 1;  // positions that are attended
    const int made = a.k ? int(std::min<int64_t>(rows.earlier[nth] + 1, end - begin)) : 0;  // the last of them, not read from the cache
    T *new_keys = (T*)scratch, *new_values = new_keys + size_t(made) * head_dim;  // [made, head_dim] each
    float *q = scratch + size_t(2 * made) * head_dim, *scores = q + MOST_HEADS * head_dim;
    for (int i = 0; i < made; i++)
        make_entry(a, rows.index[nth + 1 - made + i], kv_head, q, new_keys + size_t(i) * head_dim, new_values + size_t(i) * head_dim);
    const Visible<T> seen{keys, values, places, kv_head, head_dim, begin, end - made, {new_keys, new_values, made}};
    const bool writes = a.k && first % group == 0;
    for (int together; first < last; first += together) {
        together = std::min(last - first, MOST_HEADS);
        for (int h = 0; h < together; h++) {
            float* head = q + h * head_dim;
            normalise(a.q_norm, a.q.at(row) + size_t(first + h) * head_dim, head_dim, head);
            if (rope) rotate(head, rope, head_dim - a.unrotated);
            for (int e = 0; e < head_dim; e++) head[e] *= a.scale;
        }
        const float* sinks = a.sinks ? a.sinks + first : nullptr;
        attend_some<T>(together, q, seen, sinks, a.cap, scores, a.out.at(row) + size_t(first) * head_dim);
    }
    if (!writes) return;
    const size_t place = places.of(position, kv_head) * head_dim, own = size_t(made - 1) * head_dim;
    std::memcpy(keys + place, new_keys + own, size_t(head_dim) * sizeof(T));
    std::memcpy(values + place, new_values + own, size_t(head_dim) * sizeof(T));
}

}  // namespace graphcore
