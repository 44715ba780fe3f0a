"""parallel=ring on disks of known rates: tokens/s of one, two and four ranks on this machine, and of their hand-overs.

    python benchmarks/ring.py MODEL                                   # disks of 100 MB/s, 1, 2 and 4 ranks
    python benchmarks/ring.py MODEL --ranks 2 --rates 300MB,100MB     # a disk of its own for each rank
    python benchmarks/ring.py MODEL --network 125MB --latency 0.0002  # a network like Gigabit Ethernet between ranks
    python benchmarks/ring.py MODEL --disks kernel                    # limited by the kernel (disk_group.py); as root
    python benchmarks/ring.py MODEL --disks kernel --memory 2GB       # and memory of its own; as root
    python benchmarks/ring.py MODEL --switch --network 125MB --latency 0.0002  # real packets (slow_network.py); as root

Each rank is a process with one thread and a paced disk (paced_disk.py). With a network each hand-over arrives later by
its latency and its bytes / rate; with --switch ranks have network namespaces of their own, and packets take that long.
A hand-over is timed from the moment when its sender sends and its receiver waits until it has arrived; what a receiver
waits for a sender that still reads or computes is none of it. Ranks of one machine read the same clock.
"""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from control_group import ControlGroup
from disk import drop_caches
from disk_group import DiskController, DiskGroup
from memory_group import MemoryGroup, memory_controller
from paced_disk import pace_files
from slow_network import DEVICE, address_of, slow_network

from graphcore.config.byte_sizes import parse_nbytes

PROMPT = (7, 11, 13, 17)
WARM_UP = 2  # tokens of each answer before its time counts


@dataclass(frozen=True)
class Run:
    """One run of some ranks.

    Attributes:
        rates: bytes per second of each rank's disk.
        disks: what limits it, "paced" or "kernel".
        memory: bytes of memory of each rank, file pages included; 0 for no limit but the machine's.
        folder: folder of what the ranks report.
        tokens: tokens of each answer that are timed.
        sequences: numbers of sequences that run together, one after another.
        network: bytes per second between ranks; 0 for no limit but the machine's.
        latency: seconds by which each hand-over arrives later.
        has_switch: True if a switch makes packets late, and not this process the hand-overs.
        overrides: further settings.
    """

    model: str
    rates: Sequence[float]
    disks: str
    memory: int
    folder: str
    port: int
    tokens: int
    sequences: Sequence[int]
    network: float
    latency: float
    has_switch: bool
    overrides: Sequence[str]


