"""The plan: the bytes of weights, caches and other memory on the device, fixed before anything is allocated."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from graphcore.config.byte_sizes import in_words
from graphcore.weights.conversion import CONVERSION_NBYTES

GIB = 1 << 30
# Pairs of the share of all experts that have slots, and the hit rate: the lowest of three models with recorded routing
# (docs/streaming.md, "Experts on real routing"). Rates in between are interpolated.
EXPERT_HITS = (
    (0.0, 0.0),
    (0.03, 0.270),
    (0.05, 0.367),
    (0.10, 0.541),
    (0.15, 0.662),
    (0.25, 0.770),
    (0.35, 0.829),
    (0.50, 0.891),
    (1.0, 1.0),
)


@dataclass(frozen=True)
class Tier:
    """The tier that weights stream from.

    Attributes:
        kind: "disk" for the checkpoint's files, "host" for a store in RAM.
        is_direct: True if files are read without the page cache.
        note: message for the user; empty if there is none.
    """

    kind: str
    is_direct: bool = False
    note: str = ""


@dataclass(frozen=True)
class ExpertPlan:
    """The plan for experts that do not stay on the device, and for the slots that they are fetched into.

    Attributes:
        num_slots: number of slots; each holds one expert.
        slot_nbytes: bytes of one slot.
        num_experts: number of experts in all layers whose experts move.
        num_layers: number of those layers; they are the last ones with experts.
        routed_nbytes: bytes of the experts that one token is routed to, in all those layers together.
        num_routed: number of experts that one token is routed to, in all those layers together.
        are_device_readable: True if a decode step's kernels read experts from page-locked RAM, where all experts of
            these layers are stored.
        has_layer_slots: True if these kernels copy experts from RAM into slots, of which each layer has its own; if
            not, a mapped expert is read in RAM each time, and the slots are for prefill chunks.
    """

    num_slots: int
    slot_nbytes: int
    num_experts: int
    num_layers: int
    routed_nbytes: int
    num_routed: int
    are_device_readable: bool = False
    has_layer_slots: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all slots for experts."""
        return self.num_slots * self.slot_nbytes

    @property
    def is_all(self) -> bool:
        """Whether every expert has a slot, so that each is fetched only once."""
        return self.num_slots == self.num_experts and not self.reads_in_place

    @property
    def reads_in_place(self) -> bool:
        """Whether a decode step reads each of its experts in RAM, each time."""
        return self.are_device_readable and not self.has_layer_slots

    @property
    def expected_hit_rate(self) -> float:
        """Expected share of the routed experts that are in a slot when a decode step needs them."""
        if self.reads_in_place:
            return 0.0
        share = self.num_slots / self.num_experts
        above = bisect_right(EXPERT_HITS, share, hi=len(EXPERT_HITS) - 1, key=itemgetter(0))
        (low, low_rate), (high, high_rate) = EXPERT_HITS[above - 1 : above + 1]
        replayed = low_rate + (high_rate - low_rate) * (share - low) / (high - low)
        # A token uses each expert at most once, so it hits at most those that were in the slots before it.
        return min(replayed, self.num_slots / self.num_routed)


