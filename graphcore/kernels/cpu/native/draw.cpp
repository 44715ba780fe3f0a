// Implements draw.h. compiler.py compiles this file without fused multiply-adds (contraction).
#include "draw.h"

#include <algorithm>
#include <cfloat>
#include <climits>
#include <limits>
#include <utility>

#include "vec.h"

namespace graphcore {
namespace {

constexpr int BLOCK = 64;  // tokens that share sixteen counters of four words
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();
constexpr float FIXED_POINT_ONE = float(1 << 30);  // fixed-point weights are integers, so that the order of sums does not matter

typedef uint64_t LongPart __attribute__((vector_size(4 * PART_LANES)));
constexpr uint64_t LOW_WORD = 0xFFFFFFFFu;

int padded_to(int count, int multiple) { return (count + multiple - 1) / multiple * multiple; }

// ---- Noise

// Returns the products of the lower words of a's lanes with a word.
LongPart multiply_words(LongPart a, uint32_t word) {
#if defined(__AVX512F__)
    return (LongPart)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(word));
#elif defined(__AVX2__)
    return (LongPart)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(word));
#else
    return (a & LOW_WORD) * uint64_t(word);
#endif
}

// Ten rounds of Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), on the lower words of each lane.
void philox(uint64_t key, LongPart c[4]) {
    uint32_t first = uint32_t(key), second = uint32_t(key >> 32);
    for (int round = 0; round < 10; round++) {
        const LongPart a = multiply_words(c[0], 0xD2511F53u), b = multiply_words(c[2], 0xCD9E8D57u);
        c[0] = (b >> 32) ^ c[1] ^ uint64_t(first);
        c[1] = b;
        c[2] = (a >> 32) ^ c[3] ^ uint64_t(second);
        c[3] = a;
        first += 0x9E3779B9u;
        second += 0xBB67AE85u;
    }
}

