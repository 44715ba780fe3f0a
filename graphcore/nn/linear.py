"""The linear layer of all projections: dense, packed, or with int8 activations.

Legend: B batch, T tokens, I input features, O output features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from graphcore.activations import Activation
from graphcore.kernels.backend import Backend, TorchBackend
from graphcore.kernels.cpu.kernel_packing import DENSE_TOKENS
from graphcore.kernels.cpu.products import Operand, multiply, multiply_gated
from graphcore.kernels.ops.int8_rows import Int8Rows, quantize_rows
from graphcore.kernels.packing import Packing
from graphcore.nn.spec import Int8Order

fx.wrap(
    "quantize_rows"
)  # traced as one operation (graph/lowering/tracing.py), because modules call `prepare` outside of their Linears

CODE_UNIT = 128  # divisor of codes before a product: it is exact, and keeps sums within fp16's range


ALIKE_ROWS = 4
"""Rows of x are padded to a multiple of this, so that the library's bits of a row do not depend on the other rows.

Measured with torch 2.13 on the CPU (oneDNN, MKL), 14 shapes, 1 to 32 rows: in float32 the last of 5, 6, 7, 9, 10 or 11
rows differ, and rows of 1 to 3 differ from those of more; in 16 bits a single row may differ.
"""


class Linear(nn.Module):
    """x @ weight.T (+ bias); with an `int8_order`, x is first rounded to int8 per token.

    With an `input_order` the weight's columns lie in another order than x, so that x[..., input_order] is multiplied.

    The weight is dense, [O, I] in the compute dtype, or packed, [nbytes] uint8; then `packing` multiplies with it.
    If `rounding` is "token", the packed product rounds x itself. Otherwise a packed weight with an `int8_order` is
    unpacked for each product, so that float32 follows that order to the bit.

    In a compiled graph on the CPU, a single row is multiplied elementwise and summed: Inductor turns that into one
    vectorised loop that reads the weight at memory speed (45 GB/s on two cores; the library's matrix product reads 15
    to 30).

    Attributes:
        weight: [O, I] compute dtype, or packed; -1, 0 and 1 if there is a `weight_scale`.
        weight_scale: [1] float32, divisor or factor of the product; None if the weight is scaled already.
        input_order: [I] int32, feature of x for each column of the weight; None if they are in the same order.
        rounding: rounding of x for a packed weight, one of those in kernels/cpu/kernel_packing.py.
        lora_A, lora_B: dense projections to R features and back, whose product is added (LoRA); None without adapters.
    """

    weight: Tensor
    weight_scale: Tensor | None
    bias: Tensor | None
    input_order: Tensor | None
    packing: Packing | None

    def __init__(
        self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, int8_order: Int8Order | None = None
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.dtype = dtype
        self.packing = None
        self.backend: Backend = TorchBackend()
        self.rounding = "float"
        self.int8_order = int8_order
        self.lora_A: Linear | None = None
        self.lora_B: Linear | None = None
        has_scale = int8_order in ("divided", "multiplied")
        self.register_buffer("weight", torch.empty(outputs, inputs, dtype=dtype))
        self.register_buffer("weight_scale", torch.empty(1, dtype=torch.float32) if has_scale else None)
        self.register_buffer("bias", torch.empty(outputs, dtype=dtype) if bias else None)
        self.register_buffer("input_order", None)

    def reorder_input(self) -> None:
        """Give the projection an empty `input_order`, which is written later."""
        self.input_order = torch.empty(self.inputs, dtype=torch.int32, device=self.weight.device)

    def pack(self, packing: Packing, rounding: str) -> None:
        """Replace the weight by an empty packed one, whose bytes are written later."""
        self.packing, self.rounding = packing, rounding
        self.weight = torch.empty(packing.nbytes, dtype=torch.uint8, device="meta")

    def add_low_rank(self, rank: int) -> None:
        """Add low-rank factors of R = `rank` features, whose bytes are written later."""
        assert self.int8_order is None, "projections that round their input have no adapters"
        self.lora_A = Linear(self.inputs, rank, bias=False, dtype=self.dtype)
        self.lora_B = Linear(rank, self.outputs, bias=False, dtype=self.dtype)
        self.lora_A.backend = self.lora_B.backend = self.backend

    def hold_scale(self) -> None:
        """Drop `weight_scale`, because the packed weight has its own scales, one per block."""
        self.weight_scale = None
        self.int8_order = "online"

    def part(self, begin: int, end: int) -> "Linear":
        """Return the projection to output features begin .. end - 1; its weight is a view of this one's.

        Args:
            begin: first output feature; a multiple of sixteen if the weight is packed.
        """
        assert self.bias is None, "heads have none"
        assert self.weight_scale is None, "heads have none"
        assert self.input_order is None, "heads have none"
        whole = (begin, end) == (0, self.outputs)
        with torch.device("meta"):
            part = Linear(self.inputs, end - begin, bias=False, dtype=self.dtype, int8_order=self.int8_order)
        part.rounding = self.rounding
        if self.packing is None or whole:
            part.packing, part.weight = self.packing, self.weight[begin:end] if self.packing is None else self.weight
        else:
            part.packing, start = self.packing.part(begin, end)
            part.weight = self.weight[start : start + part.packing.nbytes]
        return part

    @property
    def is_plain(self) -> bool:
        """True if the forward pass is only x @ weight.T (+ bias), without an output scale or rounding to int8."""
        return self.weight_scale is None and (self.int8_order is None or self.rounding == "token")

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token's product has the same bits in every eager batch of at least `DENSE_TOKENS` tokens.

        True where C++ kernels multiply, False where a library of torch does (`Packing.is_batch_invariant`).
        """
        if self.packing is not None:
            multiplies_codes = self.int8_order is None or self.rounding == "token"
            return multiplies_codes and self.packing.is_batch_invariant(self.dtype, self.rounding)
        return bool(_operands([self], torch.empty(DENSE_TOKENS, self.inputs, dtype=self.dtype, device="cpu")))

    def prepare(self, x: Tensor) -> Tensor | Int8Rows:
        """Return `x` in the form that this projection reads; projections of the same input may share it."""
        return x if self.int8_order is None or self.rounding == "token" else quantize_rows(x)

    def forward(self, x: Tensor | Int8Rows) -> Tensor:
        """Project.

        Args:
            x: [..., I] compute dtype, or the result of `prepare`.

        Returns:
            [..., O] compute dtype.
        """
        if self.lora_A is not None and isinstance(x, Tensor):
            return self.with_low_rank(self._product(x), x)
        return self._product(x)

    def with_low_rank(self, product: Tensor, x: Tensor) -> Tensor:
        """Return product + lora_B(lora_A(x)), rounded once; the product itself if there are no adapters.

        Args:
            product: [..., O] compute dtype, x @ weight.T (+ bias).
            x: [..., I] compute dtype.
        """
        if self.lora_A is None or self.lora_B is None:
            return product
        added: Tensor = self.lora_B(self.lora_A(x))
        return (product.float() + added.float()).to(self.dtype)

    def _product(self, x: Tensor | Int8Rows) -> Tensor:
        """Return x @ weight.T (+ bias): [..., O] compute dtype."""
        if self.input_order is not None:
            x = _reordered(x, self.input_order)
        if isinstance(x, Tensor):
            if self.packing is not None and (self.int8_order is None or self.rounding == "token"):
                return self._packed_product(x, self.packing)
            if self.int8_order is None:
                operands = _operands([self], x)
                return multiply(x, operands)[0] if operands else _linear(x, self.weight, self.bias)
            x = quantize_rows(x)
        product = self._product_of_codes(x)
        if self.bias is not None:
            product = product + self.bias.float()
        return product.to(self.dtype)

    def _packed_product(self, x: Tensor, packing: Packing) -> Tensor:
        """Multiply with the packed bytes: [..., I] -> [..., O]."""
        if self.weight_scale is None:
            return packing.linear(x, self.weight, self.bias, self.rounding)
        product = packing.linear(x, self.weight, None, self.rounding).float()
        product = product / self.weight_scale if self.int8_order == "divided" else product * self.weight_scale
        if self.bias is not None:
            product = product + self.bias.float()
        return product.to(x.dtype)

    def _product_of_codes(self, x: Int8Rows) -> Tensor:
        """Return the product in the order of `int8_order`: [..., O] float32."""
        dtype, scale = self.dtype, self.weight_scale
        weight = self.weight if self.packing is None else self.packing.unpack(self.weight, dtype)
        if self.int8_order == "divided":
            assert scale is not None, "this order has a scale"
            product = _linear(x.codes.to(dtype) / CODE_UNIT, weight, None).float()
            return product * CODE_UNIT / (x.scale * scale)
        product = _linear((x.codes / x.scale).to(dtype), weight, None).float()
        return product if scale is None else product * scale


