"""The ops of matrices packed for a GPU are one node each of a compiled graph."""

import torch
from support.packed_matrices import stored_matrix

from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.quant.level_formats import grid_tensor

CHECKS = ("test_schema", "test_faketensor")


def test_ops_are_traced_with_the_shapes_and_dtypes_that_they_give() -> None:
    matrix = stored_matrix("q4_k", 19, 256)
    packing = DevicePacking("q4_k", 19, 256)
    packed = packing.pack(matrix.rows, matrix.scale)
    x, ids = torch.randn(2, 3, 256).bfloat16(), torch.tensor([[3, 18]])
    ops = torch.ops.graphcore
    for rounds in (True, False):
        torch.library.opcheck(
            ops.device_linear.default, (x, packed, None, "q4_k", 19, 256, "", rounds), test_utils=CHECKS
        )
    torch.library.opcheck(ops.device_rows.default, (ids, packed, "q4_k", 19, 256, "", torch.float32), test_utils=CHECKS)
    torch.library.opcheck(ops.device_matrix.default, (packed, "q4_k", 19, 256, "", torch.float16), test_utils=CHECKS)


def test_planes_are_written_in_place() -> None:
    matrix = stored_matrix("iq2_s", 19, 256)
    packing = DevicePacking("iq2_s", 19, 256)
    arrived, grid = matrix.rows.flatten(), grid_tensor("IQ2_S", matrix.rows.device)
    out = torch.zeros(packing.nbytes, dtype=torch.uint8)
    op = torch.ops.graphcore.write_planes.default
    torch.library.opcheck(op, (arrived, grid, out, "iq2_s", 19, 256, ""), test_utils=CHECKS)
    packing.expansion(arrived, out)()
    assert torch.equal(out, packing.pack(matrix.rows))


def test_a_product_is_compiled_whole() -> None:
    matrix = stored_matrix("q6_k", 19, 256)
    packing = DevicePacking("q6_k", 19, 256)
    packed = packing.pack(matrix.rows, matrix.scale)

    def project(x: torch.Tensor) -> torch.Tensor:
        return packing.linear(x, packed, None, "wide") * 2

    x = torch.randn(3, 256)
    compiled = torch.compile(project, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), project(x), rtol=0, atol=0)
