// Implements quantize.h. compiler.py compiles this file without fused multiply-adds (contraction).
//
// A group is the N weights that share a scale. Sixteen groups are quantised together, and each is a lane: x[i] has weight i
// of each. A lane's operations are torch's in graphcore/quant/k_search.py, one by one and in the same order, so the bits are
// torch's and those of every instruction set. Two shortcuts change no bit: sums of codes and of their squares are whole
// numbers, exact in any order, and a code is clamped before it is rounded.
#include "quantize.h"

#include <algorithm>
#include <cfloat>

#include "transpose.h"
#include "vec.h"

namespace graphcore {
namespace {

// The lanes of one register. FloatPart has sixteen where there is no AVX, which is slow.
constexpr int WIDTH = NATIVE_NBYTES / 4;
typedef float Floats __attribute__((vector_size(NATIVE_NBYTES)));
typedef int32_t Ints __attribute__((vector_size(NATIVE_NBYTES)));

constexpr int SUMMED = 16;  // weights that are added one after another; see column_sums in k_search.py

Floats splats(float value) { return splat<Floats>(value); }

// Bounds of a value; NaN stays NaN.
inline Floats at_least(Floats value, Floats bound) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)bound, (__m512)value);
#elif defined(__AVX__)
    return (Floats)_mm256_max_ps((__m256)bound, (__m256)value);
#else
    return bound > value ? bound : value;
#endif
}
inline Floats at_most(Floats value, Floats bound) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps((__m512)bound, (__m512)value);
#elif defined(__AVX__)
    return (Floats)_mm256_min_ps((__m256)bound, (__m256)value);
#else
    return bound < value ? bound : value;
#endif
}

inline Floats size_of(Floats value) { return (Floats)((Ints)value & 0x7fffffff); }

// Returns the nearest whole number, the even one of two; for values below 2^22 in magnitude.
inline Floats rounded(Floats value) {
    const Floats magic = splats(12582912.0f);  // 1.5 * 2^23
    return (value + magic) - magic;
}

// Returns 1 / value, or 0 where that would be infinite.
inline Floats inverse(Floats value) {
    const Floats found = splats(1.0f) / value;
    return (Floats)((Ints)found & ~(((Ints)found & 0x7fffffff) == 0x7f800000));
}

inline Floats choose(Ints which, Floats one, Floats other) { return (Floats)(((Ints)one & which) | ((Ints)other & ~which)); }

inline Floats at(const float* row, int lane) { return load<Floats>(row + lane); }

// Sixteen groups of N weights, and what was found for them. Arrays of one number for each group are indexed by lane.
template <int N>
struct Groups {
    static constexpr int WEIGHTS = N;
    alignas(64) float x[N][LANES];
    alignas(64) float scale[LANES], minimum[LANES];            // as the search finds them; only affine formats have minimums
    alignas(64) float scale_unit[LANES], minimum_unit[LANES];  // float16 of the group's block, as float32
    alignas(64) float scale_code[LANES], minimum_code[LANES];  // whole numbers
    alignas(64) float error[LANES];                            // sum of squared differences
    alignas(64) uint32_t words[N / 4][LANES];                  // codes of the weights, four in a word, the first lowest

    // Returns the weight of largest magnitude, the first if there are several.
    Floats extreme(int lane) const {
        Floats found = at(x[0], lane);
        for (int i = 1; i < N; i++) found = choose(size_of(at(x[i], lane)) > size_of(found), at(x[i], lane), found);
        return found + Floats{};  // no -0, as in torch
    }
};

// Packs the codes of four weights of each lane.
inline void put_words(uint32_t* to, const Floats codes[4], int offset) {
    Ints word{};
    for (int i = 0; i < 4; i++) word |= ((__builtin_convertvector(codes[i], Ints) + offset) & 0xff) << (8 * i);
    store(to, word);
}

