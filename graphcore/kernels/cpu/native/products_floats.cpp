// Products of the formats of Hugging Face's folders: zero points, float32 scales, codes that are floats.
#include "multiply.h"

namespace graphcore {
GRAPHCORE_MULTIPLY(AFFINE4)
GRAPHCORE_MULTIPLY(AFFINE8)
GRAPHCORE_MULTIPLY(FP8)
GRAPHCORE_MULTIPLY(NF4)
GRAPHCORE_MULTIPLY(FP4)
GRAPHCORE_MULTIPLY(NVFP4_F32)
}  // namespace graphcore
