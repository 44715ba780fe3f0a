"""Replays recorded routing through graphcore's cache of experts, LRU eviction and optimal eviction.

    python benchmarks/expert_routes.py FOLDER            # its *.route.csv.gz files; about two minutes

A trace records the experts that each token was routed to in each layer. A token's experts in a layer are one request
to the cache; only the eviction policy differs. All layers share the slots. A prompt is one request per layer, as for a
chunk of tokens; it fills the cache, and hits are counted for the decoded tokens after it. The last table is for the
slots that a GPU's kernels fill, which are split among the layers.

A trace may have fewer experts per token than the model. Then hit rates are the trace's, and bytes are those of the
model's own number of experts at that hit rate; no routing is invented.
"""

import argparse
import csv
import gzip
import re
import sys
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from graphcore.kernels.ops.expert_slots import HITS, ExpertSlots, take_experts
from graphcore.quant import FORMATS
from graphcore.streaming.experts.cache import ExpertCache, ExpertHeat, Key
from graphcore.streaming.experts.device_cache import DeviceCache, layer_shares
from graphcore.streaming.experts.slots import ExpertPool
from graphcore.streaming.timeline import Timeline

SHARES = (0.03, 0.05, 0.10, 0.15, 0.25, 0.35, 0.50)  # slots, as shares of all experts


@dataclass(frozen=True)
class Shape:
    """The experts of a model: three matrices each, gate and up [inner, dim], down [dim, inner].

    Attributes:
        name: name of the model, as traces write it in their first lines.
        routed: number of experts that a token is routed to in each layer.
        dim, inner: width of the model, and of an expert.
        stored: format of the matrices; a row that is no multiple of its block has the narrower format.
    """

    name: str
    layers: int
    experts: int
    routed: int
    dim: int
    inner: int
    stored: str

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert."""
        up, down = (self.inner, self.dim), (self.dim, self.inner)
        return sum(stored_nbytes(self.stored, matrix) for matrix in (up, up, down))

    @property
    def token_nbytes(self) -> int:
        """Bytes of the experts that one token is routed to."""
        return self.layers * self.routed * self.expert_nbytes


SHAPES = (
    Shape("gpt-oss-120b", layers=36, experts=128, routed=4, dim=2880, inner=2880, stored="mxfp4"),
    Shape("Qwen3-30B-A3B", layers=48, experts=128, routed=8, dim=2048, inner=768, stored="q4_k"),
    Shape("Gemma-4-26B-A4B", layers=30, experts=128, routed=8, dim=2816, inner=704, stored="q4_k"),
)


def stored_nbytes(stored: str, matrix: tuple[int, int]) -> int:
    """Return the bytes of a matrix in a format, or in the narrower format if rows are no multiple of the block."""
    encoding = FORMATS[stored]
    if not encoding.divides(matrix):
        assert encoding.narrower is not None, f"{stored} has no narrower format"
        encoding = FORMATS[encoding.narrower]
    return encoding.nbytes(matrix)


@dataclass(frozen=True)
class Request:
    """The experts that a layer needs at the same time.

    Attributes:
        experts: distinct experts of the layer, those of a prompt in the order of their first use.
        is_counted: True for a decoded token, False for a prompt.
    """

    layer: int
    experts: tuple[int, ...]
    is_counted: bool = True


@dataclass(frozen=True)
class Trace:
    """A recorded run of a model.

    Attributes:
        layers, experts: number of layers, and of experts in each.
        routed: number of experts that a token of the trace is routed to in each layer.
        requests: requests in the order of computation.
    """

    shape: Shape
    layers: int
    experts: int
    routed: int
    requests: Sequence[Request]

    @property
    def num_tokens(self) -> int:
        """Number of decoded tokens."""
        return sum(request.is_counted for request in self.requests) // self.layers


def read_trace(path: Path, most: int | None = None) -> Trace:
    """Read a trace: lines of facts that begin with `#`, then a table of routed experts, the likeliest first.

    Args:
        most: number of experts to take for each token and layer; None for all.

    Raises:
        SystemExit: the trace is of a model whose shape is not known.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    facts = " ".join(line for line in lines if line.startswith("#"))
    shape = next((shape for shape in SHAPES if shape.name.lower() in facts.lower()), None)
    if shape is None:
        raise SystemExit(f"{path.name}: its model is none of {', '.join(shape.name for shape in SHAPES)}")
    fact = {name: int(re.findall(rf"{name}=(\d+)", facts)[0]) for name in ("n_layer", "n_expert", "n_expert_used")}
    routed = min(most or fact["n_expert_used"], fact["n_expert_used"])
    chosen: dict[tuple[int, int, int, int], dict[int, None]] = defaultdict(dict)
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        if int(row["slot"]) >= routed:
            continue
        # Phase 0 is the prompt, whose tokens make one request for each layer.
        turn, phase, step = int(row["turn"]), int(row["phase"]), int(row["step"])
        chosen[turn, phase, step if phase else 0, int(row["layer"])][int(row["expert"])] = None
    requests = [Request(key[3], tuple(chosen[key]), is_counted=bool(key[1])) for key in sorted(chosen)]
    return Trace(shape, fact["n_layer"], fact["n_expert"], routed, requests)