// Rounds the scales of blocks of GROUPS groups to codes from `low` to `top`; the extreme scale gets the code of largest
// magnitude. values: [LANES].  unit, codes: [LANES].
template <int GROUPS>
void round_scales(const float* values, float low, float top, float* unit, float* codes) {
    for (int first = 0; first < LANES; first += GROUPS) {
        float extreme = values[first];
        for (int i = 1; i < GROUPS; i++) extreme = std::fabs(values[first + i]) > std::fabs(extreme) ? values[first + i] : extreme;
        const float shared = half_to_float(float_to_half((extreme + 0.0f) / (low != 0 ? low : top)));
        std::fill(unit + first, unit + first + GROUPS, shared);
    }
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        const Floats code = at(values, lane) * inverse(at(unit, lane));
        store(codes + lane, rounded(at_most(at_least(code, splats(low)), splats(top))));
    }
}

// ---- Affine groups: y = s * q - m, 0 <= q <= TOP

template <int N, int TOP>
struct Affine : Groups<N> {
    static constexpr int HALVES = N / SUMMED;

    // The best scale and minimum for some codes, and how much of the sum of squares they explain.
    struct Fit {
        Floats scale, minimum, saved;

        void keep_better(const Fit& other) {
            const Ints is_better = other.saved > saved;
            scale = choose(is_better, other.scale, scale);
            minimum = choose(is_better, other.minimum, minimum);
            saved = choose(is_better, other.saved, saved);
        }
    };

    // Solves for the codes code_of(i). Always inlined: `code_of` is a few instructions.
    template <class Function>
    __attribute__((always_inline)) Fit solve(int lane, Floats sum_x, const Function& code_of) const {
        Floats parts[HALVES] = {}, sum_q{}, sum_qq{};
        for (int i = 0; i < SUMMED; i++)
            for (int half = 0; half < HALVES; half++) {
                const int place = SUMMED * half + i;
                const Floats code = rounded(code_of(place));
                parts[half] += at(this->x[place], lane) * code;
                sum_q += code;
                sum_qq += code * code;
            }
        Floats sum_xq = parts[0];
        for (int half = 1; half < HALVES; half++) sum_xq += parts[half];
        const Floats num = splats(N), zero{}, tiniest = splats(FLT_MIN);
        const Floats determinant = num * sum_qq - sum_q * sum_q;
        const Floats free_scale = (num * sum_xq - sum_x * sum_q) / at_least(determinant, tiniest);
        const Floats free_minimum = (free_scale * sum_q - sum_x) / num;
        const Ints is_free = (free_minimum >= zero) & (determinant > zero);
        const Floats constant = choose(sum_q == zero, -sum_x / num, zero);
        const Floats scale = at_least(choose(is_free, free_scale, sum_xq / at_least(sum_qq, tiniest)), zero);
        const Floats minimum = choose(is_free, free_minimum, at_least(constant, zero));
        return {scale, minimum, scale * sum_xq - minimum * sum_x};
    }

    Floats sum_of_weights(int lane) const {
        Floats total{};
        for (int half = 0; half < HALVES; half++) {
            Floats part{};
            for (int i = 0; i < SUMMED; i++) part += at(this->x[SUMMED * half + i], lane);
            total += part;
        }
        return total;
    }

    template <int COUNT>
    void fit(int lane, const double (&stretches)[COUNT]) {
        Floats above[N], floor = at(this->x[0], lane), reach{};
        for (int i = 1; i < N; i++) floor = at_most(floor, at(this->x[i], lane));
        floor = at_most(floor, Floats{});
        for (int i = 0; i < N; i++) {
            above[i] = at(this->x[i], lane) - floor;
            reach = at_least(reach, above[i]);
        }
        const Floats per_value = inverse(reach), sum_x = sum_of_weights(lane), top = splats(TOP);
        Fit best{{}, {}, splats(-1.0f)};
        for (const double stretch : stretches) {
            const Floats steps = splats(float(TOP + stretch)) * per_value;
            best.keep_better(solve(lane, sum_x, [&](int i) { return at_most(above[i] * steps, top); }));
        }
        const Floats steps = inverse(best.scale), minimum = best.minimum;
        best.keep_better(solve(lane, sum_x, [&](int i) { return code(lane, i, minimum, steps); }));
        store(this->scale + lane, choose(reach == splats(__builtin_inff()), reach, best.scale));  // has the weights refused
        store(this->minimum + lane, best.minimum);
    }

