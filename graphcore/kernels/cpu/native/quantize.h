// Quantisation of dense weights: the blocks that a file stores, with the same bits as graphcore/quant/formats/ in torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graphcore {

constexpr int UNIT_WEIGHTS = 4096;  // weights that a thread quantises at a time: a whole number of blocks of each format

// Facts of weights that were quantised.
struct QuantizedSums {
    double difference = 0;  // sum of the squared differences from the weights that a reader computes
    double size = 0;        // sum of the squared weights
    float largest = 0;      // largest magnitude of a weight; NaN if one is NaN

    void add(const QuantizedSums& other);
};

// Returns whether a format is quantised here.
bool can_quantize(int format);

// Quantises some weights and returns their sums, which do not depend on the instruction set.
// dense: [weights] of dtype; at most UNIT_WEIGHTS, a whole number of blocks.  blocks: memory of the blocks.
QuantizedSums quantize_unit(int format, int dtype, int weights, const uint8_t* dense, uint8_t* blocks);

}  // namespace graphcore
