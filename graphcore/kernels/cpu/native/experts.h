// Experts of a mixture for many tokens: each chosen expert's output for its token.
//
//     hidden[c] = f(gate_e x[t]) * up_e x[t]      out[c] = down_e hidden[c]      choice c: the pair of token t and expert e
//
// Choices are sorted by expert, so that sixteen rows of an expert are read once for all of its tokens. The result of a choice
// depends on its token and its expert only, not on the number of tokens.
#pragma once

#include "chunk.h"

namespace graphcore {

struct ExpertsChunk {
    const uint8_t* x;       // [tokens, gate.columns] of format
    Matrix gate, up, down;  // matrices of place 0; those of other places follow, each padded to whole groups of rows
    const float *gate_bias, *up_bias, *down_bias;  // [experts, rows] each, or null
    const int32_t* sorted;  // [number of choices] choices by expert; choice c belongs to token c / used
    const int32_t* begins;  // [present + 1] index in `sorted` of each expert's first choice
    const int32_t *experts, *places;  // [present] ids of the experts that run, and places of their matrices
    uint8_t* out;                     // [tokens * used, down.rows] of format
    int32_t tokens, used, present, format;
    Rounding rounding;
    Activation activation;  // f, or CLAMPED_SWIGLU
    float limit, alpha;     // of CLAMPED_SWIGLU

    int num_choices() const { return begins[present]; }
};

// The experts as a job of four phases: round x, gate and up, round the hidden features, down.
class ExpertsJob final : public Job {
  public:
    // x, hidden: activations of a.tokens rows, and of a.num_choices() rows
    ExpertsJob(const ExpertsChunk& a, Activations& x, Activations& hidden) : a_(a), x_(x), hidden_(hidden) {}

    int phases() const override { return 4; }

    Deal deal(int phase, int threads) const override {
        if (phase == ROUND) return Deal::even(a_.tokens, threads);
        if (phase == ROUND_HIDDEN) return Deal::even(a_.num_choices(), threads);
        const int units = a_.present * num_groups((phase == UP ? a_.gate : a_.down).rows);
        return {units, std::max(1, units / (threads * 4 * PORTIONS))};  // small portions, because experts have few or many tokens
    }

    void carry_out(int phase, Range units, int) override {
        const int groups = num_groups((phase == UP ? a_.gate : a_.down).rows);
        for (int unit = units.begin; unit < units.end; unit++) {
            if (phase == ROUND) round_token(unit);
            if (phase == ROUND_HIDDEN) finish(hidden_, unit, a_.down.columns);
            if (phase == UP) fill_hidden(unit / groups, unit % groups);
            if (phase == DOWN) answer(unit / groups, unit % groups);
        }
    }

  private:
    enum { ROUND, UP, ROUND_HIDDEN, DOWN };

    static void finish(Activations& rows, int row, int columns) {
        std::memset(rows.x + size_t(row) * rows.columns + columns, 0, size_t(rows.columns - columns) * 4);
        rows.finish(row);
    }

    void round_token(int token) const {
        const int columns = a_.gate.columns;
        widen_row(a_.x + size_t(token) * columns * format_nbytes(a_.format), columns, a_.format, x_.x + size_t(token) * x_.columns);
        finish(x_, token, columns);
    }

    // Calls put(index in `sorted`, product) for each token that chose an expert.
    template <class RowOf, class Put>
    void for_each_product(int index, int group, const Matrix& first, const float* biases, const Activations& x, const RowOf& row_of, const Put& put) const {
        const Matrix matrix = matrix_at(first, a_.places[index]);
        const float* bias = bias_at(biases, matrix.rows, a_.experts[index], group);
        const int height = std::min(GROUP_ROWS, matrix.rows - group * GROUP_ROWS), end = a_.begins[index + 1];
        const f32x16 added = bias ? load_some(bias, height) : f32x16{};
        for (int begin = a_.begins[index]; begin < end; begin += TOKENS_AT_ONCE) {
            f32x16 totals[TOKENS_AT_ONCE];
            int rows[TOKENS_AT_ONCE];
            const int count = std::min(TOKENS_AT_ONCE, end - begin);
            for (int t = 0; t < count; t++) rows[t] = row_of(begin + t);
            multiply_group(matrix, group, x, rows, count, totals);
            for (int t = 0; t < count; t++) put(begin + t, height, bias ? totals[t] + added : totals[t]);
        }
    }

    void fill_hidden(int index, int group) const {
        const auto token_of = [&](int i) { return a_.sorted[i] / a_.used; };
        const auto place_of = [&](int i) { return hidden_.x + size_t(i) * hidden_.columns + group * GROUP_ROWS; };
        for_each_product(index, group, a_.gate, a_.gate_bias, x_, token_of, [&](int i, int height, f32x16 gate) { store_some(gate, height, place_of(i)); });
        for_each_product(index, group, a_.up, a_.up_bias, x_, token_of, [&](int i, int height, f32x16 up) {
            store_some(gated_features(a_.activation, load_some(place_of(i), height), up, a_.limit, a_.alpha), height, place_of(i));
        });
    }

    void answer(int index, int group) const {
        for_each_product(index, group, a_.down, a_.down_bias, hidden_, [](int i) { return i; }, [&](int i, int height, f32x16 y) {
            const size_t at = size_t(a_.sorted[i]) * a_.down.rows + group * GROUP_ROWS;
            narrow_row((const float*)&y, height, a_.format, a_.out + at * format_nbytes(a_.format));
        });
    }

    const ExpertsChunk& a_;
    Activations &x_, &hidden_;
};

}  // namespace graphcore
