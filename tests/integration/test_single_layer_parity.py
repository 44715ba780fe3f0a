"""One layer of each development model, at its true size, in bf16: ours beside transformers' and beside float64.

Weights are random (seeded) and go through a safetensors file, our config reader, our names and our loader. The exact
layer is transformers' own in float64, with the same bf16 weights and input. An eager block rounds where transformers
does, nearly, so the two are compared; a compiled block rounds less often, so its distance from the exact layer is
compared with transformers' distance. Run with `-s` to see what was measured.

Absolute limits need a scale: a bf16 number between 4 and 8 has neighbours 0.03 away, and at unit-normal input the eager
and sdpa layers of transformers themselves differ by 0.03 (Llama) to 0.09 (Gemma). Here the residual stream, and what
the sublayers add to it, has the standard deviation of a trained model's embeddings.
"""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.comparisons import causal_mask, sliding_window_causal_mask
from torch import Tensor, nn

from graphcore.arch.config_from_json import load_model_config
from graphcore.arch.registry import architecture_of
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.graph.compile import compile_whole, mark_length
from graphcore.nn.block import Block
from graphcore.nn.rope import rope_table
from graphcore.nn.span import Span
from graphcore.weights.loader import Loader
from graphcore.weights.slots import bind

pytestmark = pytest.mark.slow

MAX_ERROR, MEAN_ERROR = 1e-2, 1e-3
RATIO = 1.1
STREAM = 0.05  # standard deviation of the input and, about, of each sublayer's output
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: Mapping[str, dict[str, object]] = {
    "llama": {  # Llama-3.2-1B-Instruct
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
    },
    "qwen3": {  # Qwen3-1.7B
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
    },
    "gemma3": {  # gemma-3-1b-it
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32768,
        "vocab_size": 262144,
    },
}


@dataclass(frozen=True)
class Case:
    """A layer to compare, and how many tokens go through it."""

    model: str
    layer: int
    tokens: int


CASES = {
    "llama": Case("llama", 0, 384),
    "qwen3": Case("qwen3", 0, 96),
    "gemma3_sliding": Case("gemma3", 0, 560),  # longer than its window of 512
    "gemma3_full": Case("gemma3", 5, 96),
}
every_case = pytest.mark.parametrize("name", CASES)
COMPILED = ("llama", "gemma3_sliding")  # in CI; the others are slow
compiled_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in COMPILED else pytest.mark.slow) for name in CASES]
)


class Reference:
    """transformers' layer with random bf16 weights; what it makes of a random bf16 input, in bf16 and exactly."""

    def __init__(self, case: Case) -> None:
        from transformers import AutoConfig
        from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3RotaryEmbedding
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
        from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

        classes = {
            "llama": (LlamaDecoderLayer, LlamaRotaryEmbedding),
            "qwen3": (Qwen3DecoderLayer, Qwen3RotaryEmbedding),
            "gemma3": (Gemma3DecoderLayer, Gemma3RotaryEmbedding),
        }
        self.case = case
        self.config = AutoConfig.for_model(**CONFIGS[case.model])
        self.config._attn_implementation = "eager"
        self.generator = torch.Generator().manual_seed(0)
        layer_class, rotary_class = classes[case.model]
        self.layer: nn.Module = layer_class(self.config, case.layer).bfloat16().eval()
        self.rotary: nn.Module = rotary_class(self.config)
        for name, parameter in self.layer.named_parameters():
            parameter.data.copy_(self.random(name, parameter.shape))
        self.x = (STREAM * torch.randn(1, case.tokens, self.config.hidden_size, generator=self.generator)).bfloat16()

    def random(self, name: str, shape: torch.Size) -> Tensor:
        """Return a random parameter; what writes into the residual stream is scaled to it."""
        noise = torch.randn(shape, generator=self.generator)
        is_gemma = self.case.model == "gemma3"
        if len(shape) == 1:
            scale = STREAM if is_gemma and name.startswith("post_") else 1.0
            return scale * (1.0 + 0.1 * noise) - float(is_gemma)  # Gemma stores the distance from one
        if name.startswith(("self_attn.q_proj", "self_attn.k_proj")):
            return 0.04 * noise  # scores of a few units: attention far enough from even for a wrong rotation to show
        scale = STREAM if not is_gemma and name.startswith(("self_attn.o_proj", "mlp.down_proj")) else 1.0
        return 0.02 * scale * noise

    @property
    def mask(self) -> Tensor:
        """[1, 1, T, T] float32."""
        if self.case.model == "gemma3" and self.config.layer_types[self.case.layer] == "sliding_attention":
            return sliding_window_causal_mask(self.case.tokens, self.config.sliding_window)
        return causal_mask(self.case.tokens)

    def run(self, layer: nn.Module, dtype: torch.dtype) -> Tensor:
        x, positions = self.x.to(dtype), torch.arange(self.case.tokens)[None]
        layer_types = (self.config.layer_types[self.case.layer],) if self.case.model == "gemma3" else ()
        cos_sin = self.rotary(x, positions, *layer_types)
        return layer(x, position_embeddings=cos_sin, attention_mask=self.mask.to(dtype))  # type: ignore[no-any-return]

    @cached_property
    def narrow(self) -> Tensor:
        """transformers' result in bf16: [1, T, D]."""
        with torch.no_grad():
            return self.run(self.layer, torch.bfloat16)

    @cached_property
    def exact(self) -> Tensor:
        """The result in float64: [1, T, D]."""
        with torch.no_grad():
            return self.run(deepcopy(self.layer).double(), torch.float64)

    def save(self, folder: Path) -> Path:
        """Write the layer as a checkpoint of its model."""
        tensors = {f"model.layers.{self.case.layer}.{name}": t for name, t in self.layer.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIGS[self.case.model]))
        return folder


