"""Ranks of a ring that decode as on GPUs: on `FakeCuda`, with gloo in place of NCCL, or on real ones.

What is real on `FakeCuda`: the pieces of captured steps and their memory, the order of hand-overs, notes, two
processes. What is not: streams and events (all work is done at once), copies between devices, and NCCL.
"""

import sys
from typing import Any

import pytest
import ring_ranks
from support.fake_cuda import FakeCuda, fake_cuda

from graphcore.engine.batching import new_batching
from graphcore.engine.batching.host_decode_loop import HostDecodeLoop
from graphcore.engine.loading import runtime_config
from graphcore.engine.loading.decoder_loader import DecoderLoader
from graphcore.engine.program_runner import ProgramRunner
from graphcore.kernels.backend import TritonBackend
from graphcore.parallel.nccl_transport import NCCLTransport
from graphcore.parallel.process_group import ProcessGroup
from graphcore.parallel.transport import StagedTransport


def decode_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Have engines capture their decode steps, and sample on the host, as the ranks of a ring do."""
    cuda = fake_cuda(monkeypatch)
    build = DecoderLoader.build

    def captured_build(self: DecoderLoader, *arguments: Any) -> Any:
        running = build(self, *arguments)
        assert isinstance(running.runner, ProgramRunner)
        running.runner.builder.kind, running.runner.builder.backend = "captured", TritonBackend()
        running.runner.__init__(  # type: ignore[misc]  # with the backend's programs
            running.runner.builder,
            running.runner.policy,
            running.runner.sizes.batch_size,
            running.runner.chunks,
            running.runner.prompt_tokens,
        )
        return running

    monkeypatch.setattr(DecoderLoader, "build", captured_build)
    monkeypatch.setattr(new_batching, "DeviceDecodeLoop", HostDecodeLoop)
    return cuda


def sample_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have one process on a GPU sample as a ring does, and compile no prompts, which takes long."""
    monkeypatch.setattr(new_batching, "DeviceDecodeLoop", HostDecodeLoop)
    monkeypatch.setattr(runtime_config, "_choose_gpu_graph", lambda *_: ("captured", "eager", ""))


def hand_over_as_gpus(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """Have ranks hand over as GPUs do. Args: transport: "staged", or "device" for NCCL's."""

    def place_on(self: ProcessGroup, device: Any, asked: str) -> None:
        assert asked == "auto"
        if transport == "staged":
            self.transport = StagedTransport(self._noticing, device)
        else:
            self.transport = NCCLTransport(self._noticing, self.rank, device, self.limit, backend="gloo")

    monkeypatch.setattr(ProcessGroup, "place_on", place_on)


def main(transport: str, *arguments: str) -> None:
    """Run the cases of `ring_ranks.py`. Args: transport: as in `hand_over_as_gpus`, or "real"."""
    monkeypatch = pytest.MonkeyPatch()
    if transport == "real":
        sample_on_the_host(monkeypatch)
    else:
        decode_as_on_a_gpu(monkeypatch)
        hand_over_as_gpus(monkeypatch, transport)
    ring_ranks.main(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