    // Returns the code of a weight, not yet rounded.
    Floats code(int lane, int i, Floats minimum, Floats steps) const {
        return at_most(at_least((at(this->x[i], lane) + minimum) * steps, Floats{}), splats(TOP));
    }

    struct Trial {
        Floats error, sum_q;
    };

    Trial try_scales(int lane, Floats scale, Floats minimum) const {
        const Floats steps = inverse(scale);
        Floats parts[HALVES] = {}, sum_q{};
        for (int i = 0; i < SUMMED; i++)
            for (int half = 0; half < HALVES; half++) {
                const int place = SUMMED * half + i;
                const Floats q = rounded(code(lane, place, minimum, steps));
                const Floats off = (q * scale - minimum) - at(this->x[place], lane);
                parts[half] += off * off;
                sum_q += q;
            }
        for (int half = 1; half < HALVES; half++) parts[0] += parts[half];
        return {parts[0], sum_q};
    }

    // Changes each group's codes of scale and minimum by one where that lowers the error, and sets the weights' codes.
    void refine(int lane, float top_scale) {
        const Floats unit = at(this->scale_unit, lane), low_unit = at(this->minimum_unit, lane), zero{}, top = splats(top_scale);
        const Floats first = at(this->scale_code, lane), first_low = at(this->minimum_code, lane), num = splats(N);
        const Floats per_low = inverse(low_unit), mean = sum_of_weights(lane) / num;
        Floats best_scale = first, best_low = first_low;
        Trial best = try_scales(lane, unit * first, low_unit * first_low);
        for (const float shift : {-1.0f, 0.0f, 1.0f}) {
            const Floats scale = at_most(at_least(first + splats(shift), zero), top);
            const Floats mean_low = ((unit * scale) * (best.sum_q / num) - mean) * per_low;
            for (const Floats low : {rounded(at_most(at_least(mean_low, zero), top)), first_low}) {
                const Trial trial = try_scales(lane, unit * scale, low_unit * low);
                const Ints is_better = trial.error < best.error;
                best_scale = choose(is_better, scale, best_scale), best_low = choose(is_better, low, best_low);
                best.error = choose(is_better, trial.error, best.error), best.sum_q = choose(is_better, trial.sum_q, best.sum_q);
            }
        }
        store(this->scale_code + lane, best_scale);
        store(this->minimum_code + lane, best_low);
        store(this->error + lane, best.error);
        const Floats minimum = low_unit * best_low, steps = inverse(unit * best_scale);
        for (int i = 0; i < N; i += 4) {
            const Floats codes[4] = {rounded(code(lane, i, minimum, steps)), rounded(code(lane, i + 1, minimum, steps)),
                                     rounded(code(lane, i + 2, minimum, steps)), rounded(code(lane, i + 3, minimum, steps))};
            put_words(this->words[i / 4] + lane, codes, 0);
        }
    }

    template <int GROUPS, int COUNT>
    void search(const double (&stretches)[COUNT], float top_scale) {
        for (int lane = 0; lane < LANES; lane += WIDTH) fit(lane, stretches);
        round_scales<GROUPS>(this->scale, 0, top_scale, this->scale_unit, this->scale_code);
        round_scales<GROUPS>(this->minimum, 0, top_scale, this->minimum_unit, this->minimum_code);
        for (int lane = 0; lane < LANES; lane += WIDTH) refine(lane, top_scale);
    }
};

// ---- Symmetric groups: y = s * q, LOW <= q < -LOW

template <int N, int LOW>
struct Symmetric : Groups<N> {
    static_assert(N == SUMMED, "a group is added up in one run");

    Floats code(int lane, int i, Floats steps) const {
        return rounded(at_most(at_least(at(this->x[i], lane) * steps, splats(LOW)), splats(-LOW - 1)));
    }

