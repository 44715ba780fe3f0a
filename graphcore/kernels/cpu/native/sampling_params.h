// The parameters of a row's choice. graphcore/kernels/cpu/native_header.py writes this file from sampling_params.py.
#pragma once

#include <cstdint>

namespace graphcore {

struct SamplingParams {
    float temperature;
    int32_t top_k;
    float top_p;
    float min_p;
    float repetition_penalty;
};

}  // namespace graphcore
