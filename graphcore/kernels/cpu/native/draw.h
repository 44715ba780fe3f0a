// Samples a token from a row of logits: mask, penalty, top-k, temperature, top-p, min-p, and an exponential race.
//
// Each token that the filters keep has a weight, exp((logit - highest) / temperature), and noise from the exponential
// distribution. The token with the largest weight / noise is chosen, the first of equals. The noise is a function of the seed,
// the position and the token. kernels/ops/draw.py does the same in torch, and kernels/gpu/sampling in Triton, with the same
// float32 operations in the same order and without fused multiply-adds, so that all three choose the same tokens.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sampling_params.h"
#include "team.h"

namespace graphcore {

// One row. Python's `_Row` (kernels/ops/draw.py) mirrors it.
struct Draw {
    const float* logits;      // [vocab]
    const uint8_t* seen;      // [vocab], 1 for tokens that the penalty applies to; null without a penalty
    const uint8_t* allowed;   // [vocab], 1 for tokens that may be chosen; null if all may be
    uint64_t seed, position;
    SamplingParams params;    // a temperature of 0 is greedy
    int32_t num_bad;          // out: logits that are not finite
    int64_t token;            // out: -1 if no token may be chosen
};

size_t draw_nbytes(int vocab);  // the bytes of a thread's scratch

// Sets row.token and row.num_bad. memory: draw_nbytes(vocab), at a multiple of 64 bytes.
void draw_token(Draw& row, int vocab, uint8_t* memory);

// A job that draws a token for each row.
class DrawJob final : public Job {
  public:
    // memory: [threads, draw_nbytes(vocab)]
    DrawJob(Draw* rows, int count, int vocab, uint8_t* memory) : rows_(rows), count_(count), vocab_(vocab), memory_(memory) {}

    int phases() const override { return 1; }
    Deal deal(int, int) const override { return {count_, 1}; }
    void carry_out(int, Range units, int thread) override {
        for (int row = units.begin; row < units.end; row++) draw_token(rows_[row], vocab_, memory_ + thread * draw_nbytes(vocab_));
    }

  private:
    Draw* rows_;
    int count_, vocab_;
    uint8_t* memory_;
};

}  // namespace graphcore
