"""All ranks hand programs over in one order in each direction, and never wait for each other in a circle.

NCCL's transfers between two ranks run in the order in which each end enqueues them, whatever they belong to. Ranks have
other layers, other groups that stream, and captured pieces of other lengths, so their passes differ in all else.
Per-layer features are sent with gloo's tags only, and their programs begin with other numbers of steps.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from support.cases import in_case

from graphcore.graph.gpu.capture import Captures, captured
from graphcore.graph.gpu.partition import BoundaryBuffers
from graphcore.graph.hand_over import HandedStep, HandOver, feature_steps, hidden_of, with_hand_overs
from graphcore.graph.program import Program
from graphcore.graph.state import StepState
from graphcore.graph.step import Step
from graphcore.parallel.share import ENDS, Share, handed_pairs
from graphcore.streaming.scheduler import in_one_pass

CPU = torch.device("cpu")


@dataclass
class Plain:
    """A step that needs a group."""

    group: int

    def replay(self) -> None:
        """Do nothing."""


class Move(NamedTuple):
    """A hand-over as a rank comes to it."""

    kind: str
    peer: int
    place: int


@dataclass
class Rank:
    """A rank with its groups: each of its layers is one or several, some of which stream.

    Attributes:
        num_first: number of steps before the features and the layers, of program 0 and of the others. A native program
            has none on a rank without the embedding, and two where the host gathers rows.
    """

    share: Share
    parts: int
    streamed: frozenset[int]
    has_features: bool
    num_first: tuple[int, int]
    world_size: int

    @classmethod
    def drawn(cls, chance: random.Random, rank: int, owners: tuple[int, ...], size: int, has_features: bool) -> "Rank":
        share, parts = Share(rank, owners), chance.choice((1, 1, 2, 3))
        groups = range(1, parts * len(share.layers) + 1)
        streams = chance.choice((0.0, 0.3, 1.0))
        streamed = frozenset(group for group in groups if chance.random() < streams)
        num_first = (chance.choice((0, 1, 2)) if has_features else 1), 1
        return cls(share, parts, streamed, has_features, num_first, size)

    def program(self, place: int, is_captured: bool) -> Program:
        """Return a decode program in captured pieces, or a chunk's program with a step for each layer or group."""
        state = StepState.empty(1, 1, CPU)
        state.place = place
        hand_over, number = HandOver(self.share, cast("Any", self)), 1
        steps: list[Step] = [*map(Plain, [0] * self.num_first[place > 0])]
        if self.has_features:
            steps += feature_steps(state, hidden_of(state), hand_over)
        for layer in sorted(self.share.layers):
            groups = range(number, number + self.parts)
            number += self.parts
            found = groups if self.streamed & {*groups} else groups[:1]
            ends = self.share.source(layer), self.share.target(layer)
            steps += with_hand_overs([*map(Plain, found)], state, hidden_of(state), hand_over, *ends)
        if self.share.has_ends:
            if self.share.last_owner != ENDS:
                steps.append(HandedStep(0, state, None, hidden_of(state), hand_over.ranks, self.share.last_owner))
            steps.append(Plain(number))
        if is_captured:
            nothing = BoundaryBuffers(torch.empty(0), ())
            steps = captured(state, steps, self.streamed, nothing, Captures(CPU), None, hand_over)
        return Program(state, steps)

    def moves(self, num_chunks: int, has_decode: bool) -> list[Move]:
        """Return the hand-overs of a pass in the order in which the rank comes to them."""
        programs = [
            self.program(place, has_decode and place == 0 and not self.has_features)
            for place in range(num_chunks + has_decode)
        ]
        walked = chain.from_iterable(steps for _, steps in in_one_pass(programs))
        return [move for step in walked for move in moves_of(step)]


def moves_of(step: Step) -> Sequence[Move]:
    """Return the hand-overs of a step."""
    if not isinstance(step, HandedStep):
        return []
    place, found = step.state.place, list[Move]()
    if step.source is not None:
        found.append(Move("receive", step.source, place))
    return [*found, Move("send", step.target, place)] if step.target is not None else found


def run(passes: Sequence[Sequence[Move]], has_tags: bool) -> None:
    """Run the ranks' passes over queues that are kept in order in each direction, until all have ended.

    Args:
        has_tags: True for a queue for each program, as in gloo.
    """
    left = [deque(moves) for moves in passes]
    queues: dict[tuple[int, int, int], deque[int]] = {}
    while any(left):
        has_moved = False
        for rank, moves in enumerate(left):
            while moves:
                kind, peer, place = moves[0]
                tag = place if has_tags else 0
                if kind == "send":
                    queues.setdefault((rank, peer, tag), deque()).append(place)
                else:
                    queue = queues.get((peer, rank, tag))
                    if not queue:
                        break
                    assert queue.popleft() == place, f"rank {rank} takes program {place} from rank {peer} too early"
                moves.popleft()
                has_moved = True
        assert has_moved, f"all ranks wait: {[moves[0] for moves in left if moves]}"
    assert not any(queues.values()), "something was sent that nobody takes"


def test_hand_overs_have_one_order_and_never_wait_in_a_circle() -> None:
    for seed in range(400):
        with in_case(seed):
            chance = random.Random(seed)
            size = chance.randrange(2, 5)
            owners = (ENDS, *(chance.randrange(size) for _ in range(chance.randrange(size, 12))))
            has_features = seed % 4 == 0
            ranks = [Rank.drawn(chance, rank, owners, size, has_features) for rank in range(size)]
            num_chunks, has_decode = chance.randrange(4), chance.random() < 0.7
            passes = [rank.moves(num_chunks, has_decode) for rank in ranks]
            run(passes, has_tags=has_features)
            moved = {(rank, peer) for rank, moves in enumerate(passes) for kind, peer, _ in moves if kind == "send"}
            pairs = handed_pairs(owners) | ({(ENDS, rank) for rank in range(1, size)} if has_features else set())
            assert moved == (pairs if num_chunks or has_decode else set())
