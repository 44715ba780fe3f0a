"""Launches of the kernels that choose a token, for tests/gpu_compile.py."""

from collections.abc import Callable, Iterator

import torch

from graphcore.kernels.gpu.sampling.drawn import launch_choose_drawn
from graphcore.kernels.gpu.sampling.likeliest import launch_choose_likeliest
from graphcore.sampling_params import KERNEL_PARAMETERS


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, vocab in (("Llama-3.1-8B", 128256), ("Gemma-3", 262144)):

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        logits = empty(1, vocab, dtype=torch.float32)
        flow = (empty(1, 1), *(empty(1) for _ in range(3)), empty(1, 16), empty(1), empty(1, 3, dtype=torch.float64))
        settings = empty(1, len(KERNEL_PARAMETERS), dtype=torch.float32), empty(1), empty(1, vocab, dtype=torch.uint8)

        def likeliest(logits: torch.Tensor = logits, flow: tuple[torch.Tensor, ...] = flow) -> None:
            launch_choose_likeliest(logits, *flow)

        def drawn(
            has_top_k_top_p: bool,
            logits: torch.Tensor = logits,
            flow: tuple[torch.Tensor, ...] = flow,
            settings: tuple[torch.Tensor, ...] = settings,
        ) -> None:
            launch_choose_drawn(logits, *settings, has_top_k_top_p, *flow)

        yield f"{name} likeliest", likeliest
        yield f"{name} drawn", lambda drawn=drawn: drawn(False)
        yield f"{name} drawn by top-k, top-p", lambda drawn=drawn: drawn(True)
