"""The interface that loads a model: one of graphcore's own architectures, or one of transformers' classes.

    settings --open--> OpenedModel --prepare--> PreparedModel --plan--> Plan --build--> Running

`load_model` goes this way with either loader, `DecoderLoader` or `TransformersLoader`; `plan_run` plans for both.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from graphcore.config.settings import Settings
from graphcore.engine.loading.open_model import OpenedModel
from graphcore.engine.loading.runtime_config import RuntimeConfig
from graphcore.engine.model_runner import ModelRunner
from graphcore.planning.machine import Machine
from graphcore.planning.planner import Costs
from graphcore.planning.sizes import WeightSizes
from graphcore.progress import Progress
from graphcore.streaming.weight_stream import WeightStream
from graphcore.weights.loader import Loader
from graphcore.weights.plan import Plan, Tier


@dataclass(frozen=True)
class PreparedModel(ABC):
    """A model before any weight is allocated or read: its modules are on the meta device.

    It has two implementations: `PreparedDecoder` (graphcore's own architectures) and `PreparedSkeleton` (transformers'
    classes).

    Attributes:
        notes: lines about what graphcore chose or what may surprise; planning adds to them.
        loader: loader that locates the weights.
    """

    runtime: RuntimeConfig
    notes: list[str]
    loader: Loader

    @abstractmethod
    def sizes(self, settings: Settings) -> WeightSizes:
        """Return the bytes of the weights, sorted by how they can move; the settings say which layers do together."""

    @abstractmethod
    def costs(self, settings: Settings, tier: Tier) -> Costs:
        """Return the memory that is needed besides weights; on a GPU this includes CUDA's own."""

    @abstractmethod
    def read_nbytes(self, tier: Tier) -> int:
        """Return the bytes of the buffers through which weights are read from the tier into slots."""

    def groups_of_turn(self, settings: Settings) -> int:
        """Return how many layer groups run in a turn, between those of other ranks; 0 if one process runs all."""
        return 0

    def notes_on(self, plan: Plan) -> Sequence[str]:
        """Return notes on what follows from a plan.

        Raises:
            PlanError: the settings ask for something that is not possible with the plan.
        """
        return ()

    def disk_obstacle(self, settings: Settings, machine: Machine) -> str:
        """Return why weights cannot stream from the checkpoint's files; empty if they can."""
        return ""

    def offload_obstacle(self) -> str:
        """Return why keys and values cannot be offloaded; empty if they can."""
        return "transformers' classes keep their own caches in memory"

    def longest_context(self, settings: Settings) -> int:
        """Return the longest context that a run may have without being asked for one; 0 for the default."""
        return 0

    def has_device_readable_experts(self, settings: Settings, tier: Tier) -> bool:
        """Return whether a GPU's kernels can read the experts in locked RAM, in the format that they have there."""
        return False


@dataclass(frozen=True)
class Running:
    """A runner and the stream that moves its weights.

    Attributes:
        runtime: runtime configuration that runs, if it is another than the prepared one; else None.
    """

    runner: ModelRunner
    stream: WeightStream
    runtime: RuntimeConfig | None = None


M = TypeVar("M", bound=OpenedModel)
P = TypeVar("P", bound=PreparedModel)


class ModelLoader(ABC, Generic[M, P]):
    """The interface that opens, prepares and builds one kind of model."""

    @abstractmethod
    def open(self, settings: Settings, on_progress: Progress) -> M:
        """Return the model that the settings name, downloaded if need be; no weight is read.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it is not supported.
            ConfigError: a setting contradicts the checkpoint, or has no effect with this kind of model.
        """

    @abstractmethod
    def prepare(self, settings: Settings, model: M, on_progress: Progress) -> P:
        """Return the model's modules on the meta device, its runtime configuration and loader; no weight is read.

        Raises:
            ConfigError: the machine or the model cannot do what was asked.
            CheckpointError: names or shapes are wrong.
        """

    @abstractmethod
    def plan(self, settings: Settings, parts: P, on_progress: Progress) -> tuple[P, Plan, Tier]:
        """Return the parts as the plan has them, the plan for this machine, and the tier of streamed weights.

        Raises:
            PlanError: the model does not fit; the message has the smallest budget that works.
            ConfigError: streaming.source names a tier that the weights cannot be read from.
        """

    def agree(self, settings: Settings, parts: P, plan: Plan, tier: Tier) -> tuple[P, Plan, Tier]:
        """Return what all ranks of a ring run alike, whose plans may differ; as given without other ranks.

        Raises:
            ParallelError: a rank was lost.
        """
        return parts, plan, tier

    @abstractmethod
    def build(self, settings: Settings, parts: P, plan: Plan, tier: Tier, on_progress: Progress) -> Running:
        """Load resident weights, open the stream of the others, and return the runner with that stream.

        Raises:
            CheckpointError: a file has changed, or holds values that are no weights.
        """
