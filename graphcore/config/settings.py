"""The schema of every setting. Defaults are in conf/, with comments; a field here has a type and no default.

OmegaConf checks names and types at compose; `validate_settings` (validate.py) checks ranges and combinations.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import MISSING

from graphcore.build_folder import temporary_folder
from graphcore.config.user_path import lacks_home, user_folder


@dataclass
class PublishedFile:
    """A published checkpoint of a model: its path, the bytes of its weights and, if it is one file, its sha256."""

    checkpoint: str = MISSING
    nbytes: int = MISSING
    sha256: str | None = MISSING


@dataclass
class PublishedSettings:
    """The checkpoint that a model group stands for: its licence, the bytes of its weights, its path and its sha256.

    `kind` is chat or base. `sampling` has the parameters that its model card recommends where the files say nothing.
    """

    kind: str = MISSING
    licence: str = MISSING
    nbytes: int = MISSING
    checkpoint: str = MISSING
    sha256: str | None = MISSING
    sampling: dict[str, Any] = MISSING


@dataclass
class ModelSettings:
    """conf/model/*: which checkpoint.

    `published` is the one of `files` that `precision` names. `adapter` is text or a list of texts; `adapters` has them
    apart.
    """

    name: str = MISSING
    precision: str = MISSING
    files: dict[str, PublishedFile] = MISSING
    published: PublishedSettings = field(default_factory=PublishedSettings)
    checkpoint: str = MISSING
    sha256: str | None = MISSING
    adapter: Any = MISSING
    num_hidden_layers: int | None = MISSING
    fallback: str | None = MISSING
    attention: str = MISSING
    random_config: dict[str, Any] = MISSING

    @property
    def expected_sha256(self) -> str | None:
        """The sha256 that the checkpoint's file must have: as set, else as published for the same checkpoint."""
        return self.sha256 or (self.published.sha256 if self.checkpoint == self.published.checkpoint else None)

    @property
    def recommended_sampling(self) -> Mapping[str, Any]:
        """The sampling parameters of the model card; empty for a checkpoint that is not the group's."""
        return self.published.sampling if self.checkpoint == self.published.checkpoint else {}

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters as written, each "PATH" or "PATH:WEIGHT": one text, "[a,b]", or a list of texts."""
        if self.adapter is None:
            return ()
        if isinstance(self.adapter, str):
            is_list = self.adapter.startswith("[") and self.adapter.endswith("]")
            return tuple(one.strip() for one in self.adapter[1:-1].split(",")) if is_list else (self.adapter,)
        return tuple(self.adapter)

    @property
    def display_name(self) -> str:
        """The model's name for users: that of its group, or the file or folder of another checkpoint."""
        if self.checkpoint == self.published.checkpoint:
            return self.name
        return self.checkpoint.rstrip("/").rpartition("/")[2] or self.checkpoint

    @property
    def served_names(self) -> frozenset[str]:
        """Names that a client may give for the model: the display name, the checkpoint's file or folder, org/name.

        The author's repository is one of them for each precision of a model group.
        """
        names = {self.display_name, self.checkpoint.rstrip("/").rpartition("/")[2]}
        is_published = self.checkpoint == self.published.checkpoint
        for source in (self.checkpoint, *(file.checkpoint for file in self.files.values() if is_published)):
            repository = re.match(r"hf:([\w.-]+/([\w.-]+))", source)  # before @commit, :tag or /file
            names |= set(repository.groups() if repository else ())
        return frozenset(names)


@dataclass
class DtypeSettings:
    """conf/dtype/*: the compute dtype."""

    name: str = MISSING


@dataclass
class QuantSettings:
    """conf/quant/*: how weights are stored in memory and multiplied with."""

    format: str = MISSING
    activations: str = MISSING


Keeps = Literal["all", "nothing", "most"]  # matrices that stay on the device; "most": as many as the budget allows
RESIDENT_DRAFT = 15  # draft tokens: with the known one, the rows of one native program
DRAFT_FORMAT = "q4_k"  # of the copies that speculation=self drafts with
STREAMED_DRAFT = 31  # more rows are computed while weights are read
KEPT: Mapping[str, Keeps] = {"auto": "most", "on": "nothing", "off": "all"}  # by streaming.policy


@dataclass
class StreamingSettings:
    """conf/streaming/*: which weights move, and when.

    Sizes are "auto" or what `byte_sizes.parse_nbytes` reads; layer_group_size and prefetch are "auto" or a number.
    """

    policy: str = MISSING
    layer_group_size: Any = MISSING
    memory_budget: Any = MISSING
    kv_memory_budget: Any = MISSING
    host_memory_budget: Any = MISSING
    pinned_memory: bool = MISSING
    prefetch: Any = MISSING
    mode: str = MISSING
    source: str = MISSING
    expert_cache: Any = MISSING

    @property
    def keeps(self) -> Keeps:
        """The matrices that the policy keeps on the device; `validate_settings` has checked its name."""
        return KEPT[self.policy]

    @property
    def layers_per_group(self) -> int:
        """Number of layers that move together where layers are not cut."""
        return 1 if self.layer_group_size == "auto" else int(self.layer_group_size)


@dataclass
class GraphSettings:
    """conf/graph/*: how steps run."""

    kind: str = MISSING
    blocks: str = MISSING
    prefill: str = MISSING
    artefacts: str | None = MISSING


@dataclass
class SpeculationSettings:
    """conf/speculation/*: where draft tokens come from, and how many."""

    kind: str = MISSING
    num_speculative_tokens: int | None = MISSING
    draft_format: str | None = MISSING

    def draft_tokens(self, is_streaming: bool) -> int:
        """Return the most draft tokens of one sequence in a step; 0 without speculation."""
        if self.kind == "off":
            return 0
        return self.num_speculative_tokens or (STREAMED_DRAFT if is_streaming else RESIDENT_DRAFT)


@dataclass
class ParallelSettings:
    """conf/parallel/*: the processes that run one model together."""

    kind: str = MISSING
    interface: str | None = MISSING
    open: bool = MISSING
    timeout: float = MISSING
    split: list[float] | None = MISSING
    transport: str = MISSING


@dataclass
class SamplingSettings:
    """conf/sampling/*: how the next token is sampled."""

    temperature: float | None = MISSING
    top_k: int | None = MISSING
    top_p: float | None = MISSING
    min_p: float | None = MISSING
    repetition_penalty: float | None = MISSING
    presence_penalty: float | None = MISSING
    frequency_penalty: float | None = MISSING
    dry_multiplier: float | None = MISSING
    dry_base: float | None = MISSING
    dry_allowed_length: int | None = MISSING
    dry_penalty_last_n: int | None = MISSING
    top_n_sigma: float | None = MISSING
    xtc_probability: float | None = MISSING
    xtc_threshold: float | None = MISSING
    min_tokens: int | None = MISSING
    logit_bias: dict[int, float] = MISSING
    stop_token_ids: list[int] | None = MISSING
    dry_sequence_breakers: list[str] | None = MISSING

    @property
    def typed(self) -> Mapping[str, Any]:
        """The parameters that are set; the others are the model's own (`graphcore.engine.sampling_defaults`)."""
        return {name: value for name, value in vars(self).items() if value not in (None, {})}


@dataclass
class BatchingSettings:
    """The keys under `batching` in conf/config.yaml."""

    max_sequences: int = MISSING
    max_tokens_per_step: int | None = MISSING
    max_waiting: int = MISSING
    cache_tokens: int | None = MISSING
    snapshots: int | None = MISSING

    def prompt_tokens(self, chunk: int, is_streaming: bool) -> int:
        """Return the most prompt tokens of one pass; a single chunk of at most `chunk` tokens runs even if it has more.

        With streamed weights the default is a chunk for every sequence, because moving the weights costs the same for
        one chunk as for several.
        """
        return self.max_tokens_per_step or chunk * (self.max_sequences if is_streaming else 1)


@dataclass
class CacheSettings:
    """The keys under `cache` in conf/config.yaml."""

    save: str | None = MISSING
    load: str | None = MISSING


@dataclass
class Settings:
    """conf/config.yaml: all settings."""

    model: ModelSettings = field(default_factory=ModelSettings)
    dtype: DtypeSettings = field(default_factory=DtypeSettings)
    quant: QuantSettings = field(default_factory=QuantSettings)
    streaming: StreamingSettings = field(default_factory=StreamingSettings)
    graph: GraphSettings = field(default_factory=GraphSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    task: Any = MISSING  # the task's own schema is checked by the task
    prompt: str | None = MISSING
    prompt_file: str | None = MISSING
    prompt_ids: list[int] | None = MISSING
    system: str | None = MISSING
    stop: list[str] = MISSING
    chat: str = MISSING
    chat_history: bool = MISSING
    special_tokens: str = MISSING
    max_new_tokens: int | None = MISSING
    repetition_detection: bool = MISSING
    context_length: int | None = MISSING
    batch_size: int = MISSING
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    prefill_chunk: int = MISSING
    kv_dtype: str = MISSING
    device: str = MISSING
    dependent_launches: str = MISSING
    threads: int | None = MISSING
    seed: int = MISSING
    cache_dir: str = MISSING
    progress: bool = MISSING
    outputs: bool = MISSING
    trace: bool = MISSING
    debug: bool = MISSING

    @property
    def cache_folder(self) -> Path:
        """The folder of `cache_dir`, which need not exist yet; a temporary one for `~` where no home folder is known.

        Raises:
            ConfigError: `cache_dir` cannot be a folder.
        """
        temporary = temporary_folder() if lacks_home(self.cache_dir) else None
        return temporary or user_folder(self.cache_dir, "cache_dir=")

    @property
    def swap_folder(self) -> Path:
        """The folder of files without a name, for sequences that are swapped out and for offloaded keys and values."""
        return self.cache_folder / "swapped"