@dataclass(frozen=True)
class GroupPlan:
    """The plan for groups: which stay on the device, and which stream through slots.

    Groups are numbered in the order of use: 0 is the embedding, 1 .. G are layer groups, then come the head's slices.

    Attributes:
        group_nbytes: bytes of the matrices of the embedding, of each layer group, and of the head (0 if it is tied).
        head_slices: bytes of each slice of the head.
        streamed: numbers of the groups that stream, in the order of use; group `streamed[i]` has slot i % num_slots.
            Never contains 0: rows of the embedding are gathered instead.
        is_embedding_resident: True if the embedding's table is on the device; else its rows are gathered. A tied table
            stays or streams with the head.
        num_slots, slot_nbytes: number of slots, and bytes of each; 0 if nothing streams.
        on_link: bytes of each layer group on the link to a device, where its matrices may have fewer than in a slot;
            empty if they are those of `group_nbytes`.
        arrival_nbytes: bytes of the buffer on the device from which such matrices are expanded into their slots.
        features_nbytes: bytes of the table of per-layer embeddings; 0 for none.
        are_features_resident: True if that table is on the device; else its rows are gathered.
    """

    group_nbytes: Sequence[int]
    head_slices: tuple[int, ...] = ()
    streamed: tuple[int, ...] = ()
    is_embedding_resident: bool = True
    num_slots: int = 0
    slot_nbytes: int = 0
    on_link: tuple[int, ...] = ()
    arrival_nbytes: int = 0
    features_nbytes: int = 0
    are_features_resident: bool = True

    @property
    def is_gathering(self) -> bool:
        """Whether rows of a table are fetched for each token."""
        return not (self.is_embedding_resident and self.are_features_resident)

    @property
    def num_layer_groups(self) -> int:
        """Number G of layer groups."""
        return len(self.group_nbytes) - 2

    @property
    def is_head_resident(self) -> bool:
        """Whether the head stays on the device."""
        return not self.streamed or self.streamed[-1] <= self.num_layer_groups

    def is_resident(self, group: int) -> bool:
        """Return whether the group with a given number stays on the device."""
        return self.is_embedding_resident if group == 0 else group not in self.streamed

    def nbytes_of(self, group: int) -> int:
        """Return the bytes that move for the group with a given number; for a slice of a tied head, those read."""
        first_slice = self.num_layer_groups + 1
        if 0 < group <= len(self.on_link):
            return self.on_link[group - 1]
        return self.group_nbytes[group] if group < first_slice else self.head_slices[group - first_slice]

    @property
    def resident_nbytes(self) -> int:
        """Bytes of the groups that stay on the device."""
        *before, head = self.group_nbytes
        away = set(self.streamed) if self.is_embedding_resident else {0, *self.streamed}
        stay = sum(nbytes for group, nbytes in enumerate(before) if group not in away)
        features = self.features_nbytes if self.are_features_resident else 0
        return stay + features + (head if self.is_head_resident else 0)

    @property
    def slots_nbytes(self) -> int:
        """Bytes of all slots, and of the buffer from which groups are expanded into them."""
        return self.num_slots * self.slot_nbytes + self.arrival_nbytes

    @property
    def host_slot_nbytes(self) -> int:
        """Bytes of the largest group on its way to a device."""
        return max((self.nbytes_of(group) for group in self.streamed), default=0)

    @property
    def expanded_nbytes(self) -> int:
        """Bytes that the device reads and writes in one pass to expand groups into their slots."""
        moved = ((self.group_nbytes[one], self.on_link[one - 1]) for one in self.streamed if one <= len(self.on_link))
        return sum(slot + arrived for slot, arrived in moved if arrived < slot)

    @property
    def streamed_nbytes(self) -> int:
        """Bytes that move for slots in one pass."""
        return sum(self.nbytes_of(group) for group in self.streamed)


@dataclass(frozen=True)
class OffloadedKV:
    """The layers whose keys and values are offloaded: they lie in files, which attention reads as memory.

    Attributes:
        layers: indices of the layers, whose pools no other layer has.
        num_layers: number of all layers that have pools.
        nbytes: bytes of their pools, in files; those of them that the system's page cache holds are in no budget.
        read_nbytes: bytes of them that a step of one sequence reads at the end of its context.
    """

    layers: frozenset[int]
    num_layers: int
    nbytes: int
    read_nbytes: int

    def read_by(self, sequences: int) -> int:
        """Return the bytes that a step of some sequences reads, which together have no more than the pools hold."""
        return min(sequences * self.read_nbytes, max(self.nbytes, self.read_nbytes))


@dataclass(frozen=True)
class OtherMemory:
    """The memory that is needed besides weights and caches.

    Attributes:
        workspace_nbytes: bytes of activations and scratch of the largest step.
        buffer_nbytes: bytes of the buffers for reads on their way to a slot.
        overhead_nbytes: bytes of a GPU's libraries, kernels and captured graphs, of its attention and of the largest
            unpacked matrix, estimated in planning/gpu_overhead.py.
        loading_nbytes: peak bytes of RAM for making weights while they are loaded, besides the weights themselves.
        program_nbytes: bytes of the buffers and scratch of native decode programs; 0 on a GPU.
        job_nbytes: most bytes of weights that a read of rows brings into its buffer.
    """

    workspace_nbytes: int = 0
    buffer_nbytes: int = 0
    overhead_nbytes: int = 0
    loading_nbytes: int = 0
    program_nbytes: int = 0
    job_nbytes: int = CONVERSION_NBYTES

    @property
    def held_nbytes(self) -> int:
        """Bytes on the device once everything is loaded and allocated."""
        return self.workspace_nbytes + self.program_nbytes + self.buffer_nbytes + self.overhead_nbytes