class Recency(ExpertHeat):
    """The order of last use, for LRU."""

    def add(self, layer: int, experts: list[int]) -> None:
        """Record the request's number as its experts' time of last use."""
        self._weight += 1
        self._counts.update(dict.fromkeys(((layer, expert) for expert in experts), self._weight))


class Foresight(ExpertHeat):
    """The order of next use, for the optimum (Belady): the expert that is needed last is evicted first."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.layers)
        self._uses: dict[Key, list[int]] = defaultdict(list)
        for number, request in enumerate(trace.requests, start=1):
            for expert in request.experts:
                self._uses[request.layer, expert].append(number)
        self._now = 0

    def add(self, layer: int, experts: list[int]) -> None:
        """Advance to the next request."""
        self._now += 1

    def __call__(self, key: Key) -> float:
        """Return minus the number of the next request for an expert."""
        uses = self._uses[key]
        following = bisect_right(uses, self._now)
        return -float(uses[following]) if following < len(uses) else -float("inf")


POLICIES: dict[str, Callable[[Trace], ExpertHeat]] = {
    "LRU": lambda trace: Recency(trace.layers),
    "graphcore": lambda trace: ExpertHeat(trace.layers),
    "optimum": Foresight,
}


@dataclass(frozen=True)
class Filled:
    """A slot fill that is complete at once."""

    group: int
    is_done: bool = True
    is_full: bool = True


class NothingMoves:
    """A slot filler that copies nothing, because a replay's slots have no memory."""

    def begin(self, group: int, work: None, after: Filled | None, /) -> Filled:
        """Return a full slot."""
        return Filled(group)

    def wait(self, filling: Filled, /) -> None:
        """Return at once."""

    def release(self, filling: Filled, /) -> None:
        """Do nothing."""

    def cancel(self, fillings: Sequence[Filled], /) -> None:
        """Do nothing."""

    def end_waits(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    @property
    def is_reading(self) -> bool:
        """False: nothing is read."""
        return False


class ReplayedCache(ExpertCache[None, Filled]):
    """graphcore's expert cache with a replaceable eviction policy."""

    def evict_by(self, heat: ExpertHeat) -> None:
        """Use another order for evictions in all pools."""
        for slots in self._slots.values():
            slots.heat = heat


def hit_rate(trace: Trace, num_slots: int, policy: str) -> float:
    """Return the share of the experts of decoded tokens that were in one of the slots."""
    layers = tuple(range(trace.layers))
    pool = ExpertPool(layers, num_slots, trace.experts)
    groups = dict.fromkeys(layers, 0)
    cache = ReplayedCache([pool], lambda layer, expert, slot: None, groups, NothingMoves(), Timeline())
    cache.evict_by(POLICIES[policy](trace))
    hits = asked = 0
    for request in trace.requests:
        before = cache.hits
        deque(cache.waves(request.layer, request.experts), maxlen=0)
        if request.is_counted:
            hits, asked = hits + cache.hits - before, asked + len(request.experts)
    return hits / asked


def layer_slots_hit_rate(trace: Trace, num_slots: int) -> float:
    """Return the same share for slots that a decode step's kernels fill, which are split among the layers."""
    pool = ExpertPool(tuple(range(trace.layers)), num_slots, trace.experts)
    waiting = [torch.zeros(trace.experts, 1, dtype=torch.uint8)]
    layers = {
        layer: ExpertSlots.empty(waiting, [torch.zeros(own.num_slots, 1, dtype=torch.uint8)])
        for own, _ in layer_shares(pool)
        for layer in own.layers
    }
    no_others = ExpertCache([], lambda layer, expert, slot: None, {}, NothingMoves(), Timeline())
    cache = DeviceCache(layers, no_others)
    hits = asked = 0
    for request in trace.requests:
        slots = layers[request.layer]
        before = int(slots.tallies[HITS])
        if request.is_counted:
            take_experts(torch.tensor(request.experts), slots)
            hits, asked = hits + int(slots.tallies[HITS]) - before, asked + len(request.experts)
        else:
            deque(cache.waves(request.layer, request.experts), maxlen=0)
    return hits / asked


def layer_slots_table(traces: Sequence[Trace]) -> Iterator[str]:
    """Yield the lines of a table of the hit rates with slots split among the layers, by trace."""
    yield f"| slots of each layer | {' | '.join(f'{100 * share:.0f} %' for share in SHARES)} |"
    yield f"|---|{'---|' * len(SHARES)}"
    for trace in traces:
        counts = (max(round(share * trace.layers * trace.experts), trace.layers) for share in SHARES)
        cells = (f"{100 * layer_slots_hit_rate(trace, num_slots):.1f} %" for num_slots in counts)
        yield f"| {trace.shape.name} | {' | '.join(cells)} |"


def replay(trace: Trace) -> list[dict[str, float]]:
    """Return the hit rates for each of SHARES, by policy."""
    counts = [max(round(share * trace.layers * trace.experts), trace.routed) for share in SHARES]
    return [{policy: hit_rate(trace, num_slots, policy) for policy in POLICIES} for num_slots in counts]


def table(trace: Trace, replayed: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yield the lines of a trace's table: hit rates and bytes for a token, by the share of experts that have slots."""
    shape = trace.shape
    yield (
        f"{shape.name}, {shape.stored}: an expert is {shape.expert_nbytes / 1e6:.2f} MB, a token's {shape.routed} in "
        f"{shape.layers} layers are {shape.token_nbytes / 1e6:.0f} MB.\n"
        f"The trace has {trace.routed} a token and {trace.num_tokens} decoded tokens."
    )
    yield ""
    yield f"| slots | their bytes | {' | '.join(POLICIES)} | whole layers |"
    yield f"|---|---|{'---|' * (len(POLICIES) + 1)}"
    for share, rates in zip(SHARES, replayed, strict=True):
        moved = [(rate, shape.token_nbytes * (1 - rate) / 1e6) for rate in [*rates.values(), share]]
        cells = [f"{100 * rate:.1f} %, {megabytes:.0f} MB" for rate, megabytes in moved]
        held = share * shape.layers * shape.experts * shape.expert_nbytes / 1e9
        yield f"| {100 * share:.0f} % | {held:.1f} GB | {' | '.join(cells)} |"
    yield ""


def lowest(replayed: Sequence[Sequence[Mapping[str, float]]]) -> Iterator[str]:
    """Yield the lines of a table of graphcore's lowest hit rate over all traces."""
    least = [min(rates["graphcore"] for rates in same) for same in zip(*replayed, strict=True)]
    yield f"| slots | {' | '.join(f'{100 * share:.0f} %' for share in SHARES)} |"
    yield f"|---|{'---|' * len(SHARES)}"
    yield f"| lowest | {' | '.join(f'{100 * rate:.1f} %' for rate in least)} |"


def main(arguments: Sequence[str]) -> None:
    """Print a table for each trace of a folder, and graphcore's lowest hit rates."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with *.route.csv.gz files")
    parser.add_argument("--experts", type=int, help="experts to take for each token and layer; all if not given")
    asked = parser.parse_args(arguments)
    paths = sorted(asked.folder.glob("*.route.csv.gz"))
    if not paths:
        raise SystemExit("the folder has no *.route.csv.gz file")
    traces = [read_trace(path, asked.experts) for path in paths]
    replayed = []
    for trace in traces:
        replayed.append(replay(trace))
        print("\n".join(table(trace, replayed[-1])), flush=True)
    print("\n".join(lowest(replayed)), "\n")
    print("\n".join(layer_slots_table(traces)))


if __name__ == "__main__":
    main(sys.argv[1:])
