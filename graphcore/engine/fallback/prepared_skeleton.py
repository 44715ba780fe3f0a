"""A prepared transformers model: its skeleton's weights, and the sizes and costs for a plan."""

from dataclasses import dataclass

from graphcore.arch.config.model_config import ModelConfig
from graphcore.config.settings import Settings
from graphcore.engine.fallback.skeleton_weights import SkeletonWeights
from graphcore.engine.loading.model_loader import PreparedModel
from graphcore.engine.loading.runtime_config import RuntimeConfig
from graphcore.planning.gpu_overhead import LIBRARIES
from graphcore.planning.loading_peak import making_nbytes
from graphcore.planning.planner import Costs
from graphcore.planning.sizes import WeightSizes
from graphcore.planning.tier import buffer_nbytes
from graphcore.planning.workspace import scored_nbytes
from graphcore.weights.plan import Tier


@dataclass(frozen=True)
class PreparedSkeleton(PreparedModel):
    """A skeleton on the meta device, with its runtime configuration and the loader of its weights.

    Attributes:
        config: sizes and token ids of the model.
        weights: the skeleton's weights, sorted by how they can move.
    """

    config: ModelConfig
    weights: SkeletonWeights

    def sizes(self, settings: Settings) -> WeightSizes:
        """Return the bytes of the weights, sorted by how they can move; `weights` has the layer groups."""
        return self.weights.sizes()

    def costs(self, settings: Settings, tier: Tier) -> Costs:
        """Return the memory that is needed besides weights; on a GPU this includes CUDA's own."""
        weights, runtime, is_on_cpu = self.weights, self.runtime, self.runtime.device.type == "cpu"
        own = ((name, tensor) for name, tensor in weights.weights.items() if name not in weights.shared)
        return Costs(
            kv_nbytes=lambda tokens: cached_nbytes(self.config, runtime, tokens),
            workspace_nbytes=pass_nbytes(self.config, runtime, weights.skeleton.attention),
            buffer_nbytes=lambda job_nbytes: self.read_nbytes(tier) if is_on_cpu else 0,
            overhead_nbytes=0 if is_on_cpu else LIBRARIES,
            loading_nbytes=max(
                making_nbytes(self.loader, name, None, tensor.dtype) + (0 if is_on_cpu else tensor.nbytes)
                for name, tensor in own
            ),
        )

    def read_nbytes(self, tier: Tier) -> int:
        """Return the bytes of the buffers through which weights are read from the tier into slots.

        A weight that is no matrix of rows is read whole.
        """
        movable = (weight for group in self.weights.groups() for weight in group.weights)
        return buffer_nbytes(tier, [weight.tensor.nbytes for weight in movable if weight.tensor.dim() > 2])


def cached_nbytes(config: ModelConfig, runtime: RuntimeConfig, tokens: int) -> int:
    """Return the bytes of keys and values of `tokens` tokens, assuming that every layer keeps both for each token."""
    heads = config.attention.num_key_value_heads * config.attention.head_dim
    return 2 * config.num_hidden_layers * heads * tokens * runtime.batch_size * runtime.dtype.itemsize


def pass_nbytes(config: ModelConfig, runtime: RuntimeConfig, attention: str) -> int:
    """Return an estimate of the bytes that one prefill chunk takes at once, with a copy of one layer's cache.

    transformers' classes do not state it. Eager attention holds every head's scores of a chunk, also in float32.
    """
    rows = runtime.batch_size * runtime.prefill_chunk
    itemsize = runtime.dtype.itemsize
    activations = rows * (8 * config.hidden_size + 4 * config.intermediate_size) * itemsize
    heads = config.attention.num_attention_heads if attention == "eager" else 1
    scores = rows * runtime.context_length * heads * (2 * itemsize + 4)
    copied = 2 * cached_nbytes(config, runtime, runtime.context_length) // config.num_hidden_layers
    logits = max(2 * runtime.batch_size * config.vocab_size * 4, scored_nbytes(config.vocab_size))
    return activations + scores + copied + logits
