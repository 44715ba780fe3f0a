"""The runtime configuration: what settings leave to the machine. Device, dtype, graph kinds, context, kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graphcore import __version__
from graphcore.config.settings import Settings
from graphcore.config.user_path import user_folder
from graphcore.device import DTYPES, find_cpp_compiler, resolve_device, resolve_dtype
from graphcore.engine.loading.open_model import OpenedModel
from graphcore.errors import ConfigError
from graphcore.graph.artefacts import Artefacts
from graphcore.graph.gpu.kernel_obstacles import block_obstacle, device_obstacle
from graphcore.kernels.backend import Backend, NativeBackend, backend_of, find_backend
from graphcore.kernels.cpu.kernel_packing import DENSE_TOKENS
from graphcore.kernels.cpu.library import can_have_kernels
from graphcore.kernels.gpu.pdl import FIRST_CAPABILITY, supports_pdl
from graphcore.kernels.gpu.registration import register
from graphcore.kernels.ops.kv_formats import KVTypes
from graphcore.kvcache.chunks import Chunks
from graphcore.kvcache.sizes import CacheSizes
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import ModelSpec, RecurrentSpec
from graphcore.parallel.share import Share
from graphcore.planning.machine import free_device_nbytes
from graphcore.progress import Progress, ignore_progress
from graphcore.weights.packed_weights import PackingPolicy

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FREE_SHARE = 0.8  # share of free memory that weights may take when they are unpacked at load
NO_HOME = "no home folder is known: cache_dir is a temporary folder, which the next start does not find; set cache_dir"
DEFAULT_CONTEXT = 4096  # tokens; where weights stream, or memory is short; else `longest_context`
WHOLE_CHUNKS = "prompts reuse cached prefixes in whole chunks"


@dataclass(frozen=True)
class RuntimeConfig:
    """The device, dtype, graph kinds and sizes that follow from the settings on a machine.

    Attributes:
        kv_dtype: storage types of keys and values.
        graph: how decode steps run: "captured", "compiled" or "eager".
        blocks: what the blocks of decode steps are: "kernels", "compiled" or "eager"; "mixed" if kernels support some.
        prefill: how everything else runs, prompts and decode steps that are not captured: "compiled" or "eager"; or
            "captured" if prompts run as CUDA graphs of compiled blocks.
        context_length: most tokens of KV cache of one sequence.
        cache_tokens: tokens of KV cache that all sequences share; None follows from the context length.
        snapshots: number of recurrent states for snapshots, besides those of the sequences.
        packing: policy of how packed weights are held and multiplied.
        speculation: where draft tokens come from: "off", "lookup" or "self".
        draft_tokens: most draft tokens of one sequence in a decode step; 0 without speculation.
        draft_format: format of the copies that the draft model of "self" has.
        uses_pdl: True if a captured step's kernels use programmatic dependent launch (kernels/gpu/pdl.py).
        share: this process's share of the layers; None if it has all.
        prompts_together: True if a pass has a chunk for every sequence: weights stream, on a ring on all ranks.
        is_batch_invariant: True if a prompt's tokens have the same bits in chunks of different lengths
            (`Decoder.is_batch_invariant`), on a ring on all ranks.
        artefacts: packages of compiled blocks and heads; None to compile them here.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: KVTypes
    graph: str
    blocks: str
    prefill: str
    context_length: int
    batch_size: int
    prefill_chunk: int
    packing: PackingPolicy
    cache_tokens: int | None = None
    snapshots: int = 0
    speculation: str = "off"
    draft_tokens: int = 0
    draft_format: str = ""
    uses_pdl: bool = False
    share: Share | None = None
    prompts_together: bool = False
    is_batch_invariant: bool = False
    artefacts: Artefacts | None = None

    @property
    def backend(self) -> Backend:
        """The kernels that compute the model; its weights are packed for them."""
        return self.packing.backend

    @property
    def chunks(self) -> Chunks:
        """The chunk boundaries of prompts."""
        return Chunks(self.prefill_chunk, DENSE_TOKENS if self.is_batch_invariant else self.prefill_chunk)

    @property
    def runs_parts(self) -> bool:
        """Whether blocks can run in parts, so that matrices stream one by one: eager blocks beside native programs."""
        return self.prefill == "eager" and isinstance(self.backend, NativeBackend)

    def cache_sizes(self, context_length: int) -> CacheSizes:
        """Return the sizes of the caches for sequences of at most `context_length` tokens."""
        shared = self.cache_tokens or max(context_length, self.batch_size * min(context_length, DEFAULT_CONTEXT))
        kept = context_length, self.kv_dtype, self.prefill_chunk
        together = 1 + self.draft_tokens
        sizes = CacheSizes(self.batch_size, *kept, together=together, tokens=shared, snapshots=self.snapshots)
        return sizes if self.share is None else replace(sizes, layers=self.share.layers)

    def shortened(self, context_length: int) -> "RuntimeConfig":
        """Return the configuration for the context length of a plan."""
        return replace(self, context_length=context_length, prefill_chunk=min(self.prefill_chunk, context_length))