    template <int COUNT>
    void fit(int lane, const double (&stretches)[COUNT]) {
        const Floats per_value = inverse(this->extreme(lane));
        Floats scale{}, saved = splats(-1.0f);
        for (int index = 0; index <= COUNT; index++) {
            const Floats steps = index == COUNT ? inverse(scale) : splats(float(LOW - stretches[index])) * per_value;
            Floats sum_xq{}, sum_qq{};
            for (int i = 0; i < N; i++) {
                const Floats q = code(lane, i, steps);
                sum_xq += at(this->x[i], lane) * q;
                sum_qq += q * q;
            }
            const Floats fitted = sum_xq / at_least(sum_qq, splats(FLT_MIN)), explained = fitted * sum_xq;
            const Ints is_better = explained > saved;
            saved = choose(is_better, explained, saved), scale = choose(is_better, fitted, scale);
        }
        store(this->scale + lane, scale);
    }

    // Changes each group's code of the scale by one where that lowers the error, and sets the weights' codes.
    void refine(int lane, float low_scale) {
        const Floats unit = at(this->scale_unit, lane), first = at(this->scale_code, lane);
        Floats best = first, best_error = splats(__builtin_inff());
        for (const float shift : {0.0f, -1.0f, 1.0f}) {
            const Floats scale = at_most(at_least(first + splats(shift), splats(low_scale)), splats(-low_scale - 1));
            const Floats value = unit * scale, steps = inverse(value);
            Floats error{};
            for (int i = 0; i < N; i++) {
                const Floats off = code(lane, i, steps) * value - at(this->x[i], lane);
                error += off * off;
            }
            const Ints is_better = error < best_error;
            best_error = choose(is_better, error, best_error), best = choose(is_better, scale, best);
        }
        store(this->scale_code + lane, best);
        store(this->error + lane, best_error);
        const Floats steps = inverse(unit * best);
        for (int i = 0; i < N; i += 4) {
            const Floats codes[4] = {code(lane, i, steps), code(lane, i + 1, steps), code(lane, i + 2, steps), code(lane, i + 3, steps)};
            put_words(this->words[i / 4] + lane, codes, -LOW);
        }
    }

    template <int GROUPS, int COUNT>
    void search(const double (&stretches)[COUNT], float low_scale) {
        for (int lane = 0; lane < LANES; lane += WIDTH) fit(lane, stretches);
        round_scales<GROUPS>(this->scale, low_scale, -low_scale - 1, this->scale_unit, this->scale_code);
        for (int lane = 0; lane < LANES; lane += WIDTH) refine(lane, low_scale);
    }
};

// ---- Blocks of 32 with a scale of their own, as libggml makes them: q = round(x * steps), the weights' extreme or ends exact

template <int N>
struct Plain : Groups<N> {
    // code_of(x): code of weights.  weight_of(code): the weight that a reader computes.  Both take and return Floats.
    template <class Code, class Weight>
    __attribute__((always_inline)) void set_codes(int lane, const Code& code_of, const Weight& weight_of) {
        Floats error{};
        for (int i = 0; i < N; i += 4) {
            Floats codes[4];
            for (int j = 0; j < 4; j++) {
                const Floats weight = at(this->x[i + j], lane);
                codes[j] = code_of(weight);
                const Floats off = weight_of(codes[j]) - weight;
                error += off * off;
            }
            put_words(this->words[i / 4] + lane, codes, 0);
        }
        store(this->error + lane, error);
    }

    // Returns the numbers rounded to float16, as a reader computes with them, and keeps them for the blocks.
    static Floats to_halves(Floats values, float* kept) {
        for (int i = 0; i < WIDTH; i++) kept[i] = half_to_float(float_to_half(values[i]));
        return load<Floats>(kept);
    }

    Floats largest(int lane) const {
        Floats found{};
        for (int i = 0; i < N; i++) found = at_least(found, size_of(at(this->x[i], lane)));
        return found;
    }

    // Codes from 0 to 2 * ZERO - 1; the extreme weight gets code 0.
    template <int ZERO>
    void symmetric(int lane) {
        const Floats scale = this->extreme(lane) / splats(-ZERO), steps = inverse(scale);
        const Floats kept = to_halves(scale, this->scale_unit + lane), zero = splats(ZERO);
        set_codes(
            lane, [&](Floats x) { return whole(at_most(x * steps + splats(ZERO + 0.5f), splats(2 * ZERO - 1))); },
            [&](Floats q) { return (q - zero) * kept; });
    }

