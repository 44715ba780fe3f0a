// Causal convolutions of single channels over a sequence's tokens, with the inputs that they keep between passes; and the
// gated short convolution that is built of one: out = c * convolution(b * x).
//
// A unit is a block of channels of one sequence. A token's sum has its inputs in order, the oldest first, so that its bits do
// not depend on how the tokens are cut into passes.
#pragma once

#include "chunk.h"

namespace graphcore {

constexpr int CHANNEL_BLOCK = 64;  // channels of a unit of the convolution
constexpr int MOST_TAPS = 8;       // largest width of a convolution

// The last inputs of a block of channels, by tap: the oldest first.
using Window = float[MOST_TAPS][CHANNEL_BLOCK];

// The weights of a convolution, and the inputs that it keeps of each sequence.
struct Taps {
    const float *weight, *bias;               // [channels, width], and [channels] or null
    uint8_t* kept;                            // [caches, channels, width - 1] of format
    const int64_t *starts, *counts, *caches;  // [sequences]; caches: index of the kept inputs, or null if they are in order
    int channels, width, format;

    size_t cache(int sequence) const { return caches ? size_t(caches[sequence]) : size_t(sequence); }
    size_t place(int sequence, int channel) const { return (cache(sequence) * channels + channel) * (width - 1); }
};

inline int channel_blocks(int channels) { return (channels + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK; }

// Reads the inputs before token `first`: from the kept ones if they are from before the pass. read: see convolve_channels.
template <class Read>
inline void read_window(const Taps& a, int sequence, int first, int channel, int count, const Read& read, Window window) {
    const int kept = a.width - 1;
    for (int tap = 0; tap < kept; tap++) {
        const int token = first - kept + tap;
        if (token >= 0) {
            read(token, channel, count, window[tap]);
        } else if (a.starts[sequence] == 0) {
            std::fill(window[tap], window[tap] + count, 0.0f);
        } else {
            for (int c = 0; c < count; c++)
                widen_row(a.kept + (a.place(sequence, channel + c) + size_t(kept + token)) * format_nbytes(a.format), 1, a.format, window[tap] + c);
        }
    }
}

inline void write_window(const Taps& a, int sequence, int channel, int count, const Window window, int oldest) {
    for (int tap = 0; tap < a.width - 1; tap++)
        for (int c = 0; c < count; c++)
            narrow_row(&window[(oldest + tap) % a.width][c], 1, a.format, a.kept + (a.place(sequence, channel + c) + tap) * format_nbytes(a.format));
}

// Convolves a block of channels of one sequence over tokens `first` to `end`, and keeps the inputs up to the last real token.
//
// read(token, channel, count, to) writes a token's inputs of some channels; put(token, channel, count, sums) takes the sums
// of a block, of which the first `count` are valid.
template <class Read, class Put>
inline void convolve_channels(const Taps& a, int sequence, int channel, int first, int end, const Read& read, const Put& put) {
    const int count = std::min(CHANNEL_BLOCK, a.channels - channel);
    if (first >= end) return;
    Window taps{}, window{};
    for (int tap = 0; tap < a.width; tap++)
        for (int c = 0; c < count; c++) taps[tap][c] = a.weight[size_t(channel + c) * a.width + tap];
    float bias[CHANNEL_BLOCK] = {}, sums[CHANNEL_BLOCK];
    if (a.bias) std::memcpy(bias, a.bias + channel, size_t(count) * 4);
    read_window(a, sequence, first, channel, count, read, window);
    int newest = a.width - 1;
    for (int token = first; token < end; token++, newest = (newest + 1) % a.width) {
        read(token, channel, count, window[newest]);
        const float* inputs[MOST_TAPS];
        for (int tap = 0; tap < a.width; tap++) inputs[tap] = window[(newest + 1 + tap) % a.width];
        for (int c = 0; c < CHANNEL_BLOCK; c += PART_LANES) {
            FloatPart total = load<FloatPart>(bias + c);
            for (int tap = 0; tap < a.width; tap++) total += load<FloatPart>(taps[tap] + c) * load<FloatPart>(inputs[tap] + c);
            store(sums + c, total);
        }
        put(token, channel, count, sums);
    }
    if (end == int(a.counts[sequence])) write_window(a, sequence, channel, count, window, (newest + 1) % a.width);
}

// ---- The gated short convolution

inline int gated_units(const GatedConvolution& a) { return a.sequences * channel_blocks(a.channels); }

// Runs all tokens of one sequence through a block of channels. The result for padding is 0.
inline void run_gated_convolution(const GatedConvolution& a, int unit) {
    const int sequence = unit / channel_blocks(a.channels), first_channel = unit % channel_blocks(a.channels) * CHANNEL_BLOCK;
    const size_t nbytes = format_nbytes(a.format);
    const int real = int(a.counts[sequence]);
    const auto mixed = [&](int part, int token, int channel) {  // part: 0 for b, 1 for c, 2 for x
        return a.mixed + ((size_t(sequence) * a.tokens + token) * a.stride + size_t(part) * a.channels + channel) * nbytes;
    };
    const auto out = [&](int token, int channel) { return a.out + ((size_t(sequence) * a.tokens + token) * a.channels + channel) * nbytes; };
    const auto read = [&](int token, int channel, int count, float* to) {
        float x[CHANNEL_BLOCK];
        widen_row(mixed(0, token, channel), count, a.format, to);
        widen_row(mixed(2, token, channel), count, a.format, x);
        for (int c = 0; c < count; c++) to[c] *= x[c];
    };
    const auto put = [&](int token, int channel, int count, float* sums) {
        float gate[CHANNEL_BLOCK];
        widen_row(mixed(1, token, channel), count, a.format, gate);
        for (int c = 0; c < count; c++) sums[c] *= gate[c];
        narrow_row(sums, count, a.format, out(token, channel));
    };
    const Taps taps = {a.conv_weight, a.conv_bias, a.convolution, a.starts, a.counts, a.caches, a.channels, a.width, a.state_format};
    convolve_channels(taps, sequence, first_channel, 0, real, read, put);
    const size_t count = size_t(std::min(CHANNEL_BLOCK, a.channels - first_channel));
    for (int token = real; token < a.tokens; token++) std::memset(out(token, first_channel), 0, count * nbytes);
}

}  // namespace graphcore