@dataclass(frozen=True)
class ComputeTarget:
    """The device that a model is loaded for, and what computes there.

    Attributes:
        dtype: compute dtype.
        backend: kernels that compute the model.
        is_here: True if the device is in this machine.
        note: line about the kernels; empty if there is nothing to say.
        artefacts: packages of compiled blocks and heads that fit this machine, whose kernels the backend runs; or None.
    """

    device: torch.device
    dtype: torch.dtype
    backend: Backend
    is_here: bool = True
    note: str = ""
    artefacts: Artefacts | None = None


def device_and_dtype(settings: Settings, model: OpenedModel) -> tuple[torch.device, torch.dtype]:
    """Return the device that the settings name on this machine, and the compute dtype there.

    Raises:
        ConfigError: the machine does not have the device, or cannot compute in the dtype.
    """
    device = resolve_device(settings.device)
    return device, resolve_dtype(settings.dtype.name, model.dtype, device)


def target_here(settings: Settings, model: OpenedModel, on_progress: Progress = ignore_progress) -> ComputeTarget:
    """Return this machine's compute target. Builds the C++ kernels if they are missing.

    Args:
        on_progress: callback while kernels are built.

    Raises:
        ConfigError: the machine does not have the device, or cannot compute in the dtype; or graph.artefacts are none
            that were compiled for this machine.
    """
    device, dtype = device_and_dtype(settings, model)
    if settings.graph.artefacts is not None:
        artefacts = Artefacts.read(user_folder(settings.graph.artefacts, "graph.artefacts=").absolute())
        artefacts.check_facts(machine_facts(device))
        artefacts.check_instructions()
        return ComputeTarget(device, dtype, backend_of(artefacts.library()), artefacts=artefacts)
    backend, note = find_backend(device, settings.cache_folder, on_progress)
    return ComputeTarget(device, dtype, backend, note=note)