    // Codes from 0, the smallest weight, to TOP, the largest.
    template <int TOP>
    void affine(int lane) {
        Floats low = at(this->x[0], lane), high = low;
        for (int i = 1; i < N; i++) low = at_most(low, at(this->x[i], lane)), high = at_least(high, at(this->x[i], lane));
        const Floats scale = (high - low) / splats(TOP), steps = inverse(scale);
        const Floats kept = to_halves(scale, this->scale_unit + lane), minimum = to_halves(low, this->minimum_unit + lane);
        set_codes(
            lane, [&](Floats x) { return whole(at_most((x - low) * steps + splats(0.5f), splats(TOP))); },
            [&](Floats q) { return q * kept + minimum; });
    }

    // Signed codes, as bytes; halves are rounded away from zero.
    void bytes(int lane) {
        const Floats scale = largest(lane) / splats(127.0f), steps = inverse(scale), kept = to_halves(scale, this->scale_unit + lane);
        const auto code_of = [&](Floats x) {
            const Floats value = x * steps, down = whole(value);
            const Floats one = (Floats)((Ints)splats(1.0f) | ((Ints)value & INT32_MIN));
            return choose(size_of(value - down) >= splats(0.5f), down + one, down);
        };
        set_codes(lane, code_of, [&](Floats q) { return q * kept; });
    }

    static Floats whole(Floats value) { return __builtin_convertvector(__builtin_convertvector(value, Ints), Floats); }  // towards 0
};

// ---- Blocks: numbers and codes in the order of graphcore/quant/formats/

void put_half(uint8_t* to, float value) {
    const uint16_t bits = float_to_half(value);
    std::memcpy(to, &bits, 2);
}

// Bits `shift` .. of COUNT runs of codes, one run after another in the bits of the same bytes: `bits` of each code.
template <int COUNT, int NBYTES>
void put_planes(uint8_t* to, const uint8_t* codes, int shift, int bits) {
    for (int l = 0; l < NBYTES; l++) {
        uint8_t byte = 0;
        for (int k = 0; k < COUNT; k++) byte |= uint8_t(((codes[NBYTES * k + l] >> shift) & ((1 << bits) - 1)) << (bits * k));
        to[l] = byte;
    }
}

// Bit 4 of 32 codes, those of eight consecutive ones in a byte.
void put_fifth_bits(uint8_t* to, const uint8_t* codes) {
    for (int i = 0; i < 4; i++) {
        uint8_t byte = 0;
        for (int k = 0; k < 8; k++) byte |= uint8_t((codes[8 * i + k] >> 4) << k);
        to[i] = byte;
    }
}

// The first 16 bytes of q4_k and q5_k. scale, minimum: codes of eight groups.
void put_six_bit_scales(uint8_t* to, float scale_unit, float minimum_unit, const float* scale, const float* minimum) {
    put_half(to, scale_unit);
    put_half(to + 2, minimum_unit);
    for (int j = 0; j < 4; j++) {
        const auto first = uint8_t(scale[j]), last = uint8_t(scale[j + 4]), low = uint8_t(minimum[j]), last_low = uint8_t(minimum[j + 4]);
        to[4 + j] = uint8_t(first | last >> 4 << 6);
        to[8 + j] = uint8_t(low | last_low >> 4 << 6);
        to[12 + j] = uint8_t((last & 15) | last_low << 4);
    }
}

// Each format has sixteen groups, BLOCKS blocks of them. find() sets codes and scales; put() writes a block whose first group
// is `lane`, from the bytes of its codes.
struct Q2_K : Affine<16, 3> {
    static constexpr int BLOCKS = 1;
    void find() { search<16>(Q2_K_STRETCHES, 15); }
    void put(int, const uint8_t* codes, uint8_t* to) const {
        for (int group = 0; group < 16; group++) to[group] = uint8_t(int(scale_code[group]) | int(minimum_code[group]) << 4);
        for (int half = 0; half < 2; half++) put_planes<4, 32>(to + 16 + 32 * half, codes + 128 * half, 0, 2);
        put_half(to + 80, scale_unit[0]);
        put_half(to + 82, minimum_unit[0]);
    }
};

