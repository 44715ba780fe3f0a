// Attention of one token over a cache of keys and values of any format that heads.h reads.
//
// A cache is a pool of pages, [pages, kv_heads, page entries], and a sequence has a row of a page table: position p is in page
// table[(p / page) % num_pages], slot p % page. Keys are always processed in the order of their positions, so that results do
// not depend on the pages.
#pragma once

#include <algorithm>
#include <type_traits>

#include "byte_scores.h"
#include "lanes.h"

namespace graphcore {

constexpr int MOST_HEADS = 4;  // largest number of query heads of one kv head that share the widening of its keys

// Computes totals[k][h], whose lanes add up to q[h] . key, for keys slot .. slot + KEYS - 1. Several keys share a load of q.
template <class Reader, int HEADS, int KEYS>
inline void multiply_keys(const float* q, const Reader& keys, int head_dim, int slot, FloatPart totals[KEYS][HEADS]) {
    constexpr int UNIT = Reader::UNIT;
    const int whole = head_dim / (UNIT * PART_LANES) * (UNIT * PART_LANES);
    FloatPart sums[KEYS][HEADS] = {};
    for (int e = 0; e < whole; e += UNIT * PART_LANES) {
        FloatPart parts[KEYS][UNIT];
        for (int k = 0; k < KEYS; k++) keys.template widen<UNIT>(slot + k, e, parts[k]);
        for (int p = 0; p < UNIT; p++)
            for (int h = 0; h < HEADS; h++) {
                const FloatPart here = load<FloatPart>(q + h * head_dim + e + p * PART_LANES);
                for (int k = 0; k < KEYS; k++) sums[k][h] += here * parts[k][p];
            }
    }
    if constexpr (Reader::HAS_REST)
        for (int e = whole; e < head_dim; e++)
            for (int k = 0; k < KEYS; k++)
                for (int h = 0; h < HEADS; h++) sums[k][h][0] += q[h * head_dim + e] * keys.one(slot + k, e);
    for (int k = 0; k < KEYS; k++)
        for (int h = 0; h < HEADS; h++) totals[k][h] = sums[k][h];
}

// Computes scores[h][i] = q[h] . key i for the keys of a run.
template <class Reader, int HEADS>
void score_keys(const float* q, const Run& run, float* scores, size_t score_stride) {
    constexpr int KEYS = PARTS > 1 ? 1 : 4;  // keys whose sums stay in registers
    const Reader keys(run.entries);
    const int head_dim = run.entries.head_dim;
    const size_t nbytes = run.nbytes();
    for (int first = 0; first < run.count; first += PART_LANES) {
        FloatPart products[HEADS][PART_LANES];
        const int here = run.count - first < PART_LANES ? run.count - first : PART_LANES;
        if (here < PART_LANES) std::memset(products, 0, sizeof(products));
        for (int i = 0; i < here; i++) fetch_ahead(run.next, first + i, nbytes);
        int i = 0;
        for (; i + KEYS <= here; i += KEYS) {
            FloatPart totals[KEYS][HEADS];
            multiply_keys<Reader, HEADS, KEYS>(q, keys, head_dim, run.first + first + i, totals);
            for (int k = 0; k < KEYS; k++)
                for (int h = 0; h < HEADS; h++) products[h][i + k] = totals[k][h];
        }
        for (; i < here; i++) {
            FloatPart totals[1][HEADS];
            multiply_keys<Reader, HEADS, 1>(q, keys, head_dim, run.first + first + i, totals);
            for (int h = 0; h < HEADS; h++) products[h][i] = totals[0][h];
        }
        for (int h = 0; h < HEADS; h++) {
            const FloatPart sums = sums_of_rows(products[h]);
            std::memcpy(scores + h * score_stride + first, &sums, size_t(here) * 4);
        }
    }
}

// Computes out[h] += sum over i of weights[h][i] * value i of a run, for features e .. e + WIDTH * PART_LANES - 1 of the entries,
// whose values begin at feature `from`.
template <class Reader, int HEADS, int WIDTH>
inline void add_features(const float* weights, size_t weight_stride, const Reader& values, const Run& run, int from, int e, float* out) {
    constexpr int UNIT = Reader::UNIT < WIDTH ? Reader::UNIT : WIDTH;
    const int width = run.entries.head_dim - from;
    const size_t nbytes = run.nbytes();
    FloatPart totals[HEADS][WIDTH];
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < WIDTH; v++) totals[h][v] = load<FloatPart>(out + h * width + e - from + v * PART_LANES);
    for (int i = 0; i < run.count; i++) {
        if (e == from) fetch_ahead(run.next, i, nbytes);
        for (int v = 0; v < WIDTH; v += UNIT) {
            FloatPart parts[UNIT];
            values.template widen<UNIT>(run.first + i, e + v * PART_LANES, parts);
            for (int p = 0; p < UNIT; p++)
                for (int h = 0; h < HEADS; h++) totals[h][v + p] += splat(weights[h * weight_stride + i]) * parts[p];
        }
    }
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < WIDTH; v++) store(out + h * width + e - from + v * PART_LANES, totals[h][v]);
}

