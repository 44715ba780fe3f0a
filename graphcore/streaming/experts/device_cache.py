"""A cache of experts that a GPU's kernels look up and fill, so that a decode step stays one captured graph.

    a decode step     router -> find slots -> fill them from locked RAM -> products     kernels/ops/expert_slots.py
    a prefill chunk   the host reads the router's choice and loads each expert once, in waves (batches of at most as
                      many experts as there are slots), those in slots first

Each layer has its own slots, which keep the most recently used experts. A layer whose tables could not be locked uses
its slots through the host's cache (cache.py).
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphcore.kernels.ops.expert_slots import HITS, IN_PLACE, LOADED, ExpertSlots, take_experts
from graphcore.nn.decoder import Decoder
from graphcore.streaming.experts.cache import ExpertCache
from graphcore.streaming.experts.slots import ExpertPool, allocate_pool, bind_experts
from graphcore.weights.experts import PARTS, expert_layers


@dataclass(frozen=True)
class DeviceCache:
    """The slots of all layers, as prefill chunks use them.

    Attributes:
        layers: experts and slots of each layer whose tables are locked.
        host: cache of the other layers.
    """

    layers: Mapping[int, ExpertSlots]
    host: ExpertCache[Any, Any]

    def waves(self, layer: int, experts: Sequence[int]) -> Generator[list[int]]:
        """Load experts into slots in waves and yield their slots, as `ExpertCache.waves` does."""
        if layer not in self.layers:
            yield from self.host.waves(layer, experts)
            return
        slots = self.layers[layer]
        held = slots.places.tolist()
        order = sorted(experts, key=lambda expert: held[expert] < 0)
        most = len(slots.holders)
        for begin in range(0, len(order), most):
            wave = order[begin : begin + most]
            take_experts(torch.tensor(wave, device=slots.places.device, dtype=torch.int64), slots)
            places = slots.places.tolist()
            yield [place if expert in wave else -1 for expert, place in enumerate(places)]

    @property
    def tallies(self) -> tuple[int, int]:
        """Hits and misses: requested experts that were in a slot, and that were not, over all layers."""
        each = [slots.tallies.tolist() for slots in self.layers.values()]
        hits = sum(one[HITS] for one in each)
        return self.host.hits + hits, self.host.misses + sum(one[LOADED] + one[IN_PLACE] for one in each)

    @property
    def link_nbytes(self) -> int:
        """Bytes that kernels have read over the link, into slots and for products."""
        return sum(
            int(slots.tallies[[LOADED, IN_PLACE]].sum()) * sum(table[0].nbytes for table in slots.waiting)
            for slots in self.layers.values()
        )


def bind_layer_slots(
    decoder: Decoder,
    pools: Sequence[ExpertPool],
    tables: Mapping[int, Mapping[str, Tensor]],
    device: torch.device,
) -> tuple[dict[int, dict[str, Tensor]], dict[int, ExpertSlots], list[ExpertPool]]:
    """Allocate each pool's slots, divide them among its layers, and bind the layers to them.

    Args:
        tables: matrices of all of a layer's experts, by layer and projection; only layers with tables in locked RAM.

    Returns:
        The slots of each layer, by projection; experts and slots of the layers in `tables`; the other layers' pools.
    """
    layers = expert_layers(decoder)
    bound: dict[int, dict[str, Tensor]] = {}
    cached: dict[int, ExpertSlots] = {}
    others: list[ExpertPool] = []
    for pool in pools:
        memory = allocate_pool(decoder, pool, device)
        for own, begin in layer_shares(pool):
            (layer,) = own.layers
            bound[layer] = {part: tensor[begin : begin + own.num_slots] for part, tensor in memory.items()}
            bind_experts(layers[layer].experts, bound[layer])
            if layer not in tables:
                others.append(own)
                continue
            waiting = [tables[layer][part] for part in PARTS]
            cached[layer] = ExpertSlots.empty(waiting, [bound[layer][part] for part in PARTS])
            layers[layer].experts.cached = cached[layer]
    return bound, cached, others


def layer_shares(pool: ExpertPool) -> list[tuple[ExpertPool, int]]:
    """Split a pool's slots evenly among its layers; return each layer's pool and the index of its first slot."""
    shares, begin = [], 0
    for index, layer in enumerate(pool.layers):
        left = len(pool.layers) - index
        count = -(-(pool.num_slots - begin) // left)
        shares.append((ExpertPool((layer,), count, pool.num_experts), begin))
        begin += count
    return shares
