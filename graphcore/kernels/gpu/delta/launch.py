"""`graphcore::delta_heads` on a GPU; kernels/ops/gated_delta.py says what it computes. The host does not wait.

one token      convolve | rule and norm                    2 kernels
many tokens    convolve | prepare | scan | norm            4
"""

from torch import Tensor

from graphcore.kernels.custom_ops import register_implementation
from graphcore.kernels.gpu.delta.chunks import MOST_KEYS, launch_chunks
from graphcore.kernels.gpu.delta.convolve import launch_convolve
from graphcore.kernels.gpu.delta.one_token import launch_one_token
from graphcore.kernels.ops.gated_delta import DeltaParts, plain_delta_heads


def launch_delta_heads(parts: DeltaParts) -> Tensor:
    """Implement `delta_heads`."""
    is_one = parts.mixed.shape[1] == 1
    if not is_one and parts.recurrent.shape[2] > MOST_KEYS:
        return plain_delta_heads(parts)
    inputs = {name: getattr(parts, name).contiguous() for name in ("mixed", "z", "a", "b")}
    parts = parts._replace(**inputs)
    launch = launch_one_token if is_one else launch_chunks
    return launch(parts, *launch_convolve(parts))


register_implementation("delta_heads", "CUDA", launch_delta_heads)