// Does the same as add_features with quantised values. Their scales are multiplied with the weights, one vector of keys at a
// time, and not with every number.
template <class Reader, int HEADS, int WIDTH>
inline void add_levels(const float* weights, size_t weight_stride, const Reader& values, const Run& run, int from, int e, float* out) {
    constexpr int UNIT = Reader::UNIT < WIDTH ? Reader::UNIT : WIDTH, BLOCKS = WIDTH / UNIT;
    const int width = run.entries.head_dim - from;
    const size_t nbytes = run.nbytes();
    FloatPart totals[HEADS][WIDTH];
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < WIDTH; v++) totals[h][v] = load<FloatPart>(out + h * width + e - from + v * PART_LANES);
    for (int first = 0; first < run.count; first += PART_LANES) {
        const int here = std::min(PART_LANES, run.count - first);
        float scaled[BLOCKS][HEADS][PART_LANES];
        for (int b = 0; b < BLOCKS; b++) {
            const FloatPart scales = values.scales_of(run.first + first, here, e / CACHE_BLOCK + b);
            for (int h = 0; h < HEADS; h++) store(scaled[b][h], load<FloatPart>(weights + h * weight_stride + first) * scales);
        }
        for (int i = 0; i < here; i++) {
            if (e == from) fetch_ahead(run.next, first + i, nbytes);
            for (int b = 0; b < BLOCKS; b++) {
                FloatPart parts[UNIT];
                values.template levels<UNIT>(run.first + first + i, e + b * UNIT * PART_LANES, parts);
                for (int p = 0; p < UNIT; p++)
                    for (int h = 0; h < HEADS; h++) totals[h][b * UNIT + p] += splat(scaled[b][h][i]) * parts[p];
            }
        }
    }
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < WIDTH; v++) store(out + h * width + e - from + v * PART_LANES, totals[h][v]);
}

// Computes out[h] += sum over i of weights[h][i] * value i for the values of a run, which begin at feature `from` of an entry.
template <class Reader, int HEADS>
void add_values(const float* weights, size_t weight_stride, const Run& run, int from, float* out) {
    constexpr int WIDTH = PARTS > 1 && HEADS > 3 ? 2 : 4;  // vectors of each head that stay in registers
    const Reader values(run.entries);
    const int head_dim = run.entries.head_dim;
    int e = from;
    if constexpr (!Reader::HAS_REST) {
        for (; e + WIDTH * PART_LANES <= head_dim; e += WIDTH * PART_LANES)
            add_levels<Reader, HEADS, WIDTH>(weights, weight_stride, values, run, from, e, out);
        for (; e < head_dim; e += LANES) add_levels<Reader, HEADS, PARTS>(weights, weight_stride, values, run, from, e, out);  // the last block
        return;
    }
    for (; e + WIDTH * PART_LANES <= head_dim; e += WIDTH * PART_LANES)
        add_features<Reader, HEADS, WIDTH>(weights, weight_stride, values, run, from, e, out);
    for (int i = 0; i < run.count; i++)
        for (int rest = e; rest < head_dim; rest++)
            for (int h = 0; h < HEADS; h++)
                out[h * (head_dim - from) + rest - from] += weights[h * weight_stride + i] * values.one(run.first + i, rest);
}

// Replaces each score by cap * tanh(score / cap), to within cap * 2^-22.
inline void cap_scores(float* scores, int count, float cap) {
    const float steps = 1.0f / cap;
    int i = 0;
    for (; i + PART_LANES <= count; i += PART_LANES)
        store(scores + i, splat(cap) * hyperbolic_tangent(load<FloatPart>(scores + i) * splat(steps)));
    for (; i < count; i++) scores[i] = cap * std::tanh(scores[i] * steps);
}

// Replaces scores by their softmax. A sink (which may be null) is an extra score in the sum, without a value.
inline void softmax(float* scores, int count, const float* sink) {
    float most = sink ? *sink : -INFINITY;
    int at = 0;
    if (count >= PART_LANES) {
        FloatPart mosts = splat(most);
        for (; at + PART_LANES <= count; at += PART_LANES) mosts = larger(load<FloatPart>(scores + at), mosts);
        most = largest(mosts);
    }
    for (; at < count; at++) most = std::max(most, scores[at]);
    const FloatPart shift = splat(most);
    FloatPart total[PARTS] = {};
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int p = 0; p < PARTS; p++) {
            const FloatPart weight = exponential(load<FloatPart>(scores + i + p * PART_LANES) - shift);
            store(scores + i + p * PART_LANES, weight);
            total[p] += weight;
        }
    if (i < count) {
        float last[LANES];
        std::fill(last, last + LANES, -INFINITY);  // whose weights are 0
        std::memcpy(last, scores + i, size_t(count - i) * 4);
        for (int p = 0; p < PARTS; p++) {
            const FloatPart weight = exponential(load<FloatPart>(last + p * PART_LANES) - shift);
            store(last + p * PART_LANES, weight);
            total[p] += weight;
        }
        std::memcpy(scores + i, last, size_t(count - i) * 4);
    }
    const float scale = 1.0f / (sum(total) + (sink ? std::exp(*sink - most) : 0.0f));
    for (i = 0; i < count; i++) scores[i] *= scale;
}