def machine_facts(device: torch.device) -> dict[str, str]:
    """Return what compiled code depends on, apart from the model and from the processor's instructions.

    Inductor cuts loops for a number of threads, and calls torch's kernels, whose bits depend on the vector level.
    """
    return {
        "graphcore": __version__,
        "torch": torch.__version__,
        "device": device.type,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def packing_policy_of(settings: Settings, target: ComputeTarget) -> PackingPolicy:
    """Return how weights are packed on the target."""
    rounding = choose_rounding(settings.quant.activations, target.dtype)
    room = room_for_dense(settings, target.device) if target.is_here else 0
    return PackingPolicy(target.backend, rounding, settings.quant.format, room)


def room_for_dense(settings: Settings, device: torch.device) -> int:
    """Return the bytes that weights unpacked at load may take; 0 on a GPU and where weights are streamed."""
    if device.type != "cpu" or settings.streaming.policy != "off":
        return 0
    return int(FREE_SHARE * free_device_nbytes(device))


def choose_context_length(settings: Settings, longest: int, advice: str = "") -> int:
    """Return the tokens of KV cache for each sequence.

    Args:
        longest: most tokens that the model was trained for.
        advice: advice for more tokens, beginning with a semicolon.

    Raises:
        ConfigError: the settings ask for more tokens than that.
    """
    shared = settings.batching.cache_tokens or longest
    context_length = settings.context_length or min(longest, DEFAULT_CONTEXT, shared)
    if context_length > longest:
        raise ConfigError(f"context_length={context_length}, but the model was made for {longest} tokens{advice}")
    if context_length > shared:
        raise ConfigError(
            f"context_length={context_length}, but batching.cache_tokens={shared} is less: all sequences "
            "share these positions; set a smaller context_length, or a larger batching.cache_tokens"
        )
    return context_length


def choose_snapshots(settings: Settings, spec: ModelSpec) -> int:
    """Return the number of snapshots of recurrent states; 0 for a model without such states."""
    if not any(isinstance(block.attention, RecurrentSpec) for block in spec.blocks):
        return 0
    wanted = settings.batching.snapshots
    return settings.batching.max_sequences + 1 if wanted is None else wanted


def choose_speculation(settings: Settings, device: torch.device, graph: str) -> tuple[str, int, str]:
    """Return the kind of speculation, the most draft tokens of a sequence in a step, and a note, which may be empty.

    "auto" is "lookup" until a plan is made, or "off".

    Args:
        graph: how decode steps run there; only native programs run several tokens of a sequence.

    Raises:
        ConfigError: the settings ask for speculation, and decode steps run one token of a sequence.
    """
    kind = settings.speculation.kind
    is_possible = graph == "captured" and device.type == "cpu"
    if kind == "off" or is_possible:
        tokens = settings.speculation.draft_tokens(settings.streaming.policy != "off")
        return ("lookup" if kind == "auto" else kind), tokens, ""
    reason = (
        f"needs decode steps as native programs on the CPU (graph=captured there), and they run {graph} on {device}"
    )
    if kind == "auto":
        return "off", 0, f"speculation=auto checks no drafts: it {reason}"
    raise ConfigError(f"speculation={kind} {reason}; use speculation=off")


def choose_rounding(activations: str, dtype: torch.dtype) -> str:
    """Return how activations are rounded before packed matrices (kernels/cpu/kernel_packing.py); float32 never is."""
    if dtype is torch.float32:
        return "float"
    return {"auto": "wide", "float": "float", "int8": "block"}[activations]


def refuse_graph(settings: Settings) -> None:
    """Check, before anything is fetched, that the graph kind that the settings name can run here.

    Raises:
        ConfigError: the graph kind cannot run here.
    """
    kind, blocks, prefill = settings.graph.kind, settings.graph.blocks, settings.graph.prefill
    if kind in ("captured", "compiled") or blocks != "auto" or prefill != "auto":
        device = resolve_device(settings.device)
        has_kernels = register() if device.type == "cuda" else can_have_kernels()
        choose_graph(kind, device, has_kernels, blocks, prefill, settings.graph.artefacts is not None)


def choose_graph(
    kind: str,
    device: torch.device,
    has_kernels: bool,
    blocks: str = "auto",
    prefill: str = "auto",
    has_artefacts: bool = False,
) -> tuple[str, str, str]:
    """Return how decode steps run, how everything else runs, and a note if that is slower than what was asked for.

    On the CPU "auto" compiles nothing: a decode step is native programs, and a compiled prefill is at most a quarter
    faster than the same kernels called one by one, while loading the compiler takes seconds.

    Args:
        has_kernels: True where graphcore's own kernels can run: C++ on the CPU, Triton on a GPU.
        blocks: what the blocks of decode steps are to be: "auto", "kernels" or "compiled".
        prefill: how prompts are to run: "auto", "captured", "compiled" or "eager".
        has_artefacts: True if compiled blocks are loaded, so that no compiler is needed.

    Raises:
        ConfigError: the settings name a kind, or blocks, that cannot run here.
    """
    graph, usual, note = _choose_kinds(kind, device, has_kernels, blocks, has_artefacts)
    if prefill in ("auto", usual):
        return graph, usual, note
    has_captured_prefill = graph == "captured" and device.type == "cuda"
    if prefill == "captured" and not has_captured_prefill:
        raise ConfigError(
            f"graph.prefill=captured needs graph=captured on a CUDA device, and this is graph={graph} on {device}; use "
            f"graph.prefill={usual}"
        )
    if prefill != "captured" and (graph != "captured" or device.type == "cuda"):
        raise ConfigError(
            f"graph.prefill={prefill} is not possible with graph={graph} on {device}, where prompts run {usual}; use "
            f"graph={prefill}"
        )
    if prefill == "compiled" and find_cpp_compiler() is None:
        raise ConfigError(
            "graph.prefill=compiled needs a C++ compiler (g++ or clang++), none works here; use graph.prefill=eager"
        )
    return graph, prefill, ""


def _choose_kinds(
    kind: str, device: torch.device, has_kernels: bool, blocks: str, has_artefacts: bool
) -> tuple[str, str, str]:
    """Return what `choose_graph` does for prefill="auto"."""
    if device.type == "cuda":
        return _choose_gpu_graph("captured" if kind == "auto" and blocks != "auto" else kind, has_kernels)
    if blocks == "compiled" and kind == "captured":
        raise ConfigError(
            f"graph.blocks=compiled is not possible with graph=captured on {device}: a captured step is a native "
            "program there, whose instructions are graphcore's own kernels; use graph=compiled"
        )
    if blocks == "compiled":
        kind = "compiled"
    if blocks == "kernels" and not has_kernels:
        kind = "captured"
    if kind == "eager":
        return "eager", "eager", ""
    if has_artefacts:
        return "compiled", "compiled", ""
    if kind == "captured" and not has_kernels:
        raise ConfigError(
            f"graph=captured needs a CUDA device, or a C++ compiler (g++ or clang++) for its kernels; this is {device} "
            "and none works here; use graph=eager or graph=auto"
        )
    if kind == "auto" and has_kernels:
        return "captured", "eager", ""
    without = f"graph={kind}: no C++ compiler works here, so"
    if kind == "captured":
        if find_cpp_compiler() is not None:
            return "captured", "compiled", ""
        return "captured", "eager", f"{without} prompts run eager; install g++ for compiled blocks"
    if find_cpp_compiler() is not None:
        return "compiled", "compiled", ""
    if kind == "compiled":
        raise ConfigError("graph=compiled needs a C++ compiler (g++ or clang++), none works here; use graph=eager")
    return "eager", "eager", f"{without} blocks run eager; install g++ for compiled blocks"


def _choose_gpu_graph(kind: str, has_triton: bool) -> tuple[str, str, str]:
    if has_triton:
        chosen = "captured" if kind == "auto" else kind
        return chosen, "eager" if chosen == "eager" else "compiled", ""
    if kind in ("captured", "compiled"):
        raise ConfigError(f"graph={kind} on a GPU needs Triton, which is not installed; install triton, or graph=eager")
    slow = "attention masks the whole cache, and packed weights are unpacked for each use"
    return "eager", "eager", f"Triton is not installed: blocks run eager, {slow}; install triton"


def choose_blocks(
    asked: str, graph: str, device: torch.device, decoder: Decoder, batch_size: int
) -> tuple[str, Sequence[str]]:
    """Return what the blocks of decode steps are, and a note if "auto" runs a GPU's blocks compiled.

    Args:
        asked: "auto", "kernels" or "compiled".
        graph: how decode steps run.

    Raises:
        ConfigError: kernels are asked for, and cannot run all blocks.
    """
    if graph != "captured":
        return graph, ()
    if device.type == "cpu":
        return "kernels", ()
    if asked == "compiled":
        return "compiled", ()
    obstacle = device_obstacle(decoder, 1) or device_obstacle(decoder, batch_size)
    if obstacle is None:
        return "kernels", ()
    if asked == "kernels":
        raise ConfigError(f"graph.blocks=kernels is not possible: {obstacle}; use graph.blocks=auto or compiled")
    supported = any(block_obstacle(block, batch_size) is None for _, block in decoder.blocks())
    return "mixed" if supported else "compiled", (f"decode runs compiled blocks: {obstacle}",)


def choose_pdl(setting: str, graph: str, device: torch.device) -> tuple[bool, str]:
    """Return whether a captured step's kernels use programmatic dependent launch, and a note if it cannot.

    Args:
        setting: "auto", "on" or "off".
        graph: how decode steps run.
    """
    can = graph == "captured" and supports_pdl(device)
    if can or setting != "on":
        return can and setting != "off", ""
    capability = ".".join(map(str, FIRST_CAPABILITY))
    return False, (
        f"dependent_launches=on has no effect: it needs graph=captured on a GPU of compute capability {capability} or "
        f"more, and this is graph={graph} on {device}"
    )


def note_on_chunks(runtime: RuntimeConfig, spec: ModelSpec) -> Sequence[str]:
    """Return a note if prompts reuse only whole chunks of cached ones although the CPU's kernels could do better."""
    has_states = any(
        isinstance(block.attention, RecurrentSpec) for block in spec.blocks
    )  # they need whole chunks anyway
    if runtime.is_batch_invariant or has_states or not isinstance(runtime.backend, NativeBackend):
        return ()
    reason = f"torch computes a part of {DTYPE_NAMES[runtime.dtype]} prompts, with sums that depend on a chunk's length"
    if runtime.prefill == "compiled":
        reason = "the numbers of compiled prompts depend on a chunk's length"
    return (f"{WHOLE_CHUNKS} of prefill_chunk={runtime.prefill_chunk} tokens: {reason}",)


def describe_runtime(runtime: RuntimeConfig, settings: Settings) -> Sequence[str]:
    """Return the runtime configuration in short words, for one line of output."""
    dtype = DTYPE_NAMES[runtime.dtype]
    has_choice = runtime.graph == "captured" and runtime.device.type == "cuda"
    blocks = [f"blocks={runtime.blocks}"] if has_choice else []
    prefill = [f"prefill={runtime.prefill}"] if runtime.prefill != runtime.graph else []
    graphs = f"graph={runtime.graph}", *blocks, *prefill
    return (str(runtime.device), dtype, *graphs, f"streaming={settings.streaming.policy}")
