// The job of products in the codes of packed matrices (products.h), or of dense rows in float32, with the same x.
#pragma once

#include "product_output.h"

namespace graphcore {

// Batches of TOKENS_AT_ONCE tokens, with two phases for each: round x, multiply.
class CodeProduct final : public Job {
  public:
    // x: [tokens, columns] of dtype.  activations: room for a batch.
    CodeProduct(const uint8_t* x, int tokens, int columns, int dtype, const ProductOutput* outputs, int count, Activations& activations)
        : x_(x), tokens_(tokens), columns_(columns), dtype_(dtype), outputs_(outputs), activations_(activations) {
        for (int i = 0; i < count; i++) groups_ += outputs[i].groups();
    }

    int phases() const override { return 2 * ((tokens_ + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE); }

    Deal deal(int phase, int threads) const override { return Deal::even(phase % 2 == ROUND ? count_of(phase) : groups_, threads); }

    void carry_out(int phase, Range units, int) override {
        const int first = phase / 2 * TOKENS_AT_ONCE;
        for (int unit = units.begin; unit < units.end; unit++) phase % 2 == ROUND ? round(first, unit) : multiply(first, count_of(phase), unit);
    }

  private:
    enum { ROUND, MULTIPLY };

    int count_of(int phase) const { return std::min(TOKENS_AT_ONCE, tokens_ - phase / 2 * TOKENS_AT_ONCE); }

    void round(int first, int row) {
        float* to = activations_.x + size_t(row) * activations_.columns;
        std::memset(to + columns_, 0, size_t(activations_.columns - columns_) * 4);
        widen_row(x_ + size_t(first + row) * columns_ * format_nbytes(dtype_), columns_, dtype_, to);
        activations_.finish(row);
    }

    void multiply(int first, int count, int unit) {
        const auto [output, group] = find_output(outputs_, unit, [](const ProductOutput& one) { return one.groups(); });
        f32x16 totals[TOKENS_AT_ONCE], up[TOKENS_AT_ONCE];
        int rows[TOKENS_AT_ONCE];
        for (int t = 0; t < count; t++) rows[t] = t;
        multiply_group(output->matrix, group, activations_, rows, count, totals);
        if (output->is_gated()) multiply_group(output->up, group, activations_, rows, count, up);
        for (int t = 0; t < count; t++) output->put(group, first + t, dtype_, (const float*)(totals + t), (const float*)(up + t));
    }

    const uint8_t* x_;
    int tokens_, columns_, dtype_, groups_ = 0;
    const ProductOutput* outputs_;
    Activations& activations_;
};

}  // namespace graphcore