// Returns -log(u), where u are the upper 23 bits of random words, and a half, over 2^23. Source of the polynomial: Cephes, logf.
FloatPart exponential_of(WordPart words) {
    const FloatPart u = (to_float((IntPart)(words >> 9)) + splat(0.5f)) * splat(0x1p-23f);
    const IntPart power = ((IntPart)u - 0x3F3504F3) >> 23;  // u = fraction * 2^power, fraction from sqrt(1/2) to sqrt(2)
    const FloatPart x = (FloatPart)((IntPart)u - (power << 23)) - splat(1.0f), square = x * x, scale = to_float(power);
    FloatPart y = splat(7.0376836292e-2f);
    for (const float next : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                             2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
        y = y * x + splat(next);
    y = y * (x * square);
    y = y + scale * splat(-2.12194440e-4f);
    y = y - square * splat(0.5f);
    return -((x + y) + scale * splat(0.693359375f));
}

// Fills the noise of a block's tokens. Token 16 j + lane takes word j of the counter of its lane.
void fill_noise(uint64_t seed, uint64_t position, int block, float* noise) {
    for (int lane = 0; lane < LANES; lane += PART_LANES) {
        IntPart counters;
        for (int i = 0; i < PART_LANES; i++) counters[i] = block * LANES + lane + i;
        const LongPart nothing{};
        LongPart even[4] = {(LongPart)counters & LOW_WORD, nothing + uint64_t(uint32_t(position)), nothing + (position >> 32), nothing};
        LongPart odd[4] = {(LongPart)counters >> 32, even[1], even[2], nothing};
        philox(seed, even);
        philox(seed, odd);
        for (int word = 0; word < 4; word++)
            store(noise + word * LANES + lane, exponential_of((WordPart)((even[word] & LOW_WORD) | (odd[word] << 32))));
    }
}

// ---- Weights

// Returns exp(x) for x <= 0, and 0 below -87.
FloatPart weight_of(FloatPart x) {
    const FloatPart low = splat(-87.0f), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const IntPart vanishes = x < low;
    x = x < low ? low : x;
    const FloatPart power = (x * splat(1.44269504f) + magic) - magic;
    FloatPart rest = x - power * splat(0.693359375f);
    rest = rest - power * splat(-2.12194440e-4f);
    FloatPart value = splat(1.0f / 720.0f);
    for (const float next : {1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f}) value = value * rest + splat(next);
    value = value * (FloatPart)((__builtin_convertvector(power, IntPart) + 127) << 23);
    return (FloatPart)((IntPart)value & ~vanishes);
}

IntPart fixed_point(FloatPart weights) { return __builtin_convertvector(weights * splat(FIXED_POINT_ONE), IntPart); }
int32_t fixed_point(float weight) { return int32_t(weight * FIXED_POINT_ONE); }

// Scratch memory for sampling one row.
struct Room {
    float* x;         // [padded] logits as the penalty and the mask leave them, then weights
    float* peaks;     // [blocks] largest number of each block of x
    float* work;      // [padded]
    int64_t* sums;    // [BUCKETS]
    int blocks;
};

constexpr int BUCKETS = (0x4E800000 >> 19) + 1;  // by the upper bits of a fixed-point weight as a float, at most 2^30

// The tokens that top-p keeps: those heavier than `least`, and those of that weight up to the index `last`.
struct KeptByTopP {
    int32_t least = 0, last = INT_MAX;
};

// Finds a block's peak and, if IS_WRITTEN, writes the block to x, with the penalty, and -infinity for tokens that may not be
// chosen. Subtracts the number of logits that are not finite from `bad`.
template <bool IS_CHANGED, bool IS_WRITTEN = true>
void prepare_block(const float* logits, const uint8_t* seen, const uint8_t* allowed, float penalty, float* x, float& peak, IntPart& bad) {
    FloatPart most = splat(HIDDEN);
    for (int i = 0; i < BLOCK; i += PART_LANES) {
        FloatPart value = load<FloatPart>(logits + i);
        bad += (value - value) != splat(0.0f);
        if constexpr (IS_CHANGED) {
            FloatPart raised = value / splat(penalty);
            raised = raised > splat(FLT_MAX) ? splat(FLT_MAX) : raised;
            const FloatPart lowered = value > splat(0.0f) ? raised : value * splat(penalty);
            value = widen_bytes(seen + i) != 0 ? lowered : value;
            value = widen_bytes(allowed + i) != 0 ? value : splat(HIDDEN);
        }
        if constexpr (IS_WRITTEN) store(x + i, value);
        most = larger(most, value);
    }
    peak = largest(most);
}

bool is_changed(const Draw& row) { return row.seen || row.allowed; }

// Fills peaks, and x unless the unchanged logits suffice to choose the token. Returns the highest logit.
float prepare(Draw& row, int vocab, const Room& room) {
    alignas(64) uint8_t none[BLOCK] = {}, all[BLOCK];
    std::memset(all, 1, BLOCK);
    IntPart bad{};
    const int whole = vocab / BLOCK;
    const auto prepare_one = is_changed(row) ? prepare_block<true> : row.params.temperature ? prepare_block<false> : prepare_block<false, false>;
    for (int block = 0; block < whole; block++) {
        const int begin = block * BLOCK;
        const uint8_t *const seen = row.seen ? row.seen + begin : none, *const allowed = row.allowed ? row.allowed + begin : all;
        prepare_one(row.logits + begin, seen, allowed, row.params.repetition_penalty, room.x + begin, room.peaks[block], bad);
    }
    if (whole < room.blocks) {
        const int begin = whole * BLOCK, count = vocab - begin;
        alignas(64) float logits[BLOCK] = {};
        alignas(64) uint8_t seen[BLOCK] = {}, allowed[BLOCK] = {};
        std::memcpy(logits, row.logits + begin, size_t(count) * 4);
        if (row.seen) std::memcpy(seen, row.seen + begin, size_t(count));
        std::memcpy(allowed, row.allowed ? row.allowed + begin : all, size_t(count));
        prepare_block<true>(logits, seen, allowed, row.params.repetition_penalty, room.x + begin, room.peaks[whole], bad);
    }
    row.num_bad = -sum(bad);
    return *std::max_element(room.peaks, room.peaks + room.blocks);
}

int first_of(const float* values, float wanted) {
    int at = 0;
    while (values[at] != wanted) at++;
    return at;
}

// Returns the k-th largest number of x, for which the k-th largest peak is a lower bound.
float kth_highest(const Room& room, int k) {
    const auto is_higher = [](float a, float b) { return a > b; };
    float bound = HIDDEN;
    if (k <= room.blocks) {
        std::memcpy(room.work, room.peaks, size_t(room.blocks) * 4);
        std::nth_element(room.work, room.work + k - 1, room.work + room.blocks, is_higher);
        bound = room.work[k - 1];
    }
    int count = 0;
    for (int block = 0; block < room.blocks; block++) {
        if (room.peaks[block] < bound) continue;
        for (int i = block * BLOCK; i < (block + 1) * BLOCK; i++) {
            room.work[count] = room.x[i];
            count += room.x[i] >= bound;
        }
    }
    std::nth_element(room.work, room.work + k - 1, room.work + count, is_higher);
    return room.work[k - 1];
}

// Turns x into the weights of logits from `least` on, 0 for others, and the peaks into the largest of each block. Blocks whose
// peak becomes 0 are not written. Returns the sum of the fixed-point weights.
int64_t weigh(const Room& room, float highest, float least, float factor) {
    LongPart total{};
    for (int block = 0; block < room.blocks; block++) {
        float* const x = room.x + block * BLOCK;
        FloatPart most{};
        if (room.peaks[block] >= least)
            for (int i = 0; i < BLOCK; i += PART_LANES) {
                const FloatPart value = load<FloatPart>(x + i), weight = weight_of((value - splat(highest)) * splat(factor));
                const FloatPart kept = (FloatPart)((IntPart)weight & (value >= splat(least)));
                store(x + i, kept);
                most = larger(most, kept);
                const LongPart fixed = (LongPart)fixed_point(kept);
                total += (fixed & LOW_WORD) + (fixed >> 32);
            }
        room.peaks[block] = largest(most);
    }
    int64_t sum = 0;
    for (int lane = 0; lane < PART_LANES / 2; lane++) sum += int64_t(total[lane]);
    return sum;
}

// Returns the bits of fixed-point weights as floats, which are exact and in the same order: they have 24 bits at most.
IntPart bits_of(IntPart fixed) { return (IntPart)to_float(fixed); }

int32_t fixed_point_of_bits(int32_t bits) {
    float fixed;
    std::memcpy(&fixed, &bits, 4);
    return int32_t(fixed);
}

// Returns which tokens top-p keeps: each token before which the heavier ones (of equals the first) sum to less than `wanted`.
// A radix selection finds the smallest kept weight by 13, 9 and 10 bits: the first pass reads all tokens, the others a list.
KeptByTopP keep_top_p(const Room& room, int64_t total, int64_t wanted) {
    // tokens of this weight or less have at most total - wanted together, so that none of them is needed
    const int32_t light = int32_t(std::min<int64_t>((total - wanted) / (room.blocks * BLOCK), INT_MAX));
    int64_t before = 0;  // weight of the tokens in heavier buckets than the chosen one
    const auto bucket_with = [&](int buckets) {
        int bucket = buckets - 1;
        for (; bucket > 0 && before + room.sums[bucket] < wanted; bucket--) before += room.sums[bucket];
        return bucket;
    };
    std::fill(room.sums, room.sums + BUCKETS, 0);
    for (int block = 0; block < room.blocks; block++) {
        if (fixed_point(room.peaks[block]) <= light) continue;
        alignas(64) int32_t fixed[BLOCK], buckets[BLOCK];
        for (int i = 0; i < BLOCK; i += PART_LANES) {
            const IntPart found = fixed_point(load<FloatPart>(room.x + block * BLOCK + i));
            store(fixed + i, found);
            store(buckets + i, bits_of(found) >> 19);
        }
        for (int i = 0; i < BLOCK; i++) room.sums[buckets[i]] += fixed[i];
    }
    const int first = bucket_with(BUCKETS);
    int32_t* const bits = (int32_t*)room.work;  // of the chosen bucket's tokens
    int count = 0;
    for (int block = 0; block < room.blocks; block++) {
        if (fixed_point(room.peaks[block]) <= light) continue;
        for (int i = 0; i < BLOCK; i += PART_LANES) {
            const IntPart own = bits_of(fixed_point(load<FloatPart>(room.x + block * BLOCK + i)));
            if (sum((own >> 19) == splat_int(first)) == 0) continue;
            for (int lane = 0; lane < PART_LANES; lane++) {
                bits[count] = own[lane];
                count += own[lane] >> 19 == first;
            }
        }
    }
    for (const auto& [shift, buckets] : {std::pair(10, 512), std::pair(0, 1024)}) {
        const auto bucket_of = [shift = shift, buckets = buckets](int32_t own) { return own >> shift & (buckets - 1); };
        std::fill(room.sums, room.sums + buckets, 0);
        for (int i = 0; i < count; i++) room.sums[bucket_of(bits[i])] += fixed_point_of_bits(bits[i]);
        const int bucket = bucket_with(buckets);
        int left = 0;
        for (int i = 0; i < count; i++) {
            const int32_t own = bits[i];
            bits[left] = own;
            left += bucket_of(own) == bucket;
        }
        count = left;
    }
    KeptByTopP kept{fixed_point_of_bits(bits[0])};
    int64_t places = (wanted - before + kept.least - 1) / kept.least;
    if (places >= count) return kept;
    for (int block = 0; block < room.blocks; block++) {
        if (fixed_point(room.peaks[block]) < kept.least) continue;
        for (int i = block * BLOCK; i < (block + 1) * BLOCK; i++)
            if (fixed_point(room.x[i]) == kept.least && --places == 0) return kept.last = i, kept;
    }
    return kept;
}

// Returns the token with the largest weight / noise.
int64_t race(const Draw& row, const Room& room, const KeptByTopP& kept) {
    const FloatPart min_p = splat(row.params.min_p);
    const IntPart least = splat_int(kept.least), last = splat_int(kept.last);
    const float least_noise = exponential_of(WordPart{} + 0xFFFFFFFFu)[0];
    IntPart lanes;
    for (int i = 0; i < PART_LANES; i++) lanes[i] = i;
    int64_t winner = -1;
    float best = 0.0f;
    for (int block = 0; block < room.blocks; block++) {
        // the noise cannot help a block whose largest weight is too small; an equal score comes later
        if (room.peaks[block] / least_noise <= best || fixed_point(room.peaks[block]) < kept.least) continue;
        alignas(64) float scores[BLOCK];
        fill_noise(row.seed, row.position, block, scores);
        FloatPart most{};
        for (int i = 0; i < BLOCK; i += PART_LANES) {
            const FloatPart weights = load<FloatPart>(room.x + block * BLOCK + i);
            const IntPart fixed = fixed_point(weights), index = lanes + (block * BLOCK + i);
            const IntPart is_kept = ((fixed > least) | ((fixed == least) & (index <= last))) & (weights >= min_p);
            const FloatPart score = (FloatPart)((IntPart)(weights / load<FloatPart>(scores + i)) & is_kept);
            store(scores + i, score);
            most = larger(most, score);
        }
        const float high = largest(most);
        if (high <= best) continue;
        best = high;
        winner = int64_t(block) * BLOCK + first_of(scores, high);
    }
    return winner;
}

}  // namespace

