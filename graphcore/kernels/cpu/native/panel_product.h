// The job of products in panels (bf16_pairs.h) with the same x.
#pragma once

#include "bf16_pairs.h"
#include "product_output.h"

namespace graphcore {

// Two phases: arrange x in tiles, multiply.
class PanelProduct final : public Job {
  public:
    // x: [tokens, columns] of bf16.  tiles: tile_nbytes.  work: work_nbytes for each thread.
    PanelProduct(int threads, bool uses_amx, const uint8_t* x, int tokens, int columns, const ProductOutput* outputs, int count, uint8_t* tiles, uint8_t* work)
        : uses_amx_(uses_amx), tile_tokens_(tile_tokens(uses_amx)), x_(x), tokens_(tokens), columns_(columns), outputs_(outputs), tiles_((uint32_t*)tiles), work_(work) {
        for (int i = 0; i < count; i++) panels_ += panels_of(outputs[i]);
        parts_ = std::clamp((2 * threads + panels_ - 1) / panels_, 1, num_tiles());
    }

    static size_t tile_nbytes(bool uses_amx, int tokens, int columns) { return padded(uses_amx, tokens) * columns * 2; }
    static size_t work_nbytes(bool uses_amx, int tokens) { return PANEL_NBYTES + padded(uses_amx, tokens) * PANEL_ROWS * 4; }

    int phases() const override { return 2; }

    Deal deal(int phase, int threads) const override {
        return phase == ARRANGE ? Deal::even(num_tiles(), threads) : Deal{panels_ * parts_};  // a panel is work enough for a portion
    }

    void carry_out(int phase, Range units, int thread) override {
        if (phase == ARRANGE) {
            for (int unit = units.begin; unit < units.end; unit++) arrange(unit);
            return;
        }
        uint8_t* work = work_ + thread * work_nbytes(uses_amx_, tokens_);
        if (!uses_amx_) return multiply<PANEL_COLUMNS>(units, work, multiply_panel);
        const AmxShapes shapes;
        multiply<AMX_COLUMNS>(units, work, multiply_amx_panel);
    }

  private:
    enum { ARRANGE, MULTIPLY };

    static int tile_tokens(bool uses_amx) { return uses_amx ? AMX_TOKENS : PANEL_TOKENS; }
    static size_t padded(bool uses_amx, int tokens) { return size_t((tokens + tile_tokens(uses_amx) - 1) / tile_tokens(uses_amx)) * tile_tokens(uses_amx); }

    int num_tiles() const { return int(padded(uses_amx_, tokens_)) / tile_tokens_; }
    uint32_t* tile_at(int tile) const { return tiles_ + size_t(tile) * tile_tokens_ * (columns_ / 2); }
    int tokens_of(int tile) const { return std::min(tile_tokens_, tokens_ - tile * tile_tokens_); }

    void arrange(int tile) { (uses_amx_ ? arrange_amx_tile : arrange_tile)(x_ + size_t(tile) * tile_tokens_ * columns_ * 2, tokens_of(tile), columns_, tile_at(tile)); }

    // Multiplies panels with a part of the tiles each: matrices of few panels would leave threads without work.
    template <int COLUMNS, class Multiply>
    void multiply(Range units, uint8_t* work, const Multiply& multiply_tile) {
        for (int unit = units.begin; unit < units.end; unit++) {
            const auto [output, panel] = find_output(outputs_, unit / parts_, panels_of);
            const Range tiles = share(num_tiles(), unit % parts_, parts_);
            auto* sums = (float*)(work + PANEL_NBYTES);
            const size_t of_tile = size_t(tile_tokens_) * PANEL_ROWS;
            std::memset(sums, 0, (tiles.end - tiles.begin) * of_tile * 4);
            for (int begin = 0; begin < columns_; begin += COLUMNS) {
                const int end = std::min(begin + COLUMNS, columns_);
                fill(*output, panel, {begin, end}, work);
                for (int tile = tiles.begin; tile < tiles.end; tile++)
                    multiply_tile(work, tile_at(tile) + tile_tokens_ * (begin / 2), (end - begin) / 2, sums + (tile - tiles.begin) * of_tile);
            }
            for (int tile = tiles.begin; tile < tiles.end; tile++)
                for (int t = 0; t < tokens_of(tile); t++)
                    put(*output, panel, sums + (tile - tiles.begin) * of_tile + t * PANEL_ROWS, tile * tile_tokens_ + t);
        }
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

    bool uses_amx_;
    int tile_tokens_;
    const uint8_t* x_;
    int tokens_, columns_, panels_ = 0, parts_;
    const ProductOutput* outputs_;
    uint32_t* tiles_;
    uint8_t* work_;
};

}  // namespace graphcore