struct Q3_K : Symmetric<16, -4> {
    static constexpr int BLOCKS = 1;
    void find() { search<16>(Q3_K_STRETCHES, -32); }
    void put(int, const uint8_t* codes, uint8_t* to) const {
        put_planes<8, 32>(to, codes, 2, 1);
        for (int half = 0; half < 2; half++) put_planes<4, 32>(to + 32 + 32 * half, codes + 128 * half, 0, 2);
        uint8_t scales[16];
        for (int group = 0; group < 16; group++) scales[group] = uint8_t(int(scale_code[group]) + 32);
        put_planes<2, 8>(to + 96, scales, 0, 4);
        put_planes<4, 4>(to + 104, scales, 4, 2);
        put_half(to + 108, scale_unit[0]);
    }
};

struct Q4_K : Affine<32, 15> {
    static constexpr int BLOCKS = 2;
    void find() { search<8>(Q4_K_STRETCHES, 63); }
    void put(int lane, const uint8_t* codes, uint8_t* to) const {
        put_six_bit_scales(to, scale_unit[lane], minimum_unit[lane], scale_code + lane, minimum_code + lane);
        for (int chunk = 0; chunk < 4; chunk++) put_planes<2, 32>(to + 16 + 32 * chunk, codes + 64 * chunk, 0, 4);
    }
};

struct Q5_K : Affine<32, 31> {
    static constexpr int BLOCKS = 2;
    void find() { search<8>(Q5_K_STRETCHES, 63); }
    void put(int lane, const uint8_t* codes, uint8_t* to) const {
        put_six_bit_scales(to, scale_unit[lane], minimum_unit[lane], scale_code + lane, minimum_code + lane);
        put_planes<8, 32>(to + 16, codes, 4, 1);
        for (int chunk = 0; chunk < 4; chunk++) put_planes<2, 32>(to + 48 + 32 * chunk, codes + 64 * chunk, 0, 4);
    }
};

struct Q6_K : Symmetric<16, -32> {
    static constexpr int BLOCKS = 1;
    void find() { search<16>(Q6_K_STRETCHES, -128); }
    void put(int, const uint8_t* codes, uint8_t* to) const {
        for (int half = 0; half < 2; half++) put_planes<2, 64>(to + 64 * half, codes + 128 * half, 0, 4);
        for (int half = 0; half < 2; half++) put_planes<4, 32>(to + 128 + 32 * half, codes + 128 * half, 4, 2);
        for (int group = 0; group < 16; group++) to[192 + group] = uint8_t(int(scale_code[group]));
        put_half(to + 208, scale_unit[0]);
    }
};

struct Legacy : Plain<32> {
    static constexpr int BLOCKS = 16;
};

struct Q4_0 : Legacy {
    void find() {
        for (int lane = 0; lane < LANES; lane += WIDTH) symmetric<8>(lane);
    }
    void put(int lane, const uint8_t* codes, uint8_t* to) const {
        put_half(to, scale_unit[lane]);
        put_planes<2, 16>(to + 2, codes, 0, 4);
    }
};

struct Q4_1 : Legacy {
    void find() {
        for (int lane = 0; lane < LANES; lane += WIDTH) affine<15>(lane);
    }
    void put(int lane, const uint8_t* codes, uint8_t* to) const {
        put_half(to, scale_unit[lane]);
        put_half(to + 2, minimum_unit[lane]);
        put_planes<2, 16>(to + 4, codes, 0, 4);
    }
};

struct Q5_0 : Legacy {
    void find() {
        for (int lane = 0; lane < LANES; lane += WIDTH) symmetric<16>(lane);
    }
    void put(int lane, const uint8_t* codes, uint8_t* to) const {
        put_half(to, scale_unit[lane]);
        put_fifth_bits(to + 2, codes);
        put_planes<2, 16>(to + 6, codes, 0, 4);
    }
};

struct Q5_1 : Legacy {
    void find() {
        for (int lane = 0; lane < LANES; lane += WIDTH) affine<31>(lane);
    }
    void put(int lane, const uint8_t* codes, uint8_t* to) const {
        put_half(to, scale_unit[lane]);
        put_half(to + 2, minimum_unit[lane]);
        put_fifth_bits(to + 4, codes);
        put_planes<2, 16>(to + 8, codes, 0, 4);
    }
};