class Ours:
    """Our block with the weights of the saved layer."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.case = case
        config = load_model_config(folder)
        architecture = architecture_of(config)
        self.spec = architecture.spec(config).blocks[case.layer]
        with torch.device("meta"):
            self.block = Block(self.spec, torch.bfloat16)
        names = {name: f"layers.{case.layer}.{name}" for name, _ in self.block.named_buffers()}
        checkpoint = SafetensorsCheckpoint(folder)
        assert {f"model.{name}" for name in names.values()} == checkpoint.tensors.keys()
        loader = Loader(checkpoint, {name: architecture.hf_source(f"model.{name}", config) for name in names.values()})
        for name, buffer in list(self.block.named_buffers()):
            bind(self.block, name, loader.dense(names[name], buffer.dtype))

    @torch.inference_mode()
    def run(self, function: Callable[..., Tensor], x: Tensor, cut: int | None = None) -> Tensor:
        """Run `x` [1, T, D] from an empty cache, in one pass or cut in two."""
        attention, tokens = self.spec.attention, x.shape[1]
        assert attention.rope is not None
        table = rope_table(attention.rope, attention.head_dim, tokens)
        size = (1, attention.kv_heads, tokens, attention.head_dim)
        pools = torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16)
        caches = *pools, torch.zeros(1, 1, dtype=torch.int32)
        out = []
        for start, stop in ((0, tokens),) if cut is None else ((0, cut), (cut, tokens)):
            part, rope = x[:, start:stop].float(), table[None, start:stop].clone()
            if stop - start > 1:
                mark_length(part, rope)
            span = Span(torch.tensor([start]), torch.tensor([stop - start]))
            out.append(function(self.block, part, rope, span, *caches))
        return torch.cat(out, dim=1)


Layers = Callable[[str], tuple[Reference, Ours]]


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Layers:
    """A function from a case's name to transformers' layer and ours."""

    @cache
    def make(name: str) -> tuple[Reference, Ours]:
        reference = Reference(CASES[name])
        return reference, Ours(reference.save(tmp_path_factory.mktemp(name)), CASES[name])

    return make


def report(name: str, what: str, found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Print and return the largest and the mean absolute difference."""
    difference = (found.double() - expected.double()).abs()
    largest, mean = difference.max().item(), difference.mean().item()
    print(f"{name}: {what}: max {largest:.2e}, mean {mean:.2e}")
    return largest, mean


@every_case
def test_eager_block_is_transformers_layer(name: str, layers: Layers) -> None:
    reference, ours = layers(name)
    found = ours.run(Block.forward, reference.x)
    assert found.dtype == torch.float32  # the residual stream's, whatever the compute dtype
    largest, mean = report(name, "eager against transformers", found, reference.narrow)
    assert largest < MAX_ERROR
    assert mean < MEAN_ERROR
    _, ours_mean = report(name, "eager against float64", found, reference.exact)
    _, their_mean = report(name, "transformers against float64", reference.narrow, reference.exact)
    assert ours_mean <= RATIO * their_mean


@compiled_case
def test_compiled_block_is_as_near_to_float64_as_transformers(name: str, layers: Layers) -> None:
    reference, ours = layers(name)
    found = ours.run(compile_whole(Block.forward, f"parity_{name}"), reference.x)
    largest, mean = report(name, "compiled against float64", found, reference.exact)
    their_largest, their_mean = report(name, "transformers against float64", reference.narrow, reference.exact)
    assert mean <= RATIO * their_mean
    assert largest <= RATIO * their_largest


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.slow), "gemma3_sliding"])
def test_compiled_decode_is_as_near_to_float64_as_transformers(name: str, layers: Layers) -> None:
    reference, ours = layers(name)
    decode = compile_whole(Block.forward, f"parity_decode_{name}")

    def run(block: Block, x: Tensor, *rest: object) -> Tensor:
        return (decode if x.shape[1] == 1 else Block.forward)(block, x, *rest)

    last = slice(reference.case.tokens - 1, None)
    found = ours.run(run, reference.x, cut=last.start)[:, last]
    _, mean = report(name, "compiled decode against float64", found, reference.exact[:, last])
    _, their_mean = report(name, "transformers against float64", reference.narrow[:, last], reference.exact[:, last])
    assert mean <= RATIO * their_mean
