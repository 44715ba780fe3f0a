// Gated DeltaNet between a layer's projections: short convolution, gates, gated delta rule, gated norm.
//
// A head's state is a matrix S [key_dim, value_dim]. The rule processes up to sixteen tokens together, so that S is read and
// written once for all of them. With d(i) the sum of their decays up to token i, the changes c(i) solve a small system:
//
//     c(i) = beta(i) (v(i) - exp(d(i)) k(i) S) - beta(i) sum over j < i of exp(d(i) - d(j)) (k(i) . k(j)) c(j)
//     o(i) = exp(d(i)) q(i) S + sum over j <= i of exp(d(i) - d(j)) (q(i) . k(j)) c(j)
//     S    = exp(d(last)) S + sum over i of exp(d(last) - d(i)) k(i) c(i)
//
// More tokens at a time would save few reads, and cost more products between tokens.
#pragma once

#include "convolution.h"

namespace graphcore {

constexpr int SLAB = 64;            // tokens that are convolved before the rule processes them
constexpr int TOGETHER = LANES;     // tokens that the rule processes together

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 8, STATE_ROWS = 4, WIDE_PARTS = 8;
#else
constexpr int TILE_ROWS = 4, STATE_ROWS = 2, WIDE_PARTS = 4;
#endif

inline int delta_channels(const Delta& a) { return 2 * a.key_heads * a.key_dim + a.heads * a.value_dim; }
inline size_t token_row(const Delta& a, int sequence, int token) { return size_t(sequence) * a.tokens + token; }
inline size_t cache_of(const Delta& a, int sequence) { return a.caches ? size_t(a.caches[sequence]) : size_t(sequence); }
inline int slab_tokens(const Delta& a) { return std::min(a.tokens, SLAB); }

// Returns the floats of scratch that the rule needs: keys, queries, outputs and changes of the tokens, transposed keys, and
// products between tokens.
inline size_t delta_floats(int key_dim, int value_dim) {
    return size_t(3 * TOGETHER) * key_dim + size_t(3 * TOGETHER) * value_dim + size_t(2 * TOGETHER) * TOGETHER + LANES;
}

// ---- The convolution

// Convolves a block of channels of one sequence over a slab of tokens, and writes the state after the last real token.
inline void convolve_block(const Delta& a, int unit, int slab) {
    const int channels = delta_channels(a), blocks = channel_blocks(channels), sequence = unit / blocks;
    const int first = slab * SLAB, end = std::min(first + SLAB, int(a.counts[sequence]));
    const auto read = [&](int token, int channel, int count, float* to) {
        const size_t from = token_row(a, sequence, token) * a.strides[0] + channel;
        widen_row(a.mixed + from * format_nbytes(a.format), count, a.format, to);
    };
    const auto put = [&](int token, int channel, int count, float* sums) {
        for (int c = 0; c < CHANNEL_BLOCK; c += PART_LANES) store(sums + c, activate_part(Activation::SILU, load<FloatPart>(sums + c)));
        const size_t to = (size_t(sequence) * slab_tokens(a) + token - first) * channels + channel;
        std::memcpy(a.joined + to, sums, size_t(count) * 4);
    };
    const Taps taps = {a.conv_weight, a.conv_bias, a.convolution, a.starts, a.counts, a.caches, channels, a.width, a.state_format};
    convolve_channels(taps, sequence, unit % blocks * CHANNEL_BLOCK, first, end, read, put);
}

// ---- The rule

// Computes out[r] = sum over i of rows[r][i] * matrix[i] for ROWS rows, over VECTORS parts of its columns.
template <int ROWS, int VECTORS>
inline void multiply_tile(const float* rows, int depth, const float* matrix, int stride, float* out) {
    FloatPart sums[ROWS][VECTORS] = {};
    for (int i = 0; i < depth; i++) {
        FloatPart values[VECTORS];
        for (int v = 0; v < VECTORS; v++) values[v] = load<FloatPart>(matrix + size_t(i) * stride + v * PART_LANES);
        for (int r = 0; r < ROWS; r++) {
            const FloatPart factor = splat(rows[r * depth + i]);
            for (int v = 0; v < VECTORS; v++) sums[r][v] += factor * values[v];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(out + size_t(r) * stride + v * PART_LANES, sums[r][v]);
}

template <int ROWS, int VECTORS>
inline void multiply_some(const float* rows, int depth, const float* matrix, int columns, float* out) {
    int column = 0;
    for (; column + VECTORS * PART_LANES <= columns; column += VECTORS * PART_LANES)
        multiply_tile<ROWS, VECTORS>(rows, depth, matrix + column, columns, out + column);
    for (; column + PART_LANES <= columns; column += PART_LANES)
        multiply_tile<ROWS, 1>(rows, depth, matrix + column, columns, out + column);
    for (; column < columns; column++)
        for (int r = 0; r < ROWS; r++) {
            float total = 0;
            for (int i = 0; i < depth; i++) total += rows[r * depth + i] * matrix[size_t(i) * columns + column];
            out[size_t(r) * columns + column] = total;
        }
}

// Computes out = rows @ matrix. rows: [count, depth].  matrix: [depth, columns].  count: even.
inline void multiply_rows(const float* rows, int count, int depth, const float* matrix, int columns, float* out) {
    int r = 0;
    for (; r + TILE_ROWS <= count; r += TILE_ROWS)
        multiply_some<TILE_ROWS, 2>(rows + r * depth, depth, matrix, columns, out + size_t(r) * columns);
    for (; r < count; r += 2) multiply_some<2, WIDE_PARTS>(rows + r * depth, depth, matrix, columns, out + size_t(r) * columns);
}

template <int ROWS, int VECTORS>
inline void update_tile(float* state, int stride, float gate, const float* keys, int key_dim, const float* changes, int count) {
    FloatPart sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = splat(gate) * load<FloatPart>(state + size_t(r) * stride + v * PART_LANES);
    for (int i = 0; i < count; i++) {
        FloatPart values[VECTORS];
        for (int v = 0; v < VECTORS; v++) values[v] = load<FloatPart>(changes + size_t(i) * stride + v * PART_LANES);
        for (int r = 0; r < ROWS; r++) {
            const FloatPart factor = splat(keys[i * key_dim + r]);
            for (int v = 0; v < VECTORS; v++) sums[r][v] += factor * values[v];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(state + size_t(r) * stride + v * PART_LANES, sums[r][v]);
}

template <int ROWS>
inline void update_rows(float* state, int columns, float gate, const float* keys, int key_dim, const float* changes, int count) {
    int column = 0;
    for (; column + 4 * PART_LANES <= columns; column += 4 * PART_LANES)
        update_tile<ROWS, 4>(state + column, columns, gate, keys, key_dim, changes + column, count);
    for (; column + PART_LANES <= columns; column += PART_LANES)
        update_tile<ROWS, 1>(state + column, columns, gate, keys, key_dim, changes + column, count);
    for (; column < columns; column++)
        for (int r = 0; r < ROWS; r++) {
            float total = gate * state[size_t(r) * columns + column];
            for (int i = 0; i < count; i++) total += keys[i * key_dim + r] * changes[size_t(i) * columns + column];
            state[size_t(r) * columns + column] = total;
        }
}

// Computes state = gate * state + keys^T @ changes. keys: [count, key_dim].  changes: [count, value_dim].
inline void update_state(float* state, int key_dim, int value_dim, float gate, const float* keys, const float* changes, int count) {
    int row = 0;
    for (; row + STATE_ROWS <= key_dim; row += STATE_ROWS)
        update_rows<STATE_ROWS>(state + size_t(row) * value_dim, value_dim, gate, keys + row, key_dim, changes, count);
    for (; row < key_dim; row++) update_rows<1>(state + size_t(row) * value_dim, value_dim, gate, keys + row, key_dim, changes, count);
}

// Computes to = factor * to + sum over i of weights[i] * rows[i].
inline void weigh_rows(float factor, const float* weights, const float* rows, int count, int columns, float* to) {
    int column = 0;
    for (; column + PART_LANES <= columns; column += PART_LANES) {
        FloatPart total = splat(factor) * load<FloatPart>(to + column);
        for (int i = 0; i < count; i++) total += splat(weights[i]) * load<FloatPart>(rows + size_t(i) * columns + column);
        store(to + column, total);
    }
    for (; column < columns; column++) {
        float total = factor * to[column];
        for (int i = 0; i < count; i++) total += weights[i] * rows[size_t(i) * columns + column];
        to[column] = total;
    }
}

// Writes x * scale / |x|.
inline void unit_head(const float* x, int count, float scale, float* to) {
    const float factor = scale / std::sqrt(sum_of_squares(x, count, 0.0f) + 1e-6f);
    for (int i = 0; i < count; i++) to[i] = x[i] * factor;
}

inline float read_one(const uint8_t* from, size_t index, int format) {
    float value;
    widen_row(from + index * format_nbytes(format), 1, format, &value);
    return value;
}

// The tokens that one head processes together, and the layout of their rows.
struct DeltaTokens {
    int sequence, head, first, count;  // first: index in the chunk
    const float* joined;               // the first token's row of convolved channels
    int stride;                        // floats from one row to the next

    size_t row(const Delta& a, int i) const { return token_row(a, sequence, first + i); }
};

// Sums the decays of the tokens, and computes their betas.
inline void read_gates(const Delta& a, const DeltaTokens& tokens, float* sums, float* betas) {
    float total = 0;
    for (int i = 0; i < tokens.count; i++) {
        const size_t row = tokens.row(a, i);
        const float x = read_one(a.a, row * a.strides[2] + tokens.head, a.format) + a.dt_bias[tokens.head];
        total += a.rate[tokens.head] * (x > 20.0f ? x : std::log1p(std::exp(x)));
        sums[i] = total;
        betas[i] = 1.0f / (1.0f + std::exp(-read_one(a.b, row * a.strides[3] + tokens.head, a.format)));
    }
    for (int i = tokens.count; i < TOGETHER; i++) sums[i] = total;
}

// Writes the gated norm of one token's output.
inline void put_answer(const Delta& a, const DeltaTokens& tokens, int i, float* answer, float* gate) {
    const size_t row = tokens.row(a, i), nbytes = format_nbytes(a.format), head = size_t(tokens.head) * a.value_dim;
    widen_row(a.z + (row * a.strides[1] + head) * nbytes, a.value_dim, a.format, gate);
    normalise({NormKind::RMS, a.eps, a.norm_weight, nullptr}, answer, a.value_dim, answer);
    int e = 0;
    for (; e + PART_LANES <= a.value_dim; e += PART_LANES)
        store(answer + e, load<FloatPart>(answer + e) * activate_part(Activation::SILU, load<FloatPart>(gate + e)));
    for (; e < a.value_dim; e++) answer[e] *= gate[e] / (1.0f + std::exp(-gate[e]));
    narrow_row(answer, a.value_dim, a.format, a.out + (row * a.heads * a.value_dim + head) * nbytes);
}

// Applies the rule to at most TOGETHER tokens of one head.
inline void apply_rule(const Delta& a, const DeltaTokens& tokens, float* state, float* scratch) {
    const int key_dim = a.key_dim, value_dim = a.value_dim, count = tokens.count;
    const int key_head = a.tiled ? tokens.head % a.key_heads : tokens.head / (a.heads / a.key_heads);
    float *keys = scratch, *queries = keys + size_t(count) * key_dim;  // [count, key_dim] each, one after the other
    float* turned = scratch + size_t(2 * TOGETHER) * key_dim;          // [key_dim, TOGETHER], keys
    float* reads = turned + size_t(TOGETHER) * key_dim;                // [2 count, value_dim]: keys' and queries' reads of the state
    float* changes = reads + size_t(2 * TOGETHER) * value_dim;         // [count, value_dim]
    float* products = changes + size_t(TOGETHER) * value_dim;          // [2 count, TOGETHER]: with each token's key
    float sums[TOGETHER], betas[TOGETHER], between[TOGETHER], weights[TOGETHER];
    read_gates(a, tokens, sums, betas);
    for (int i = 0; i < count; i++) {
        const float* row = tokens.joined + size_t(i) * tokens.stride;
        unit_head(row + size_t(key_head) * key_dim, key_dim, 1.0f / std::sqrt(float(key_dim)), queries + size_t(i) * key_dim);
        unit_head(row + size_t(a.key_heads + key_head) * key_dim, key_dim, 1.0f, keys + size_t(i) * key_dim);
    }
    for (int e = 0; e < key_dim; e++)
        for (int i = 0; i < TOGETHER; i++) turned[e * TOGETHER + i] = i < count ? keys[size_t(i) * key_dim + e] : 0.0f;
    multiply_rows(keys, 2 * count, key_dim, turned, TOGETHER, products);
    multiply_rows(keys, 2 * count, key_dim, state, value_dim, reads);
    for (int i = 0; i < count; i++) {
        for (int j = 0; j < TOGETHER; j += PART_LANES) store(between + j, exponential(splat(sums[i]) - load<FloatPart>(sums + j)));
        const float gate = std::exp(sums[i]), beta = betas[i];
        const float* value = tokens.joined + size_t(i) * tokens.stride + 2 * size_t(a.key_heads) * key_dim + size_t(tokens.head) * value_dim;
        float *change = changes + size_t(i) * value_dim, *answer = reads + size_t(count + i) * value_dim;
        for (int e = 0; e < value_dim; e++) change[e] = beta * (value[e] - gate * reads[size_t(i) * value_dim + e]);
        for (int j = 0; j < i; j++) weights[j] = -beta * between[j] * products[i * TOGETHER + j];
        weigh_rows(1.0f, weights, changes, i, value_dim, change);
        for (int j = 0; j <= i; j++) weights[j] = between[j] * products[(count + i) * TOGETHER + j];
        weigh_rows(gate, weights, changes, i + 1, value_dim, answer);
        put_answer(a, tokens, i, answer, turned);
    }
    for (int i = 0; i < count; i++) {
        const float factor = std::exp(sums[count - 1] - sums[i]);
        for (int e = 0; e < key_dim; e++) keys[size_t(i) * key_dim + e] *= factor;
    }
    update_state(state, key_dim, value_dim, std::exp(sums[count - 1]), keys, changes, count);
}

// Applies the rule to one head of one sequence over a slab of tokens. The result for padding is 0.
inline void run_head(const Delta& a, int unit, int slab, float* scratch) {
    const int sequence = unit / a.heads, head = unit % a.heads, channels = delta_channels(a);
    const int begin = slab * SLAB, end = std::min(begin + SLAB, a.tokens), real = std::min<int>(end, int(a.counts[sequence]));
    float* state = a.recurrent + (cache_of(a, sequence) * a.heads + head) * a.key_dim * a.value_dim;
    if (begin == 0 && real > 0 && a.starts[sequence] == 0) std::memset(state, 0, size_t(a.key_dim) * a.value_dim * 4);
    for (int first = begin; first < real; first += TOGETHER) {
        const float* joined = a.joined + (size_t(sequence) * slab_tokens(a) + first - begin) * channels;
        apply_rule(a, {sequence, head, first, std::min(TOGETHER, real - first), joined, channels}, state, scratch);
    }
    const size_t nbytes = size_t(a.value_dim) * format_nbytes(a.format);
    for (int token = std::max(begin, real); token < end; token++)
        std::memset(a.out + ((size_t(sequence) * a.tokens + token) * a.heads + head) * nbytes, 0, nbytes);
}

inline int convolve_units(const Delta& a) { return a.sequences * channel_blocks(delta_channels(a)); }
inline int rule_units(const Delta& a) { return a.sequences * a.heads; }

inline void run_convolve(const Delta& a, int slab, Range units) {
    for (int unit = units.begin; unit < units.end; unit++) convolve_block(a, unit, slab);
}

inline void run_rule(const Delta& a, int slab, Range units, float* scratch) {
    for (int unit = units.begin; unit < units.end; unit++) run_head(a, unit, slab, scratch);
}

// The heads over any number of tokens as a job with two phases per slab of tokens: convolve, apply the rule.
class DeltaJob final : public Job {
  public:
    // scratch: [threads, stride]
    DeltaJob(const Delta& a, float* scratch, size_t stride) : a_(a), scratch_(scratch), stride_(stride) {}

    int phases() const override { return 2 * ((a_.tokens + SLAB - 1) / SLAB); }
    Deal deal(int phase, int threads) const override { return Deal::even(phase % 2 ? rule_units(a_) : convolve_units(a_), threads); }
    void carry_out(int phase, Range units, int thread) override {
        phase % 2 ? run_rule(a_, phase / 2, units, scratch_ + thread * stride_) : run_convolve(a_, phase / 2, units);
    }

  private:
    const Delta& a_;
    float* scratch_;
    size_t stride_;
};

}  // namespace graphcore
