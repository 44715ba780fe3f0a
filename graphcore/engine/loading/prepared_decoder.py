"""A prepared model of graphcore's own architectures: its decoder, and the sizes and costs for a plan."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch

from graphcore.arch.architecture import TensorSource
from graphcore.arch.random_checkpoint import RandomCheckpoint
from graphcore.config.byte_sizes import in_words
from graphcore.config.settings import Settings, StreamingSettings
from graphcore.engine.loading.model_loader import PreparedModel
from graphcore.errors import PlanError
from graphcore.graph.cpu.memory import ProgramSizes, programs_nbytes
from graphcore.graph.matrix_groups import matrix_groups
from graphcore.kernels.backend import NativeBackend, TritonBackend
from graphcore.kernels.cpu.program import most_step_rows, widths_of
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.packing import GROUP_ROWS
from graphcore.kvcache.sizes import cache_nbytes, pool_sizes
from graphcore.nn.decoder import Decoder, is_movable
from graphcore.nn.rope_spec import LongScaling
from graphcore.nn.spec import ModelSpec
from graphcore.planning.gpu_overhead import allocated_cache_nbytes, chunk_graphs_nbytes, overhead_nbytes
from graphcore.planning.loading_peak import loading_nbytes
from graphcore.planning.machine import Machine
from graphcore.planning.planner import Costs
from graphcore.planning.sizes import WeightSizes, draft_sizes_of, sizes_of
from graphcore.planning.tier import buffer_nbytes
from graphcore.planning.workspace import attention_nbytes, carried_nbytes, waiting_nbytes, workspace_nbytes
from graphcore.quant.format_choice import STORED
from graphcore.streaming.experts.reading import expert_obstacle
from graphcore.weights.conversion import CONVERSION_NBYTES, first_row
from graphcore.weights.draft_copy import DraftCopy
from graphcore.weights.experts import expert_linears
from graphcore.weights.groups import LayerGroup, split_run
from graphcore.weights.matching import EMBEDDING, FEATURES, HEAD
from graphcore.weights.plan import Plan, Tier

LONGEST_ON_GPU = 32768  # tokens; a captured step launches programs for all chunks of the context, used or not

_PROGRAMS: WeakKeyDictionary[Decoder, dict[tuple[ProgramSizes, int], int]] = WeakKeyDictionary()
"""Bytes of decode programs by decoder. Computing them traces every block, so later plans reuse them."""

_MATRIX_GROUPS: WeakKeyDictionary[Decoder, dict[Sequence[int], Sequence[LayerGroup]]] = WeakKeyDictionary()
"""Groups of matrices by decoder and by the layers that it has, of which a rank of a ring drops some."""


@dataclass(frozen=True)
class PreparedDecoder(PreparedModel):
    """A decoder on the meta device, with its runtime configuration and the loader of its weights.

    Attributes:
        draft: the draft model of speculation=self; None without one.
    """

    decoder: Decoder
    draft: DraftCopy | None = None

    def __post_init__(self) -> None:
        self.decoder.has_small_parts = self.runtime.runs_parts

    def sizes(self, settings: Settings) -> WeightSizes:
        """Return the bytes of the weights, sorted by how they can move; the settings say which layers do together."""
        groups = self.layer_groups(settings.streaming)
        sizes = sizes_of(self.decoder, self.loader.is_tied, groups)
        return sizes if self.draft is None else replace(sizes, draft=draft_sizes_of(self.draft, groups))

    def notes_on(self, plan: Plan) -> Sequence[str]:
        """Return a note on a draft model that may surprise.

        Raises:
            PlanError: experts stream, for which drafts lose.
        """
        if self.draft is None:
            return ()
        if plan.experts is not None:
            raise PlanError(
                "speculation=self is not possible while experts stream: they are read as they are routed, so that each "
                "draft token to check reads further ones, and drafts lose; use speculation=off, or streaming=off"
            )
        if plan.draft_nbytes and not plan.groups.streamed:
            beside = in_words(plan.draft_nbytes)
            return (f"speculation=self: nothing streams, so the draft model copies what gets smaller: {beside}",)
        if not plan.draft_nbytes and self.runtime.share is None:
            return (self.note_without_copies(),)
        return ()

    def note_without_copies(self) -> str:
        """Return a note on a draft model for which no process has copies of weights; empty without a draft model."""
        if self.draft is None:
            return ""
        reason = "there is no room for a draft model beside it"
        if not self.draft.smaller:
            reason = "no matrix would be smaller in speculation.draft_format; q2_k is the smallest format"
        return f"speculation=self drafts nothing: nothing streams, and {reason}"

    def layer_groups(self, streaming: StreamingSettings) -> Sequence[LayerGroup]:
        """Return the layer groups, in the order of use: layers, or matrices where blocks can run in parts."""
        if streaming.layer_group_size != "auto" or streaming.keeps == "all" or not self.decoder.has_small_parts:
            share = self.runtime.share
            runs = [range(len(self.decoder.layers))] if share is None else share.runs
            return [group for run in runs for group in split_run(run, streaming.layers_per_group)]
        known, layers = _MATRIX_GROUPS.setdefault(self.decoder, {}), tuple(index for index, _ in self.decoder.blocks())
        if layers not in known:
            known[layers] = matrix_groups(self.decoder)
        return known[layers]

    def groups_of_turn(self, settings: Settings) -> int:
        """Return how many layer groups run in a rank's turn, which are those of a layer; 0 if one process runs all."""
        if self.runtime.share is None:
            return 0
        return max(Counter(group.layers.start for group in self.layer_groups(settings.streaming)).values())

    def costs(self, settings: Settings, tier: Tier) -> Costs:
        """Return the memory that is needed besides weights; on a GPU this includes CUDA's own."""
        runtime, spec = self.runtime, self.decoder.spec
        batch, is_gpu = runtime.batch_size, runtime.device.type == "cuda"
        cached = allocated_cache_nbytes if is_gpu else cache_nbytes
        waiting, more = (further_nbytes(settings, spec, runtime.prefill_chunk, moves) for moves in (False, True))
        if any(group.matrices for group in self.layer_groups(settings.streaming)):
            more += further_tokens(settings, runtime.prefill_chunk, True) * carried_nbytes(self.decoder, runtime.dtype)
        return Costs(
            kv_nbytes=lambda context_length: cached(spec, runtime.cache_sizes(context_length)),
            kv_pools=lambda context_length: pool_sizes(spec, runtime.cache_sizes(context_length)),
            workspace_nbytes=waiting
            + workspace_nbytes(spec, batch, runtime.prefill_chunk, runtime.dtype, is_eager=runtime.prefill == "eager"),
            attention_nbytes=self._attention(),
            moving_nbytes=more - waiting,
            buffer_nbytes=lambda job_nbytes: 0 if is_gpu else self.read_nbytes(tier, job_nbytes),
            least_job_nbytes=CONVERSION_NBYTES if is_gpu else self._least_job_nbytes,
            loading_nbytes=max(loading_nbytes(self.loader, one, is_on_cpu=not is_gpu) for one in self._decoders),
            overhead_nbytes=self._overhead_nbytes() if is_gpu else 0,
            program_nbytes=self._programs(settings.streaming),
        )

    def _overhead_nbytes(self) -> int:
        """Return the bytes on a GPU for libraries and captured graphs."""
        runtime, decoder = self.runtime, self.decoder
        is_captured, compiles = runtime.graph == "captured", runtime.blocks != "kernels"
        sizes = runtime.batch_size, is_captured, runtime.dtype
        nbytes = overhead_nbytes(decoder.spec, decoder, *sizes, compiles=compiles)
        if runtime.prefill == "captured":
            nbytes += chunk_graphs_nbytes(decoder.spec, decoder, runtime.prefill_chunk, runtime.dtype)
        return nbytes

    @property
    def _decoders(self) -> Sequence[Decoder]:
        """The model's decoder and the draft's, if there is one."""
        return [self.decoder, *([] if self.draft is None else [self.draft.decoder])]

    def _attention(self) -> Callable[[int], int]:
        """Return the function from a context to the scratch of a prompt's attention; Triton's kernels need none."""
        runtime, spec = self.runtime, self.decoder.spec
        if isinstance(runtime.backend, TritonBackend):
            return lambda context_length: 0
        threads = torch.get_num_threads() if isinstance(runtime.backend, NativeBackend) else None
        sizes = runtime.prefill_chunk, runtime.dtype, threads
        return lambda context_length: attention_nbytes(spec, context_length, *sizes)

    def _programs(self, streaming: StreamingSettings) -> Callable[[int], int]:
        """Return the function from a context to the bytes of native decode programs; 0 where there are none."""
        runtime, backend = self.runtime, self.runtime.backend
        if runtime.graph != "captured" or runtime.device.type != "cpu" or not isinstance(backend, NativeBackend):
            return lambda context_length: 0
        is_streaming = streaming.keeps != "all"
        fetches = is_streaming and bool(expert_linears(self.decoder))
        groups = tuple(self.layer_groups(streaming)) if is_streaming or runtime.share is not None else ()
        widths = widths_of(most_step_rows(runtime.batch_size, runtime.draft_tokens))
        sizes = ProgramSizes(
            tuple(widths), runtime.batch_size, runtime.kv_dtype, runtime.prefill_chunk, backend, fetches, groups
        )
        runs = () if runtime.share is None else tuple(map(LayerGroup, runtime.share.runs))
        drafting = replace(sizes, widths=tuple(widths_of(most_step_rows(runtime.batch_size))), layer_groups=runs)

        def nbytes(context_length: int) -> int:
            of_draft = 0 if self.draft is None else known_nbytes(self.draft.decoder, drafting, context_length)
            return of_draft + known_nbytes(self.decoder, sizes, context_length)

        return nbytes

    def read_nbytes(self, tier: Tier, job_nbytes: int = CONVERSION_NBYTES) -> int:
        """Return the bytes of the buffers through which weights are read from the tier into slots."""
        whole = [self._stored_nbytes(source) for source in self._movable if not self._has_rows(source)]
        return buffer_nbytes(tier, whole, bool(expert_linears(self.decoder)), job_nbytes)

    @property
    def _least_job_nbytes(self) -> int:
        """Bytes of the longest group of rows that a conversion takes at once, of layers and head."""
        loader = self.loader
        ends = [loader.sources[HEAD]] if HEAD in loader.sources else []
        matrices = [source for source in (*self._movable, *ends) if self._has_rows(source)]
        rows = [self._stored_nbytes(one) // loader.checkpoint.tensors[one.name].shape[0] for one in matrices]
        return GROUP_ROWS * max(rows, default=0)

    @property
    def _movable(self) -> Sequence[TensorSource]:
        """Where the matrices of the layers, which may stream, are stored."""
        return [
            self.loader.sources[f"layers.{index}.{name}"]
            for index, layer in self.decoder.blocks()
            for name, tensor in layer.named_buffers()
            if is_movable(name, tensor)
        ]

    def _has_rows(self, source: TensorSource) -> bool:
        """Return whether a stored tensor can be converted row by row."""
        return first_row(self.loader, source, self.loader.checkpoint.tensors[source.name], None) is not None

    def _stored_nbytes(self, source: TensorSource) -> int:
        return sum(span.nbytes for span in self.loader.checkpoint.spans(source.name))

    def disk_obstacle(self, settings: Settings, machine: Machine) -> str:
        """Return why weights cannot stream from the checkpoint's files; empty if they can.

        In task=plan, and for another machine, random weights count as weights in a file.
        """
        loader = self.loader
        is_plan = isinstance(settings.task, dict) and settings.task.get("name") == "plan"
        if settings.quant.format != STORED:
            return f"quant={settings.quant.format} packs them at load, and the files do not hold that"
        if (is_plan or not machine.is_here) and isinstance(loader.checkpoint, RandomCheckpoint):
            return ""
        if any(not loader.checkpoint.spans(source.name) for source in loader.sources.values()):
            return f"{loader.checkpoint.source} has no files"
        for name in (EMBEDDING, FEATURES):
            source = loader.sources.get(name)
            if source is None:
                continue
            packing = self.decoder.table(name).packing
            if first_row(loader, source, loader.checkpoint.tensors[source.name], packing) is None:
                return f"the rows of tensor '{source.name}' cannot be read one by one"
        return expert_obstacle(loader, expert_linears(self.decoder))

    def offload_obstacle(self) -> str:
        """Return why keys and values cannot be offloaded; empty if they can."""
        if self.runtime.device.type != "cpu":
            return f"keys and values on {self.runtime.device} are not offloaded yet"
        if self.runtime.share is not None:
            return "the ranks of a ring do not offload keys and values yet"
        return "" if sys.platform == "linux" else f"keys and values are not offloaded on {sys.platform} yet"

    def longest_context(self, settings: Settings) -> int:
        """Return the longest context that a run may have without being asked for one; 0 for the default.

        LongRoPE rotates all sequences otherwise if there is room for long ones, and the ranks of a ring would have to
        agree on one.
        """
        is_long_rope = any(isinstance(rope.scaling, LongScaling) for rope, _ in self.decoder.spec.ropes)
        if settings.context_length is not None or is_long_rope or self.runtime.share is not None:
            return 0
        most = self.decoder.spec.context if self.runtime.device.type == "cpu" else LONGEST_ON_GPU
        return min(most, self.decoder.spec.context, settings.batching.cache_tokens or most)

    def has_device_readable_experts(self, settings: Settings, tier: Tier) -> bool:
        """Return whether a GPU's kernels can read the experts in locked RAM, in the format that they have there.

        Matrices that have to be unpacked before a product do not qualify: unpacking copies them, and torch copies
        within one device only.
        """
        is_lockable = self.runtime.device.type == "cuda" and tier.kind == "host" and settings.streaming.pinned_memory
        packings = [linear.packing for linear in expert_linears(self.decoder).values()]
        return is_lockable and all(packing is None or isinstance(packing, DevicePacking) for packing in packings)


def known_nbytes(decoder: Decoder, sizes: ProgramSizes, context_length: int) -> int:
    """Return the bytes of a decoder's programs, computed once."""
    known = _PROGRAMS.setdefault(decoder, {})
    if (sizes, context_length) not in known:
        known[sizes, context_length] = programs_nbytes(decoder, sizes, context_length)
    return known[sizes, context_length]


def further_nbytes(settings: Settings, spec: ModelSpec, chunk: int, is_streaming: bool) -> int:
    """Return the bytes of the chunks of prompts beyond one that may run in a pass, while they wait for each other."""
    return waiting_nbytes(spec, further_tokens(settings, chunk, is_streaming))


def further_tokens(settings: Settings, chunk: int, is_streaming: bool) -> int:
    """Return the tokens of the chunks of prompts beyond one that may run in a pass."""
    tokens = min(settings.batching.prompt_tokens(chunk, is_streaming), chunk * settings.batching.max_sequences)
    return max(tokens - chunk, 0)
