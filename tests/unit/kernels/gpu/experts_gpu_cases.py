"""Launches of the experts' kernels with the shapes of gpt-oss, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from graphcore.activations import CLAMPED_SWIGLU, SILU, Gating
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.experts.fetch import launch_take
from graphcore.kernels.gpu.experts.few_tokens import launch_few
from graphcore.kernels.gpu.experts.grouped import launch_many
from graphcore.kernels.gpu.experts.launch import launch_add_experts, launch_cached_experts
from graphcore.kernels.gpu.experts.operands import mixture_of
from graphcore.kernels.gpu.experts.router import launch_choose_experts, launch_route
from graphcore.kernels.gpu.mean_squares import FusedNorm
from graphcore.kernels.ops.expert_slots import ExpertSlots
from graphcore.routing import ScoredRouting

DIM, EXPERTS, TOP_K = 2880, 32, 4
SWIGLU = Gating(CLAMPED_SWIGLU, 7.0, 1.702)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def weights_of(form: str, experts: int = EXPERTS, dim: int = DIM, hidden: int = DIM) -> list[Tensor]:
    shapes = ((hidden, dim), (hidden, dim), (dim, hidden))
    if form == "dense":
        return [empty(experts, *shape) for shape in shapes]
    return [empty(experts, DevicePacking(form, *shape).nbytes, dtype=torch.uint8) for shape in shapes]


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    biases = [empty(EXPERTS, DIM)] * 3
    places = empty(EXPERTS, dtype=torch.int32)

    def few(form: str) -> None:
        mixture = mixture_of(weights_of(form), biases, None, DIM, SWIGLU, [form] * 3)
        launch_few(empty(1, DIM), empty(1, TOP_K, dtype=torch.int64), mixture)

    def summed(form: str, tokens: int = 1, feeds: bool = False) -> None:
        stream, chosen = empty(tokens, DIM, dtype=torch.float32), empty(tokens, TOP_K, dtype=torch.int64)
        how = weights_of(form), biases, places, DIM, SWIGLU, [form] * 3
        weight, squares = empty(DIM, dtype=torch.float32), empty(tokens, 2, dtype=torch.int64)
        fused = FusedNorm(weight, empty(tokens, DIM), squares) if feeds else None
        launch_add_experts(stream, empty(tokens, DIM), chosen, empty(tokens, TOP_K), *how, None, None, fused)

    def many(form: str) -> None:
        mixture = mixture_of(weights_of(form), biases, None, DIM, SWIGLU, [form] * 3)
        launch_many(empty(512, DIM), empty(512, TOP_K, dtype=torch.int64), mixture)

    def route(tokens: int) -> None:
        counts = empty(tokens, dtype=torch.int64)
        launch_route(empty(tokens, DIM), empty(EXPERTS, DIM), empty(EXPERTS), counts, TOP_K, False)

    for form in ("dense", "mxfp4"):
        for call in (few, summed, many):
            yield f"{call.__name__} {form}", lambda call=call, form=form: call(form)
    yield "linked summed dense", lambda: summed("dense", feeds=True)
    yield "linked summed mxfp4", lambda: summed("mxfp4", feeds=True)
    yield "linked summed mxfp4 x 8", lambda: summed("mxfp4", 8, feeds=True)
    yield "summed mxfp4 x 8", lambda: summed("mxfp4", 8)
    yield "few q8_0", lambda: few("q8_0")
    yield "few q4_0", lambda: few("q4_0")
    yield "many q8_0", lambda: many("q8_0")
    for form in ("affine4", "affine8", "fp8", "nf4", "fp4", "nvfp4_f32"):
        yield f"few {form}", lambda form=form: few(form)
        yield f"many {form}", lambda form=form: many(form)
    yield "router in one launch", lambda: route(1)
    yield "router in one launch x 4", lambda: route(4)
    yield "router", lambda: launch_choose_experts(empty(1, EXPERTS), empty(1, dtype=torch.int64), TOP_K, False)
    yield from cases_of_qwen()
    yield from cases_of_scored_routers()
    yield from cases_of_slots()


def cases_of_qwen() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield launches without biases, with SiLU, of the shapes of Qwen3-30B-A3B."""
    experts, top_k, dim, hidden = 128, 8, 2048, 768

    def summed(form: str) -> None:
        stream, chosen = empty(1, dim, dtype=torch.float32), empty(1, top_k, dtype=torch.int64)
        how = weights_of(form, experts, dim, hidden), [], None, hidden, SILU, [form] * 3
        launch_add_experts(stream, empty(1, dim), chosen, empty(1, top_k), *how)

    def many(form: str) -> None:
        mixture = mixture_of(weights_of(form, experts, dim, hidden), [], None, hidden, SILU, [form] * 3)
        launch_many(empty(512, dim), empty(512, top_k, dtype=torch.int64), mixture)

    for form in ("dense", "q4_k"):
        yield f"silu summed {form}", lambda form=form: summed(form)
        yield f"silu many {form}", lambda form=form: many(form)
    yield "router over all", lambda: launch_choose_experts(empty(1, experts), None, top_k, True)