struct Q8_0 : Legacy {
    void find() {
        for (int lane = 0; lane < LANES; lane += WIDTH) bytes(lane);
    }
    void put(int lane, const uint8_t* codes, uint8_t* to) const {
        put_half(to, scale_unit[lane]);
        std::memcpy(to + 2, codes, 32);
    }
};

// ---- A unit

template <class T>
void widen_all(const uint8_t* from, int count, float* to) {
    for (int i = 0; i < count; i += PART_LANES) store(to + i, widen((const T*)from + i));
}

// Reads weights as float32. count: a multiple of 32.
void read_weights(int dtype, const uint8_t* from, int count, float* to) {
    if (dtype == BF16) return widen_all<Bf16>(from, count, to);
    if (dtype == F16) return widen_all<Fp16>(from, count, to);
    std::memcpy(to, from, size_t(count) * 4);
}

template <int N>
QuantizedSums sums_of(const Groups<N>& groups) {
    QuantizedSums sums;
    alignas(64) float sizes[LANES], largest[LANES];
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        Floats size{};
        Ints most{};
        for (int i = 0; i < N; i++) {
            const Floats weight = at(groups.x[i], lane);
            const Ints magnitude = (Ints)size_of(weight);  // numbers that are ordered as the magnitudes, NaN above all
            size += weight * weight;
            most = magnitude > most ? magnitude : most;
        }
        store(sizes + lane, size);
        store(largest + lane, most);
    }
    for (int lane = 0; lane < LANES; lane++) sums.add({groups.error[lane], sizes[lane], largest[lane]});
    return sums;
}

template <class F>
QuantizedSums quantize_with(int format, int dtype, int weights, const uint8_t* dense, uint8_t* blocks) {
    constexpr int N = F::WEIGHTS, TOGETHER = LANES * N, BLOCK = TOGETHER / F::BLOCKS;
    const size_t nbytes = size_t(ENCODINGS[format].nbytes), itemsize = dtype == F32 ? 4 : 2;
    QuantizedSums sums;
    for (int first = 0; first < weights; first += TOGETHER) {
        alignas(64) float rows[TOGETHER];
        const int count = std::min(TOGETHER, weights - first);
        read_weights(dtype, dense + size_t(first) * itemsize, count, rows);
        std::fill(rows + count, rows + TOGETHER, 0.0f);
        const uint8_t* starts[LANES];
        for (int lane = 0; lane < LANES; lane++) starts[lane] = (const uint8_t*)(rows + N * lane);
        const Words<4 * N> columns(Rows{starts, 0});
        F groups;
        std::memcpy(groups.x, columns.bytes, sizeof(groups.x));
        groups.find();
        sums.add(sums_of<N>(groups));
        alignas(64) uint8_t codes[TOGETHER];
        for (int word = 0; word < N / 4; word++)
            for (int lane = 0; lane < LANES; lane++) std::memcpy(codes + N * lane + 4 * word, &groups.words[word][lane], 4);
        for (int block = 0; block * BLOCK < count; block++, blocks += nbytes)
            groups.put(block * LANES / F::BLOCKS, codes + block * BLOCK, blocks);
    }
    return sums;
}

}  // namespace

void QuantizedSums::add(const QuantizedSums& other) {
    difference += other.difference;
    size += other.size;
    const bool is_nan = largest != largest;
    if (!is_nan && !(other.largest <= largest)) largest = other.largest;
}

#define GRAPHCORE_QUANTIZED(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K)

bool can_quantize(int format) {
    switch (format) {
#define GRAPHCORE_CASE(F) case FORMAT_##F:
        GRAPHCORE_QUANTIZED(GRAPHCORE_CASE)
#undef GRAPHCORE_CASE
        return true;
    }
    return false;
}

QuantizedSums quantize_unit(int format, int dtype, int weights, const uint8_t* dense, uint8_t* blocks) {
    switch (format) {
#define GRAPHCORE_CASE(F) \
    case FORMAT_##F: return quantize_with<F>(format, dtype, weights, dense, blocks);
        GRAPHCORE_QUANTIZED(GRAPHCORE_CASE)
#undef GRAPHCORE_CASE
    }
    return {};
}

}  // namespace graphcore