size_t draw_nbytes(int vocab) {
    const int padded = padded_to(vocab, BLOCK);
    return size_t(padded_to(2 * 4 * padded + 4 * padded_to(padded / BLOCK, 16) + 8 * BUCKETS, 64));
}

void draw_token(Draw& row, int vocab, uint8_t* memory) {
    const int padded = padded_to(vocab, BLOCK), blocks = padded / BLOCK;
    float* const x = (float*)memory;
    float* const peaks = x + 2 * padded;
    const Room room{x, peaks, x + padded, (int64_t*)(peaks + padded_to(blocks, 16)), blocks};
    const float highest = prepare(row, vocab, room);
    row.token = -1;
    if (row.num_bad || highest == HIDDEN) return;
    if (row.params.temperature == 0.0f) {
        const int block = first_of(peaks, highest);
        const float* const values = is_changed(row) || block == vocab / BLOCK ? x : row.logits;  // x has the last block's rest
        row.token = int64_t(block) * BLOCK + first_of(values + block * BLOCK, highest);
        return;
    }
    const float least = 0 < row.params.top_k && row.params.top_k < vocab ? kth_highest(room, row.params.top_k) : HIDDEN;
    const int64_t total = weigh(room, highest, least, std::min(1.0f / row.params.temperature, FLT_MAX));
    KeptByTopP kept;
    if (row.params.top_p < 1.0f) {
        const double share = double(row.params.top_p) * double(total);
        const int64_t below = int64_t(share);
        kept = keep_top_p(room, total, std::max<int64_t>(1, below + (double(below) < share)));
    }
    row.token = race(row, room, kept);
}

}  // namespace graphcore