// The pages of one sequence: maps its positions to entries of a pool.
struct Places {
    const int32_t* pages;  // [num_pages]
    int num_pages, page, kv_heads;

    int64_t slots() const { return int64_t(num_pages) * page; }

    // Returns the entries of a pool's page that holds a position, and the position's slot there.
    Entries of(uint8_t* pool, int format, int head_dim, int64_t position, int kv_head) const {
        const size_t index = size_t(pages[position / page % num_pages]) * kv_heads + kv_head;
        return {pool + index * page * entry_nbytes(format, head_dim), format, head_dim, page};
    }
    int slot(int64_t position) const { return int(position % page); }
};

// The keys or values that a token sees: those of positions begin .. end - 1 from one kv head's pages, then new ones.
struct Visible {
    uint8_t* pool;
    Places places;
    int format, kv_head, head_dim;
    int64_t begin, end;
    Entries fresh;

    int count() const { return int(end - begin) + fresh.slots; }

    // Calls use(run) for each run, in the order of positions.
    template <class F>
    void for_each_run(F use) const {
        const auto entries_at = [&](int64_t position) { return places.of(pool, format, head_dim, position, kv_head); };
        Entries entries = begin < end ? entries_at(begin) : fresh;
        for (int64_t at = begin; at < end;) {
            const int first = places.slot(at), here = int(std::min(end - at, int64_t(places.page - first)));
            Run run{entries, first, here, nullptr};
            at += here;
            if (at < end) entries = entries_at(at), run.next = entries.base;
            use(run);
        }
        if (fresh.slots) use(Run{fresh, 0, fresh.slots, nullptr});
    }
};

// Returns the floats of scratch that attention needs: the new entries of a sequence's rows, the queries of MOST_HEADS heads, as
// much for their digits (byte_scores.h), and their scores.
inline size_t attend_floats(int head_dim, int keys, int rows) {
    return size_t(2 * rows + 2 * MOST_HEADS) * head_dim + size_t(MOST_HEADS) * (keys + LANES);
}

// Computes out[h] = softmax(capped(q[h] . keys)) values for HEADS rows of q. values_from: first feature of a value in its
// entry. work: [HEADS, head_dim].
template <int HEADS>
void attend_rows(const float* q, const Visible& keys, const Visible& values, int values_from, const float* sinks, float cap, float* work, float* scores, float* out) {
    const int count = keys.count(), head_dim = keys.head_dim, value_dim = head_dim - values_from;
    const size_t stride = size_t(count) + LANES;
    int at = 0;
    with_reader(keys.format, [&](auto* type) {
        using Reader = std::remove_pointer_t<decltype(type)>;
        const auto score = [&](const auto& score_run) {
            keys.for_each_run([&](const Run& run) {
                score_run(run, scores + at);
                at += run.count;
            });
        };
#if GRAPHCORE_BYTE_SCORES
        if constexpr (is_mixed(Reader::FORMAT)) {
            const Digits<HEADS> digits(q, head_dim, zero_of(Reader::FORMAT), work);
            return score([&](const Run& run, float* to) { score_codes<Reader::FORMAT, HEADS>(digits, run, to, stride); });
        }
#endif
        score([&](const Run& run, float* to) { score_keys<Reader, HEADS>(q, run, to, stride); });
    });
    for (int h = 0; h < HEADS; h++) {
        if (cap) cap_scores(scores + h * stride, count, cap);
        softmax(scores + h * stride, count, sinks ? sinks + h : nullptr);
    }
    std::memset(out, 0, size_t(HEADS) * value_dim * 4);
    at = 0;
    with_reader(values.format, [&](auto* type) {
        values.for_each_run([&](const Run& run) {
            add_values<std::remove_pointer_t<decltype(type)>, HEADS>(scores + at, stride, run, values_from, out);
            at += run.count;
        });
    });
    if (is_mixed(values.format))
        for (int h = 0; h < HEADS; h++) mix_head(out + h * value_dim, value_dim, mix_size(head_dim));
}

