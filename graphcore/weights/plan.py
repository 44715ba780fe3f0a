"""What will lie where, in bytes, before anything is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphcore import memory_limit
from graphcore.config.byte_sizes import both_in_words, in_words
from graphcore.errors import PlanError

GIB = 1 << 30


@dataclass(frozen=True)
class ExpertPlan:
    """The experts that do not stay, and the cache that they are fetched into.

    Attributes:
        num_slots: experts that the cache holds.
        slot_nbytes: of one.
        num_experts: of all layers whose experts do not stay.
        num_layers: how many those are: the last ones with experts.
        routed_nbytes: of the experts that one token goes through, all those layers together.
        is_large_enough: it holds what one token goes through; a smaller one has forgotten a layer's experts before the
            next token comes to it.
        are_mapped: a decode step's kernels read them where they wait, in RAM; the cache is for chunks of tokens.
    """

    num_slots: int
    slot_nbytes: int
    num_experts: int
    num_layers: int
    routed_nbytes: int
    is_large_enough: bool
    are_mapped: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self.num_slots * self.slot_nbytes

    @property
    def is_all(self) -> bool:
        """Whether every expert has a slot, so that none moves twice."""
        return self.num_slots == self.num_experts and not self.are_mapped

    @property
    def uniform_hit_rate(self) -> float:
        """Share of the routed experts that are there, if all are routed equally often."""
        return self.num_slots / self.num_experts if self.is_large_enough else 0.0


@dataclass(frozen=True)
class Plan:
    """Bytes on the device.

    Groups are numbered in order of use: 0 is the embedding, 1 .. G are layer groups, and then come the head's slices.

    Attributes:
        group_nbytes: weights of the embedding, of each layer group and of the head; a tied head has none of its own.
            Without streaming all of them; with it the matrices that may stream.
        kv_nbytes: static keys and values of all layers.
        device: where they lie.
        policy: "off", "on" or "auto".
        mode: "async" or "sync".
        context: tokens of KV cache for each sequence; None if nobody asked the plan.
        streamed: numbers of the groups that go through slots, in order of use; group `streamed[i]` has the slot
            i % num_slots. Never 0: a streamed embedding is gathered.
        is_embedding_resident: whether the table is on the device; else rows are gathered. A tied table stays or streams
            with the head.
        head_slices: bytes of the head's slices.
        num_slots, slot_nbytes: slots, and the bytes of each; 0 where nothing streams.
        always_nbytes: vectors, which never stream and which no group counts.
        workspace_nbytes: what a step needs besides.
        buffer_nbytes: what reads land in on their way to a slot.
        overhead_nbytes: what a GPU's libraries, kernels and captured graphs take, as `device_costs` estimates it.
        loading_nbytes: of RAM that making weights takes at once while they are loaded, besides their places.
        experts: those that do not stay; None where the model has none, or all stay.
        resident_expert_nbytes: of experts that stay.
        read_nbytes: weights that one decode step of one sequence reads.
        budget: bytes that the total keeps to; None if nobody asked the plan.
        notes: a line for each choice that went as one might not expect.
    """

    group_nbytes: Sequence[int]
    kv_nbytes: int
    device: str
    policy: str = "off"
    mode: str = "async"
    context: int | None = None
    streamed: tuple[int, ...] = ()
    is_embedding_resident: bool = True
    head_slices: tuple[int, ...] = ()
    num_slots: int = 0
    slot_nbytes: int = 0
    always_nbytes: int = 0
    workspace_nbytes: int = 0
    buffer_nbytes: int = 0
    overhead_nbytes: int = 0
    loading_nbytes: int = 0
    experts: ExpertPlan | None = None
    resident_expert_nbytes: int = 0
    read_nbytes: int = 0
    budget: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_layer_groups(self) -> int:
        """G."""
        return len(self.group_nbytes) - 2

    @property
    def is_streaming(self) -> bool:
        """Whether anything moves after the load."""
        return bool(self.streamed) or self.experts is not None or not self.is_embedding_resident

    @property
    def is_head_resident(self) -> bool:
        """Whether the head stays on the device."""
        return not self.streamed or self.streamed[-1] <= self.num_layer_groups

    def is_resident(self, group: int) -> bool:
        """Return whether a group, by its number, stays on the device."""
        return self.is_embedding_resident if group == 0 else group not in self.streamed

    def nbytes_of(self, group: int) -> int:
        """Return the bytes of a group, by its number; of a tied head's slice those that are read."""
        first_slice = self.num_layer_groups + 1
        return self.group_nbytes[group] if group < first_slice else self.head_slices[group - first_slice]

    @property
    def weight_nbytes(self) -> int:
        """Bytes of all weights that are held on the device at some time; all of the model's without streaming."""
        experts = self.resident_expert_nbytes + (0 if self.experts is None else self.experts.nbytes)
        return self.resident_nbytes + self.slots_nbytes + self.always_nbytes + experts

    @property
    def resident_nbytes(self) -> int:
        """Bytes of the groups that stay."""
        *before, head = self.group_nbytes
        away = set(self.streamed) if self.is_embedding_resident else {0, *self.streamed}
        stay = sum(nbytes for group, nbytes in enumerate(before) if group not in away)
        return stay + (head if self.is_head_resident else 0)

    @property
    def slots_nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_nbytes

    @property
    def total_nbytes(self) -> int:
        """Bytes that must fit when everything is there."""
        return self.weight_nbytes + self.kv_nbytes + self.workspace_nbytes + self.buffer_nbytes + self.overhead_nbytes

    @property
    def load_peak_nbytes(self) -> int:
        """Most bytes of RAM while weights are loaded, those aside that wait there for the device.

        Slots, caches and buffers are taken afterwards.
        """
        held = self.resident_nbytes + self.always_nbytes + self.resident_expert_nbytes
        return self.loading_nbytes + (held if self.device == "cpu" else 0)

    @property
    def peak_nbytes(self) -> int:
        """Most bytes on the device, now or while weights are loaded."""
        return max(self.total_nbytes, self.load_peak_nbytes) if self.device == "cpu" else self.total_nbytes

    @property
    def streamed_nbytes(self) -> int:
        """Bytes that go through slots for one token."""
        return sum(self.nbytes_of(group) for group in self.streamed)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that move for one decode step, if none of its experts is there yet; embedding rows are not counted."""
        moves = self.experts is not None and not self.experts.is_all
        return self.streamed_nbytes + (self.experts.routed_nbytes if self.experts is not None and moves else 0)

    @property
    def expected_bytes_per_token(self) -> float:
        """Bytes that move for one decode step, if all experts are routed equally often."""
        if self.experts is None:
            return float(self.streamed_nbytes)
        return self.streamed_nbytes + self.experts.routed_nbytes * (1 - self.experts.uniform_hit_rate)

    def check_fits(self, free_nbytes: int) -> None:
        """Return if everything fits.

        Raises:
            PlanError: it does not; the message has both figures and what to change.
        """
        if self.peak_nbytes > free_nbytes:
            raise PlanError(f"{self.needs()}, {in_words(free_nbytes)} are free; {ADVICE}")

    def needs(self) -> str:
        """Return what the plan takes, in words."""
        parts = (
            ("weights", self.weight_nbytes - self.slots_nbytes),
            ("slots", self.slots_nbytes),
            ("kv cache", self.kv_nbytes),
            ("workspace", self.workspace_nbytes),
            ("read buffers", self.buffer_nbytes),
            ("CUDA's libraries and graphs", self.overhead_nbytes),
        )
        listed = ", ".join(f"{name} {in_words(nbytes)}" for name, nbytes in parts if nbytes)
        needed = f"streaming={self.policy} needs {in_words(self.peak_nbytes)} on {self.device}"
        if self.peak_nbytes > self.total_nbytes:
            held, made = in_words(self.peak_nbytes - self.loading_nbytes), in_words(self.loading_nbytes)
            return f"{needed} while loading (weights {held}, making them {made})"
        return f"{needed} ({listed})"


ADVICE = "use streaming=auto, or a smaller model, dtype or context_length"


def free_nbytes(device: torch.device) -> int:
    """Return the memory that can still be taken on a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return memory_limit.free_nbytes()


def check_free(purpose: str, needed: int, free: int, instead: str) -> None:
    """Return if that many bytes can be taken.

    Args:
        purpose: who takes them, and where.
        instead: what to do otherwise.

    Raises:
        PlanError: fewer are free.
    """
    if needed > free:
        takes, has = both_in_words(needed, free)
        raise PlanError(f"{purpose} takes {takes}, {has} are free; {instead}")


def physical_nbytes(device: torch.device) -> int:
    """Return the memory that a device has, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return memory_limit.physical_nbytes()
