// Products of the formats with blocks of 32, and of ternary weights.
#include "multiply.h"

namespace graphcore {
GRAPHCORE_MULTIPLY(Q4_0)
GRAPHCORE_MULTIPLY(Q4_1)
GRAPHCORE_MULTIPLY(Q5_0)
GRAPHCORE_MULTIPLY(Q5_1)
GRAPHCORE_MULTIPLY(Q8_0)
GRAPHCORE_MULTIPLY(Iq4Nl)
GRAPHCORE_MULTIPLY(Mxfp4)
GRAPHCORE_MULTIPLY(I2_S)
GRAPHCORE_MULTIPLY(Tq2_0)
}  // namespace graphcore