@dataclass(frozen=True)
class Plan:
    """The plan of a device's memory.

    Attributes:
        groups: plan of the groups that stay and that stream.
        kv_nbytes: bytes of the KV caches of all sequences, of the layers whose caches are on the device.
        device: name of the device.
        policy: name of the streaming policy, such as "off".
        mode: "async" or "sync".
        context_length: tokens of KV cache for each sequence; None if not planned.
        always_nbytes: bytes of vectors, which never stream and belong to no group.
        other: memory besides weights and caches.
        experts: plan of the experts that do not stay; None if the model has none, or all stay.
        resident_expert_nbytes: bytes of the experts that stay.
        draft_nbytes: bytes of the copies of matrices that a draft model has; 0 without one.
        read_nbytes: bytes of weights that one decode step of one sequence reads.
        offloaded_kv: the KV caches that are not on the device; None if all are.
        budget: upper limit of the bytes; None if not planned.
        notes: messages for the user about choices that may surprise, one line each.
    """

    groups: GroupPlan
    kv_nbytes: int
    device: str
    policy: str = "off"
    mode: str = "async"
    context_length: int | None = None
    always_nbytes: int = 0
    other: OtherMemory = OtherMemory()
    experts: ExpertPlan | None = None
    resident_expert_nbytes: int = 0
    draft_nbytes: int = 0
    read_nbytes: int = 0
    offloaded_kv: OffloadedKV | None = None
    budget: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_streaming(self) -> bool:
        """Whether any weights move after loading."""
        return bool(self.groups.streamed) or self.experts is not None or self.groups.is_gathering

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the device's memory for weights: those that stay, and the slots."""
        experts = self.resident_expert_nbytes + (0 if self.experts is None else self.experts.nbytes)
        return self.groups.resident_nbytes + self.groups.slots_nbytes + self.always_nbytes + experts

    @property
    def total_nbytes(self) -> int:
        """Bytes on the device once everything is loaded and allocated."""
        return self.weight_nbytes + self.draft_nbytes + self.kv_nbytes + self.other.held_nbytes

    @property
    def spare_nbytes(self) -> int:
        """Bytes of the budget that are not planned; 0 without a budget."""
        return 0 if self.budget is None else max(self.budget - self.total_nbytes, 0)

    @property
    def load_peak_nbytes(self) -> int:
        """Peak bytes of RAM while weights are loaded, without the weights in RAM that will be streamed.

        Slots, caches and buffers are allocated afterwards.
        """
        held = self.groups.resident_nbytes + self.always_nbytes + self.resident_expert_nbytes + self.draft_nbytes
        return self.other.loading_nbytes + (held if self.device == "cpu" else 0)

    @property
    def peak_nbytes(self) -> int:
        """Peak bytes on the device, during loading or afterwards."""
        return max(self.total_nbytes, self.load_peak_nbytes) if self.device == "cpu" else self.total_nbytes


def bytes_per_token(plan: Plan) -> int:
    """Return the bytes that one decode step moves if no expert is in a slot yet; embedding rows are not counted."""
    moves = plan.experts is not None and not plan.experts.is_all
    return plan.groups.streamed_nbytes + (plan.experts.routed_nbytes if plan.experts is not None and moves else 0)


def expected_bytes_per_token(plan: Plan) -> float:
    """Return the expected bytes that one decode step moves, with the expert hit rate of recorded routing."""
    if plan.experts is None:
        return float(plan.groups.streamed_nbytes)
    return plan.groups.streamed_nbytes + plan.experts.routed_nbytes * (1 - plan.experts.expected_hit_rate)


def offloaded_in_words(offloaded: OffloadedKV) -> str:
    """Return whose KV caches are offloaded, and what reading them takes."""
    layers = f"{len(offloaded.layers)} of {offloaded.num_layers} layers"
    return (
        f"that of {layers}, {in_words(offloaded.nbytes)}, lies in files, of "
        f"which a token reads up to {in_words(offloaded.read_nbytes)}"
    )


def needs_in_words(plan: Plan) -> str:
    """Return a message that says how much memory the plan needs, and for what."""
    parts = (
        ("weights", plan.weight_nbytes - plan.groups.slots_nbytes),
        ("slots", plan.groups.slots_nbytes),
        ("draft model", plan.draft_nbytes),
        ("kv cache", plan.kv_nbytes),
        ("workspace", plan.other.workspace_nbytes),
        ("decode programs", plan.other.program_nbytes),
        ("read buffers", plan.other.buffer_nbytes),
        ("CUDA's libraries and graphs", plan.other.overhead_nbytes),
    )
    listed = ", ".join(f"{name} {in_words(nbytes)}" for name, nbytes in parts if nbytes)
    needed = f"streaming={plan.policy} needs {in_words(plan.peak_nbytes)} on {plan.device}"
    if plan.peak_nbytes > plan.total_nbytes:
        held, made = in_words(plan.peak_nbytes - plan.other.loading_nbytes), in_words(plan.other.loading_nbytes)
        drafts = f", {in_words(plan.draft_nbytes)} of them a draft model" if plan.draft_nbytes else ""
        return f"{needed} while loading (weights {held}{drafts}, making them {made})"
    return f"{needed} ({listed})"


ADVICE = "use streaming=auto, or a smaller model, dtype or context_length"