class Float32Linear(Linear):
    """A projection to few features whose product is float32, though weight and x are of a 16-bit dtype: a router."""

    @property
    def is_batch_invariant(self) -> bool:
        """As in `Linear`, for x in float32."""
        if self.packing is not None:
            return self.packing.is_batch_invariant(torch.float32, self.rounding)
        return self.backend.token_rows(torch.empty(1, dtype=torch.float32, device="cpu")) is not None

    def _product(self, x: Tensor | Int8Rows) -> Tensor:
        """Return x @ weight.T (+ bias): [..., O] float32."""
        assert not isinstance(x, Int8Rows), "routers do not round their input to int8"
        if self.packing is not None:
            return super()._product(x.float())
        x = x if self.input_order is None else x.index_select(-1, self.input_order)
        kernels = self.backend.token_rows(x)
        if kernels is not None:
            return multiply(x.float(), [kernels.row_operand(self.weight, self.bias)])[0]
        bias = None if self.bias is None else self.bias.float()
        return _linear(x.float(), self.weight.float(), bias)


def projection_of(name: str) -> str:
    """Return the name of the projection that a low-rank factor belongs to; any other name as it is."""
    return name.removesuffix(".lora_A").removesuffix(".lora_B")


class StackedLinear(nn.Module):
    """Several matrices of one shape: weight [X, O, I] and bias [X, O] or None, with I input and O output features.

    A packed weight is [X, nbytes] uint8, and `packing` is the packing of one matrix.
    """

    weight: Tensor
    bias: Tensor | None
    packing: Packing | None

    def __init__(self, count: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.packing = None
        self.rounding = "float"
        self.register_buffer("weight", torch.empty(count, outputs, inputs, dtype=dtype))
        self.register_buffer("bias", torch.empty(count, outputs, dtype=dtype) if bias else None)

    @property
    def is_batch_invariant(self) -> bool:
        """As in `Linear`: dense matrices are multiplied by torch."""
        return self.packing is not None and self.packing.is_batch_invariant(self.dtype, self.rounding)

    def pack(self, packing: Packing, rounding: str) -> None:
        """Replace the weights by empty packed ones, whose bytes are written later; `rounding` as in `Linear.pack`."""
        self.packing, self.rounding = packing, rounding
        self.weight = torch.empty(len(self.weight), packing.nbytes, dtype=torch.uint8, device="meta")


def joint_projections(linears: Sequence[Linear], x: Tensor | Int8Rows) -> list[Tensor] | None:
    """Run several projections of x as one fused C++ kernel call; None if these weights have no such kernel.

    Args:
        x: as in `Linear.forward`.

    Returns:
        [..., O] in the compute dtype for each projection.
    """
    if isinstance(x, Tensor) and (operands := _operands(linears, x)):
        products = multiply(x, operands)
        return [one.with_low_rank(product, x) for one, product in zip(linears, products, strict=True)]
    return None


def gated_projection(gate: Linear, up: Linear, x: Tensor | Int8Rows, activation: Activation) -> Tensor | None:
    """Return activation(gate(x)) * up(x), [..., O] compute dtype, from one fused C++ call; None without a kernel."""
    if gate.lora_A is not None or up.lora_A is not None:
        return None
    if isinstance(x, Tensor) and (operands := _operands([gate, up], x)):
        return multiply_gated(x, operands[0], operands[1], activation)
    return None


def _operands(linears: Sequence[Linear], x: Tensor) -> list[Operand]:
    """Return the operands of a single C++ call; empty if the weights need different kernels, or torch."""
    kernels = linears[0].backend.token_rows(x)
    if kernels is None or not all(type(one) is Linear and one.is_plain for one in linears):
        return []
    if len(linears) > 1 and any(one.input_order is not None for one in linears):
        return []  # each reads x in an order of its own
    found = [kernels.operand(x, one.weight, one.packing, one.rounding, one.bias) for one in linears]
    operands = [one for one in found if one is not None]
    return operands if len(operands) == len(found) and len({one.method for one in operands}) == 1 else []


def _reordered(x: Tensor | Int8Rows, order: Tensor) -> Tensor | Int8Rows:
    """Return x with its features in an order, int32 [I]."""
    if isinstance(x, Tensor):
        return x.index_select(-1, order)
    return x._replace(codes=x.codes.index_select(-1, order))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias: [..., O] in x's dtype."""
    if torch.compiler.is_compiling() and x.device.type == "cpu" and is_one_row(x):
        product = (x.float().unsqueeze(-2) * weight.float()).sum(-1)  # [..., 1, I] * [O, I] -> [..., O]
        if bias is not None:
            product = product + bias.float()
        return product.to(x.dtype)
    if torch.compiler.is_compiling() and x.device.type == "cpu" and is_a_token_each(x):
        missing = -x.shape[0] % ALIKE_ROWS
        padded = nn.functional.pad(x, (*(0, 0) * (x.ndim - 1), 0, missing))
        return nn.functional.linear(padded, weight, bias)[: x.shape[0]]
    return nn.functional.linear(x, weight, bias)


def is_a_token_each(x: Tensor) -> bool:
    """Return whether `x` [B, ..., I] is statically known (no guard on a symbolic size) to be one token each of B > 1.

    The results of a sequence must then not depend on its row or on the other rows.
    """
    rows = x.shape[:-1]
    return all(isinstance(size, int) for size in rows) and rows[0] > 1 and rows[1:].numel() == 1


def is_one_row(x: Tensor) -> bool:
    """Return whether `x` [..., I] is statically known (no guard on a symbolic size) to have a single row."""
    return all(isinstance(size, int) and size == 1 for size in x.shape[:-1])
