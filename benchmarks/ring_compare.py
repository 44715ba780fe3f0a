"""parallel=ring beside llama.cpp and its RPC backend, on the same machines: disks and memory that the kernel limits.

    python benchmarks/ring_compare.py MODEL.gguf --bin BUILD/bin --rate 300MB --memory 2GB --ranks 2

Each machine is a group of processes with a disk of its own rate and memory of its own, file pages included; the page
cache is emptied before each run. As root. BUILD is llama.cpp, of the source package llama-cpp-python:

    cmake -S llama_cpp_python-*/vendor/llama.cpp -B BUILD -DGGML_RPC=ON -DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release
    cmake --build BUILD --target llama-bench ggml-rpc-server

llama.cpp's servers keep the weights that they get in memory; the layers that no server has are mapped from the file by
the machine that asks. So a server gets as many layers as fit into its machine's memory (--spare is left for the rest).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from disk import drop_caches
from disk_group import DiskController, DiskGroup
from memory_group import MemoryGroup, memory_controller
from ring import Run, free_port, run_ranks

from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.config.byte_sizes import parse_nbytes

CONNECT_SECONDS = 30.0


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        rate: bytes per second of each machine's disk.
        memory: bytes of each machine's memory.
        spare: bytes of a machine's memory that hold no weights of a server.
        tokens: tokens that are timed.
    """

    model: Path
    binaries: Path
    rate: float
    memory: int
    spare: int
    tokens: int

    def ring(self, ranks: int) -> float:
        """Return the tokens per second of graphcore on so many machines."""
        with tempfile.TemporaryDirectory() as folder:
            run = Run(
                str(self.model),
                [self.rate] * ranks,
                "kernel",
                self.memory,
                folder,
                free_port(),
                self.tokens,
                sequences=[1],
                network=0,
                latency=0,
                has_switch=False,
                overrides=["streaming=auto"],
            )
            measured, notes = run_ranks(run)
        print(*(note for note in notes if " hand-overs" in note), file=sys.stderr)
        return measured[0].tokens_per_second

    def llama_cpp(self, ranks: int) -> float:
        """Return the tokens per second of llama-bench on one machine, with a server on each of the others."""
        drop_caches([])
        ports = [free_port() for _ in range(1, ranks)]
        layers = self.layers_of_servers(len(ports)) if ports else 0
        where = ["--rpc", ",".join(f"127.0.0.1:{port}" for port in ports)] if ports else []
        with ExitStack() as undo:
            for port in ports:
                command = undo.enter_context(self.machine(f"server-{port}"))
                server = command(
                    [str(self.binaries / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
                )
                process = subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                undo.callback(process.kill)
                time.sleep(1)
            command = undo.enter_context(self.machine("bench"))
            sizes = [
                "-p",
                "0",
                "-n",
                str(self.tokens),
                "-r",
                "1",
                "-t",
                "1",
                "-ngl",
                str(layers),
                "-lm",
                "mmap",
                *where,
                "-o",
                "json",
            ]
            bench = command([str(self.binaries / "llama-bench"), "-m", str(self.model), *sizes])
            done = subprocess.run(bench, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"llama-bench has failed ({done.returncode}): {done.stderr.strip()[-500:]}")
        (row,) = json.loads(done.stdout)
        print(f"llama.cpp: {layers} layers on {len(ports)} servers", file=sys.stderr)
        return float(row["avg_ts"])

    def layers_of_servers(self, servers: int) -> int:
        """Return how many layers fit into the memory of so many servers' machines: llama.cpp counts the head as one."""
        checkpoint = GGUFCheckpoint(self.model)
        nbytes = {name: sum(span.nbytes for span in checkpoint.spans(name)) for name in checkpoint.tensors}
        layer = sum(size for name, size in nbytes.items() if name.startswith("blk.0."))
        head = nbytes.get("output.weight", nbytes["token_embd.weight"])
        return 1 + (servers * (self.memory - self.spare) - head) // layer

    @contextmanager
    def machine(self, name: str) -> Iterator[Callable[[list[str]], list[str]]]:
        """Yield a function that makes a command run on a machine of its own."""
        name = f"graphcore-{os.getpid()}-{name}"
        with memory_controller() as controller:
            if isinstance(controller, str):
                raise SystemExit(controller)
            memory = MemoryGroup.create(controller, name, self.memory)
            disk = DiskGroup.create(DiskController.find(), name, self.model, self.rate)
            try:
                yield lambda command: memory.command(disk.command(command))
            finally:
                memory.remove()
                disk.remove()


def main() -> None:
    """Print the tokens per second of each, run after run in turn, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--bin", type=Path, required=True, help="folder of llama-bench and ggml-rpc-server")
    parser.add_argument("--rate", default="300MB", help="bytes per second of each machine's disk")
    parser.add_argument("--memory", default="2GB", help="memory of each machine")
    parser.add_argument("--spare", default="300MB", help="memory of a machine that is not for a server's weights")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=6, help="timed tokens")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    sizes = {name: int(parse_nbytes(f"--{name}", vars(given)[name]) or 0) for name in ("rate", "memory", "spare")}
    comparison = Comparison(given.model, given.bin, **sizes, tokens=given.tokens)
    ways: dict[str, Callable[[], float]] = {
        "graphcore, 1 machine": lambda: comparison.ring(1),
        "llama.cpp, 1 machine": lambda: comparison.llama_cpp(1),
        f"graphcore, ring of {given.ranks}": lambda: comparison.ring(given.ranks),
        f"llama.cpp, RPC, {given.ranks} machines": lambda: comparison.llama_cpp(given.ranks),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.repeats):
        for name, measure in ways.items():
            found[name].append(measure())
            print(f"{name}: {found[name][-1]:.3f} tokens/s", flush=True)
    for name, speeds in found.items():
        print(f"{name}: median {median(speeds):.3f} ({min(speeds):.3f} to {max(speeds):.3f}) tokens/s")


if __name__ == "__main__":
    main()