inline void attend_some(int heads, const float* q, const Visible& keys, const Visible& values, int values_from, const float* sinks, float cap, float* work, float* scores, float* out) {
    switch (heads) {
        case 1: return attend_rows<1>(q, keys, values, values_from, sinks, cap, work, scores, out);
        case 2: return attend_rows<2>(q, keys, values, values_from, sinks, cap, work, scores, out);
        case 3: return attend_rows<3>(q, keys, values, values_from, sinks, cap, work, scores, out);
        default: return attend_rows<MOST_HEADS>(q, keys, values, values_from, sinks, cap, work, scores, out);
    }
}

// Returns the rope of a row's token, or null.
inline const float* rope_of(const Attend& a, int row) { return a.rope ? a.rope + a.starts[row] * (a.head_dim - a.unrotated) : nullptr; }

// Returns the factor of scores of a query at this position.
inline float scale_at(const Attend& a, int64_t position) {
    return a.period ? a.scale * (1.0f + a.beta * std::log(float(1 + position / a.period))) : a.scale;
}

// Computes the cache entries of the key and value of a row's token, or their common one. work: [head_dim].
inline void make_entry(const Attend& a, int row, int kv_head, float* work, const Entries& keys, const Entries& values, int slot) {
    const int head_dim = a.head_dim, key_dim = a.values_from ? a.values_from : head_dim, value_dim = head_dim - a.values_from;
    const float* rope = rope_of(a, row);
    normalise(a.k_norm, a.k.at(row) + size_t(kv_head) * key_dim, key_dim, work);
    if (rope) rotate(work, rope, head_dim - a.unrotated);
    if (!a.values_from) keys.put(slot, work);
    normalise(a.v_norm, a.v.at(row) + size_t(kv_head) * value_dim, value_dim, work + a.values_from);
    (a.values_from ? keys : values).put(slot, work);
}

// Computes attention for query heads first .. last - 1 of the nth row's token, which share a kv head. Every thread itself
// computes the new entries that the row sees: the row's own and those of the sequence's earlier rows. The thread with the kv
// head's first query head also writes the row's own entry to the cache; no thread reads that slot before the next phase.
inline void attend_heads(const Attend& a, const Rows& rows, int nth, int first, int last, float* scratch) {
    const int row = rows.index[nth];
    const int group = a.heads / a.kv_heads, kv_head = first / group, head_dim = a.head_dim;
    const int64_t position = a.starts[row];
    const float* rope = rope_of(a, row);
    const float scale = scale_at(a, position);
    const Places places{a.table + a.sequences[row] * a.num_pages, a.num_pages, a.page, a.kv_heads};
    const int64_t reach = a.window && a.window < places.slots() ? a.window : places.slots();
    const int64_t begin = std::max<int64_t>(0, position + 1 - reach), end = position + 1;  // positions that are attended
    const int made = a.k ? int(std::min<int64_t>(rows.earlier[nth] + 1, end - begin)) : 0;  // the last of them, not read from the cache
    float *q = scratch + size_t(2 * made) * head_dim, *work = q + MOST_HEADS * head_dim, *scores = work + MOST_HEADS * head_dim;
    const Entries new_keys{(uint8_t*)scratch, a.k_format, head_dim, made};
    const Entries new_values = a.values_from ? new_keys : Entries{(uint8_t*)(scratch + size_t(made) * head_dim), a.v_format, head_dim, made};
    for (int i = 0; i < made; i++) make_entry(a, rows.index[nth + 1 - made + i], kv_head, q, new_keys, new_values, i);
    const Visible keys{a.k_cache, places, a.k_format, kv_head, head_dim, begin, end - made, new_keys};
    const Visible values{a.v_cache, places, a.v_format, kv_head, head_dim, begin, end - made, new_values};
    const bool writes = a.k && first % group == 0;
    for (int together; first < last; first += together) {
        together = std::min(last - first, MOST_HEADS);
        for (int h = 0; h < together; h++) {
            float* head = q + h * head_dim;
            normalise(a.q_norm, a.q.at(row) + size_t(first + h) * head_dim, head_dim, head);
            if (rope) rotate(head, rope, head_dim - a.unrotated);
            if (is_mixed(a.k_format)) mix_head(head, head_dim);
            for (int e = 0; e < head_dim; e++) head[e] *= scale;
        }
        const float* sinks = a.sinks ? a.sinks + first : nullptr;
        attend_some(together, q, keys, values, a.values_from, sinks, a.cap, work, scores, a.out.at(row) + size_t(first) * (head_dim - a.values_from));
    }
    if (!writes) return;
    places.of(a.k_cache, a.k_format, head_dim, position, kv_head).copy(places.slot(position), new_keys, made - 1);
    if (a.values_from) return;
    places.of(a.v_cache, a.v_format, head_dim, position, kv_head).copy(places.slot(position), new_values, made - 1);
}

}  // namespace graphcore
