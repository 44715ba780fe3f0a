// Results of products with the same x: of one matrix, or of a gate's activation times another matrix's product.
#pragma once

#include "token_rows.h"

namespace graphcore {

// y = x @ matrix.T (+ bias), or f(that) * (x @ up.T (+ up_bias)) with all three numbers rounded to y's format.
struct ProductOutput {
    Matrix matrix, up;            // up: of the same shape; without rows if there is none
    const float *bias, *up_bias;  // [rows] each, or null
    uint8_t* y;                   // [tokens, rows]
    Activation activation;        // f
    int32_t unused;               // padding

    bool is_gated() const { return up.rows > 0; }
    int groups() const { return num_groups(matrix.rows); }

    // Stores the results of a group's rows for a token. sums, up_sums: [GROUP_ROWS] products; up_sums only if gated.
    void put(int group, size_t token, int format, const float* sums, const float* up_sums) const {
        const int first = group * GROUP_ROWS, height = std::min(GROUP_ROWS, matrix.rows - first);
        uint8_t* to = y + (token * matrix.rows + first) * format_nbytes(format);
        alignas(64) float values[GROUP_ROWS];
        for (int lane = 0; lane < GROUP_ROWS; lane += PART_LANES) {
            FloatPart value = with_bias(sums, bias, first, lane, height);
            if (is_gated()) value = gated(value, with_bias(up_sums, up_bias, first, lane, height), format);
            if (format == BF16 && height == GROUP_ROWS)
                store_halves(to + 2 * lane, bf16_bits(value));
            else
                store(values + lane, value);
        }
        if (format != BF16 || height < GROUP_ROWS) narrow_row(values, height, format, to);
    }

  private:
    static FloatPart with_bias(const float* sums, const float* bias, int first, int lane, int height) {
        const FloatPart total = load<FloatPart>(sums + lane);
        if (!bias) return total;
        if (height == GROUP_ROWS) return total + load<FloatPart>(bias + first + lane);
        float rest[PART_LANES] = {};
        for (int i = 0; i < PART_LANES && lane + i < height; i++) rest[i] = bias[first + lane + i];
        return total + load<FloatPart>(rest);
    }

    FloatPart gated(FloatPart gate, FloatPart up_part, int format) const {
        return rounded_part(activate_part(activation, rounded_part(gate, format)), format) * rounded_part(up_part, format);
    }

    static FloatPart rounded_part(FloatPart value, int format) {
        if (format == F32) return value;
        if (format == BF16) return rounded_to_bf16(value);
        for (int lane = 0; lane < PART_LANES; lane++) value[lane] = rounded_to(value[lane], format);
        return value;
    }
};

// The place of a unit of work among the outputs of a job.
struct OutputUnit {
    const ProductOutput* output;
    int index;  // of the unit within the output
};

// Returns the output that has the unit. count_of(output): units of an output.
template <class Count>
OutputUnit find_output(const ProductOutput* outputs, int unit, const Count& count_of) {
    for (; unit >= count_of(*outputs); outputs++) unit -= count_of(*outputs);
    return {outputs, unit};
}

}  // namespace graphcore