@dataclass(frozen=True)
class Measured:
    """What was measured with some sequences.

    Attributes:
        seconds: time of the timed passes.
        passes: number of them.
        begins, ends: the same, in seconds of the clock that all ranks share.
    """

    sequences: int
    seconds: float
    passes: int
    begins: float
    ends: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all sequences together."""
        return self.sequences * self.passes / self.seconds


def run_rank(run: Run) -> None:
    """Run one rank; rank 0 measures."""
    from graphcore import Engine
    from graphcore.config.compose import compose_settings

    rank = int(os.environ["RANK"])
    if run.disks == "paced":
        pace_files(run.rates[rank])
    hand_overs = _record_hand_overs(run)
    most = max(run.sequences)
    given = [f"batching.max_sequences={most}", "threads=1", "device=cpu", "context_length=256", *run.overrides]
    network = [f"parallel.interface={DEVICE}", "parallel.open=true"] if run.has_switch else ["parallel.interface=lo"]
    settings = compose_settings([*given, *(["parallel=ring", *network] if len(run.rates) > 1 else [])])
    settings.model.checkpoint = run.model
    if rank:
        from graphcore.engine.ring.follow import follow

        follow(settings)
    else:
        with closing(Engine.from_settings(settings)) as engine:
            measured = [asdict(measure(engine, count, run.tokens)) for count in run.sequences]
            notes = list(engine.notes)
        Path(run.folder, "measured.json").write_text(json.dumps({"measured": measured, "notes": notes}))
    Path(run.folder, f"rank_{rank}.json").write_text(json.dumps(hand_overs))


def measure(engine: Any, sequences: int, tokens: int) -> Measured:
    """Return the time of passes that each give a token to so many sequences."""
    with engine.holding_back():
        handles = [
            engine.submit([*PROMPT, index], max_new_tokens=WARM_UP + tokens + 1, ignore_eos=True, temperature=0)
            for index in range(sequences)
        ]
    times = [time.perf_counter() for _ in handles[0]]
    for handle in handles:
        handle.result()
    timed = times[WARM_UP : WARM_UP + tokens + 1]
    return Measured(sequences, timed[-1] - timed[0], tokens, timed[0], timed[-1])


def _record_hand_overs(run: Run) -> list[tuple[str, int, int, float, float]]:
    """Note each hand-over of this process from now on: what it did, with which rank, its tag, and from when to when."""
    from graphcore.parallel.process_group import ProcessGroup

    found: list[tuple[str, int, int, float, float]] = []
    group: Any = ProcessGroup
    send, receive = group.send, group.receive

    def timed_send(ranks: Any, hidden: Any, target: int, tag: int) -> None:
        began = time.perf_counter()
        send(ranks, hidden, target, tag)
        found.append(("send", target, tag, began, time.perf_counter()))

    def timed_receive(ranks: Any, hidden: Any, source: int, tag: int) -> None:
        began = time.perf_counter()
        receive(ranks, hidden, source, tag)
        late = run.latency + (hidden.nbytes / run.network if run.network else 0.0)
        if late and not run.has_switch:
            time.sleep(late)
        found.append(("receive", source, tag, began, time.perf_counter()))

    group.send, group.receive = timed_send, timed_receive
    return found


def hand_over_seconds(folder: Path, ranks: int, measured: Measured) -> float:
    """Return the time that hand-overs of the measured passes took in all."""
    sent: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    received: dict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)
    for rank in range(ranks):
        for kind, other, tag, began, ended in json.loads((folder / f"rank_{rank}.json").read_text()):
            if kind == "send":
                sent[rank, other, tag].append(began)
            else:
                received[other, rank, tag].append((began, ended))
    return sum(
        arrived - max(began, waits)
        for way, begins in sent.items()
        for began, (waits, arrived) in zip(begins, received[way], strict=True)
        if measured.begins <= arrived <= measured.ends
    )


def run_ranks(run: Run) -> tuple[list[Measured], list[str]]:
    """Run all ranks; return what rank 0 has measured, and its notes."""
    size = str(len(run.rates))
    local = "1" if run.has_switch or run.memory else size
    address = address_of(0) if run.has_switch else "127.0.0.1"
    everywhere = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": address, "OMP_NUM_THREADS": "1"}
    environments = [
        {**os.environ, **everywhere, "MASTER_PORT": str(run.port), "RANK": str(rank)} for rank in range(len(run.rates))
    ]
    with ExitStack() as undo:
        commands = on_machines(run, [sys.executable, __file__, "--as-rank", json.dumps(asdict(run))], undo)
        processes = [
            subprocess.Popen(command, env=environment)
            for command, environment in zip(commands, environments, strict=True)
        ]
        ended = [process.wait() for process in processes]
    if any(ended):
        raise SystemExit("a rank has failed")
    said = json.loads(Path(run.folder, "measured.json").read_text())
    return [Measured(**one) for one in said["measured"]], said["notes"]


def on_machines(run: Run, command: list[str], undo: ExitStack) -> list[list[str]]:
    """Return each rank's command, which first joins a disk and a network of its own where it has these."""
    commands = [command] * len(run.rates)
    if run.has_switch:
        inside = undo.enter_context(slow_network(len(run.rates), run.network or math.inf, run.latency))
        commands = [[*prefix, *command] for prefix in inside]
    names = [f"graphcore-ring-{os.getpid()}-{rank}" for rank in range(len(run.rates))]
    groups: list[list[ControlGroup]] = [[] for _ in names]
    if run.disks == "kernel":
        drop_caches([])
        disks = DiskController.find()
        for rank, rate in enumerate(run.rates):
            groups[rank].append(DiskGroup.create(disks, names[rank], Path(run.model), rate))
    if run.memory:
        memory = undo.enter_context(memory_controller())
        if isinstance(memory, str):
            raise SystemExit(memory)
        for rank, name in enumerate(names):
            groups[rank].append(MemoryGroup.create(memory, name, run.memory))
    for rank, of_rank in enumerate(groups):
        for group in of_rank:
            undo.callback(group.remove)
            commands[rank] = group.command(commands[rank])
    return commands


