// The job of products in panels (bf16_pairs.h) with the same x.
#pragma once

#include "bf16_pairs.h"
#include "product_output.h"

namespace graphcore {

// Two phases: arrange x in tiles, multiply.
class PanelProduct final : public Job {
  public:
    // x: [tokens, columns] of bf16.  tiles: tile_nbytes.  work: work_nbytes for each thread.
    PanelProduct(int threads, const uint8_t* x, int tokens, int columns, const ProductOutput* outputs, int count, uint8_t* tiles, uint8_t* work)
        : x_(x), tokens_(tokens), columns_(columns), outputs_(outputs), tiles_((uint32_t*)tiles), work_(work) {
        for (int i = 0; i < count; i++) panels_ += panels_of(outputs[i]);
        parts_ = std::clamp((2 * threads + panels_ - 1) / panels_, 1, num_tiles(tokens));
    }

    static int num_tiles(int tokens) { return (tokens + PANEL_TOKENS - 1) / PANEL_TOKENS; }
    static size_t tile_nbytes(int tokens, int columns) { return size_t(num_tiles(tokens)) * PANEL_TOKENS * columns * 2; }
    static size_t work_nbytes(int tokens) { return PANEL_NBYTES + num_tiles(tokens) * sizeof(PanelSums); }

    int phases() const override { return 2; }

    Deal deal(int phase, int threads) const override {
        return phase == ARRANGE ? Deal::even(num_tiles(tokens_), threads) : Deal{panels_ * parts_};  // a panel is work enough for a portion
    }

    void carry_out(int phase, Range units, int thread) override {
        for (int unit = units.begin; unit < units.end; unit++) phase == ARRANGE ? arrange(unit) : multiply(unit, work_ + thread * work_nbytes(tokens_));
    }

  private:
    enum { ARRANGE, MULTIPLY };

    uint32_t* tile_at(int tile) const { return tiles_ + size_t(tile) * PANEL_TOKENS * (columns_ / 2); }
    int tokens_of(int tile) const { return std::min(PANEL_TOKENS, tokens_ - tile * PANEL_TOKENS); }

    void arrange(int tile) { arrange_tile(x_ + size_t(tile) * PANEL_TOKENS * columns_ * 2, tokens_of(tile), columns_, tile_at(tile)); }

    // Multiplies a panel with a part of the tiles: matrices of few panels would leave threads without work.
    void multiply(int unit, uint8_t* work) {
        const auto [output, panel] = find_output(outputs_, unit / parts_, panels_of);
        const Range tiles = share(num_tiles(tokens_), unit % parts_, parts_);
        auto* sums = (PanelSums*)(work + PANEL_NBYTES);
        std::memset(sums, 0, (tiles.end - tiles.begin) * sizeof(PanelSums));
        for (int begin = 0; begin < columns_; begin += PANEL_COLUMNS) {
            const int end = std::min(begin + PANEL_COLUMNS, columns_);
            fill(*output, panel, {begin, end}, work);
            for (int tile = tiles.begin; tile < tiles.end; tile++)
                multiply_panel(work, tile_at(tile) + PANEL_TOKENS * (begin / 2), (end - begin) / 2, sums[tile - tiles.begin]);
        }
        for (int tile = tiles.begin; tile < tiles.end; tile++)
            for (int t = 0; t < tokens_of(tile); t++) put(*output, panel, sums[tile - tiles.begin][t], tile * PANEL_TOKENS + t);
    }

    // A panel has two groups of a matrix, or a group of a gate and the same group of its other matrix.
    static int panels_of(const ProductOutput& output) { return output.is_gated() ? output.groups() : (output.groups() + 1) / PANEL_GROUPS; }

    static void fill(const ProductOutput& output, int panel, Range columns, uint8_t* to) {
        if (output.is_gated()) {
            fill_panel(output.matrix, panel, columns, 0, to);
            return fill_panel(output.up, panel, columns, 1, to);
        }
        for (int i = 0; i < PANEL_GROUPS; i++)  // nobody reads the sums of a group that the matrix does not have
            if (const int group = panel * PANEL_GROUPS + i; group < output.groups()) fill_panel(output.matrix, group, columns, i, to);
    }

    static void put(const ProductOutput& output, int panel, const float* sums, size_t token) {
        if (output.is_gated()) return output.put(panel, token, BF16, sums, sums + GROUP_ROWS);
        for (int i = 0; i < PANEL_GROUPS; i++)
            if (const int group = panel * PANEL_GROUPS + i; group < output.groups()) output.put(group, token, BF16, sums + i * GROUP_ROWS, nullptr);
    }

    const uint8_t* x_;
    int tokens_, columns_, panels_ = 0, parts_;
    const ProductOutput* outputs_;
    uint32_t* tiles_;
    uint8_t* work_;
};

}  // namespace graphcore