def cases_of_scored_routers() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield routers that score by a rule of their own: of DeepSeek V3, DeepSeek V2 and LFM2 8B-A1B."""
    models = {
        "DeepSeek V3": (256, 8, 7168, ScoredRouting("sigmoid", groups=8, used_groups=4, factor=2.5)),
        "DeepSeek V2": (160, 6, 5120, ScoredRouting("softmax", 8, 3, normalises=False, factor=16.0, ranked_by=1)),
        "LFM2": (32, 4, 2048, ScoredRouting("sigmoid", eps=1e-6)),
    }
    for name, (experts, top_k, dim, routing) in models.items():
        bias = None if name == "DeepSeek V2" else empty(experts, dtype=torch.float32)
        product = empty(1, dim), empty(experts, dim), None, None, top_k, False, None, routing, bias, True
        yield f"scored router of {name} in one launch", lambda product=product: launch_route(*product)
        scores = empty(1, experts, dtype=torch.float32), None, top_k, False, routing, bias
        yield f"scored router of {name}", lambda scores=scores: launch_choose_experts(*scores)


def cases_of_slots() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield launches over experts in slots, a quarter of all: of gpt-oss-120b and of Qwen3-30B-A3B."""

    def slots_of(form: str, experts: int, dim: int, hidden: int) -> ExpertSlots:
        integers = {"places": torch.int32, "holders": torch.int32, "last_use": torch.int64, "tallies": torch.int64}
        sizes = dict(zip(integers, (experts, experts // 4, experts, 4), strict=True))
        state = (empty(sizes[name], dtype=dtype) for name, dtype in integers.items())
        waiting, slots = (weights_of(form, count, dim, hidden) for count in (experts, experts // 4))
        return ExpertSlots(waiting, slots, *state)

    def summed(form: str, experts: int, top_k: int, dim: int, hidden: int, gating: Gating, tokens: int) -> None:
        layer, chosen = slots_of(form, experts, dim, hidden), empty(tokens, top_k, dtype=torch.int64)
        biases = [empty(experts, dim)] * 3 if gating is SWIGLU else []
        launch_take(chosen, layer)
        how = layer.slots, biases, layer.places, hidden, gating, [form] * 3, None, layer.waiting
        stream = empty(tokens, dim, dtype=torch.float32)
        launch_add_experts(stream, empty(tokens, dim), chosen, empty(tokens, top_k), *how)

    def many(form: str, experts: int, top_k: int, dim: int, hidden: int, gating: Gating) -> None:
        layer, chosen = slots_of(form, experts, dim, hidden), empty(16, top_k, dtype=torch.int64)
        biases = [empty(experts, dim)] * 3 if gating is SWIGLU else []
        launch_cached_experts(empty(16, dim), chosen, layer, biases, hidden, gating, [form] * 3)

    models = {"gpt-oss": ("mxfp4", 128, 4, 2880, 2880, SWIGLU), "Qwen3": ("q4_k", 128, 8, 2048, 768, SILU)}
    for name, shape in models.items():
        yield f"slots of {name}, {shape[0]}", lambda shape=shape: summed(*shape, 1)
        yield f"slots of {name}, {shape[0]} x 8", lambda shape=shape: summed(*shape, 8)
        yield f"slots of {name}, {shape[0]} x 16", lambda shape=shape: many(*shape)
    yield "slots of Qwen3, dense", lambda: summed("dense", *models["Qwen3"][1:], 1)