def free_port() -> int:
    """Return a port of the loopback interface that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def rates_of(text: str, ranks: int) -> list[float]:
    """Return the bytes per second of each rank's disk, from rates that are repeated as often as needed."""
    given = [float(parse_nbytes("--rates", one) or 0) for one in text.split(",")]
    return [given[rank % len(given)] for rank in range(ranks)]


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what was measured with each number of ranks and of sequences."""
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            memory = parse_nbytes("--memory", arguments.memory) or 0
            disks = rates_of(arguments.rates, ranks), arguments.disks, memory
            sizes = *disks, folder, free_port(), arguments.tokens, arguments.sequences
            network = parse_nbytes("--network", arguments.network) or 0, arguments.latency, arguments.switch
            measured, notes = run_ranks(Run(arguments.model, *sizes, *network, arguments.settings))
            for one in measured:
                handed = hand_over_seconds(Path(folder), ranks, one) / one.seconds
                speeds = {"tokens_per_second": one.tokens_per_second, "hand_over_share": handed}
                yield {"ranks": ranks, "sequences": one.sequences, **speeds, "notes": notes}


def main() -> None:
    """Print a table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", help="folder or file of the checkpoint")
    parser.add_argument("settings", nargs="*", default=[], help="further settings, as on graphcore's command line")
    parser.add_argument("--ranks", type=_numbers, default=[1, 2, 4], help="numbers of ranks, such as 1,2,4")
    parser.add_argument("--rates", default="100MB", help="bytes per second of each rank's disk, such as 300MB,100MB")
    parser.add_argument("--disks", choices=("paced", "kernel"), default="paced", help="what limits the disks")
    parser.add_argument("--memory", default="auto", help="memory of each rank, such as 2GB; default: no limit")
    parser.add_argument("--sequences", type=_numbers, default=[1, 8], help="numbers of sequences, such as 1,8")
    parser.add_argument("--tokens", type=int, default=8, help="timed tokens of each sequence")
    parser.add_argument(
        "--network", default="auto", help="bytes per second between two ranks, such as 125MB; default: no limit"
    )
    parser.add_argument("--latency", type=float, default=0.0, help="seconds by which each hand-over arrives later")
    parser.add_argument("--switch", action="store_true", help="give each rank a network namespace of its own")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each row")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        run_rank(Run(**json.loads(arguments.as_rank)))
        return
    alone: dict[int, float] = {}
    for row in rows(arguments):
        first = alone.setdefault(row["sequences"], row["tokens_per_second"])
        if arguments.json:
            print(json.dumps(row), flush=True)
            continue
        shared = next((note for note in row["notes"] if " hand-overs" in note), "")
        print(
            f"{row['ranks']} ranks, {row['sequences']} sequences: {row['tokens_per_second']:.3f} tokens/s, "
            f"{row['tokens_per_second'] / first:.2f} x, hand-overs {row['hand_over_share']:.2%}; {shared}",
            flush=True,
        )


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


if __name__ == "__main__":
    main()
