// Products of the formats with blocks of 256, and of the rarer ones.
#include "multiply.h"

namespace graphcore {
GRAPHCORE_MULTIPLY(Q2_K)
GRAPHCORE_MULTIPLY(Q3_K)
GRAPHCORE_MULTIPLY(Q4_K)
GRAPHCORE_MULTIPLY(Q5_K)
GRAPHCORE_MULTIPLY(Q6_K)
GRAPHCORE_MULTIPLY(Iq4Xs)
GRAPHCORE_MULTIPLY(Nvfp4)
GRAPHCORE_MULTIPLY(Q1_0)
GRAPHCORE_MULTIPLY(Q2_0)
}  // namespace graphcore
