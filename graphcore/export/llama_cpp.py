"""What llama.cpp makes of the files that task=pack writes, by general.architecture.

The table was filled by trial with llama-cpp-python 0.3.36. tests/integration/test_llama_cpp_files.py repeats it: it
writes small models in the shapes that a row is about, and compares llama.cpp's logits with transformers'. llama.cpp
refuses a file with a tensor that its loader does not ask for, and ignores keys that it does not know.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from graphcore.arch.config.gguf_keys import as_float32
from graphcore.routing import SCORES

Shapes = Mapping[str, tuple[int, ...]]
Values = Mapping[str, object]
"""Metadata of a file by key; the architecture's own keys without its prefix."""

QKV = ("attn_q", "attn_k", "attn_v")
EVERYWHERE = (*QKV, "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
BIAS = re.compile(r"blk\.\d+\.(?P<module>attn_(?!.*norm)\w+|ffn_(gate|up|down))\.bias")
OUTPUT = "output.weight"
EPS = "attention.layer_norm_rms_epsilon"
WIDTHS = ("embedding_length", "attention.head_count", "attention.key_length")
WITHOUT_QUERY_RANK = (26, 27)  # layers of the DeepSeek V2 models (Lite) whose queries llama.cpp takes uncompressed


@dataclass(frozen=True)
class LlamaCppLoader:
    """What llama.cpp's loader of an architecture takes.

    Attributes:
        takes_rope_freqs: True if it reads rope_freqs.weight, which stands for Llama 3's scaling.
        biases: modules whose biases it reads.
        needs_biases: True if it refuses a file without them.
        needs_head: True if it refuses a file without output.weight.
        takes_head: False if it refuses a file with output.weight.
        any_head_dim: False if all heads together must be as wide as the embedding.
        reads_betas: True if it reads YaRN's beta_fast and beta_slow, which are 32 and 1 elsewhere.
        ignores_window: True if all layers attend to everything, whatever the file says.
        obstacles: function that yields what else it does not take.
    """

    takes_rope_freqs: bool = False
    biases: tuple[str, ...] = ()
    needs_biases: bool = False
    needs_head: bool = False
    takes_head: bool = True
    any_head_dim: bool = True
    reads_betas: bool = False
    ignores_window: bool = False
    obstacles: Callable[[Values, Shapes], Iterator[str]] | None = None


def _of_delta_rules(values: Values, _shapes: Shapes) -> Iterator[str]:
    keys, inner, heads = (_size(values, f"ssm.{key}") for key in ("state_size", "inner_size", "time_step_rank"))
    if keys != inner // heads:
        yield f"takes ssm.state_size ({keys}) as the width of values, too, which is {inner // heads}"
    if _size(values, "block_count") < _size(values, "full_attention_interval"):
        yield "crashes without a layer that attends (full_attention_interval)"
    if "rope.dimension_sections" in values and _size(values, "rope.dimension_count") < 8:
        yield "crashes with a rope.dimension_count below 8"
    if values[EPS] != as_float32(1e-6) and values[EPS] != 1e-6:
        yield f"takes {EPS} ({values[EPS]:g}) for the norms of queries and keys of delta rules, too, which have 1e-06"


def _of_deepseek(values: Values, _shapes: Shapes) -> Iterator[str]:
    if "attention.q_lora_rank" not in values and _size(values, "block_count") not in WITHOUT_QUERY_RANK:
        known = " or ".join(map(str, WITHOUT_QUERY_RANK))
        yield f"takes queries without attention.q_lora_rank only with a block_count of {known}"
    if values.get("rope.scaling.type") == "linear":
        yield "computes rope.scaling.type linear otherwise"
    if values.get("expert_gating_func") == SCORES["softmax"] and _size(values, "expert_group_count") > 1:
        yield "ranks groups of experts (expert_group_count) otherwise where shares are a softmax"


def _of_gemma2(values: Values, _shapes: Shapes) -> Iterator[str]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if not values[key]:
            yield f"divides by {key}, which is 0"


def _of_gemma4(values: Values, shapes: Shapes) -> Iterator[str]:
    features, embedding = shapes.get("per_layer_token_embd.weight"), shapes["token_embd.weight"]
    if features is not None and features[0] != embedding[0]:
        yield f"takes per_layer_token_embd.weight of {embedding[0]} rows only, and it has {features[0]}"
    slides, shared = values["attention.sliding_window_pattern"], _size(values, "attention.shared_kv_layers")
    assert isinstance(slides, tuple), "Gemma 4's files say for each layer whether it slides"
    if shared and slides[-shared - 2 : -shared] != (True, False):
        yield "crashes unless a sliding layer and a full one stand before those of attention.shared_kv_layers"


def _of_exaone(values: Values, _shapes: Shapes) -> Iterator[str]:
    if values.get("attention.sliding_window") and _size(values, "block_count") != 64:
        yield "takes attention.sliding_window only with a block_count of 64"


LOADERS: Mapping[str, LlamaCppLoader] = MappingProxyType(
    {
        "chatglm": LlamaCppLoader(biases=QKV, any_head_dim=False),
        "deepseek2": LlamaCppLoader(obstacles=_of_deepseek),
        "exaone4": LlamaCppLoader(takes_rope_freqs=True, any_head_dim=False, obstacles=_of_exaone),
        "gemma": LlamaCppLoader(takes_head=False),
        "gemma2": LlamaCppLoader(takes_head=False, obstacles=_of_gemma2),
        "gemma3": LlamaCppLoader(),
        "gemma4": LlamaCppLoader(takes_rope_freqs=True, obstacles=_of_gemma4),
        "glm4": LlamaCppLoader(biases=QKV),
        "glm4moe": LlamaCppLoader(biases=QKV),
        "gpt-oss": LlamaCppLoader(biases=EVERYWHERE, needs_biases=True, needs_head=True),
        "gpt2": LlamaCppLoader(biases=EVERYWHERE, needs_biases=True),
        "granite": LlamaCppLoader(takes_rope_freqs=True, biases=EVERYWHERE),
        "granitemoe": LlamaCppLoader(takes_rope_freqs=True, biases=EVERYWHERE),
        "lfm2": LlamaCppLoader(any_head_dim=False),
        "lfm2moe": LlamaCppLoader(any_head_dim=False),
        "llama": LlamaCppLoader(takes_rope_freqs=True, biases=EVERYWHERE, ignores_window=True),
        "mistral3": LlamaCppLoader(reads_betas=True, ignores_window=True),
        "olmo2": LlamaCppLoader(needs_head=True, any_head_dim=False),
        "phi3": LlamaCppLoader(ignores_window=True),
        "qwen2": LlamaCppLoader(biases=QKV, any_head_dim=False),
        "qwen3": LlamaCppLoader(),
        "qwen35": LlamaCppLoader(obstacles=_of_delta_rules),
        "qwen35moe": LlamaCppLoader(obstacles=_of_delta_rules),
        "qwen3moe": LlamaCppLoader(),
        "qwen3next": LlamaCppLoader(obstacles=_of_delta_rules),
        "smollm3": LlamaCppLoader(),
        "stablelm": LlamaCppLoader(biases=QKV, needs_head=True),
        "starcoder2": LlamaCppLoader(biases=EVERYWHERE, needs_biases=True, any_head_dim=False, ignores_window=True),
    }
)


def obstacles(architecture: str, metadata: Mapping[str, object], shapes: Shapes) -> Iterator[str]:
    """Yield what llama.cpp does not take of a file, or computes otherwise; each completes the sentence "llama.cpp ...".

    Args:
        architecture: general.architecture.
        metadata: values of the file's metadata, by key.
        shapes: shapes of the file's tensors in torch order, by name.
    """
    if architecture not in LOADERS:
        yield f"does not know general.architecture {architecture}"
        return
    loader, values = LOADERS[architecture], _own_values(architecture, metadata)
    if "rope_freqs.weight" in shapes and not loader.takes_rope_freqs:
        yield f"takes no rope_freqs.weight, which stands for the rope scaling, in files of {architecture}"
    modules = {match["module"]: name for name in shapes if (match := BIAS.fullmatch(name)) is not None}
    for module, name in modules.items():
        if module not in loader.biases:
            yield f"takes no {name} in files of {architecture}"
    if loader.needs_biases and not modules:
        yield f"needs biases such as blk.0.attn_output.bias in files of {architecture}"
    if loader.needs_head and OUTPUT not in shapes:
        yield f"needs {OUTPUT} in files of {architecture}, and the head is tied to the embedding"
    if not loader.takes_head and OUTPUT in shapes:
        yield f"takes no {OUTPUT} in files of {architecture}, whose head is always the embedding"
    if not loader.any_head_dim:
        width, heads, head_dim = (_size(values, key) for key in WIDTHS)
        if heads * head_dim != width:
            yield f"takes heads of {WIDTHS[0]} / {WIDTHS[1]} features in files of {architecture}, and not of {head_dim}"
    for key in ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"):
        if key in values and not loader.reads_betas:
            yield f"ignores {architecture}.{key} ({values[key]})"
    yield from loader.obstacles(values, shapes) if loader.obstacles is not None else ()


def differences(architecture: str, metadata: Mapping[str, object]) -> Iterator[str]:
    """Yield notes on what llama.cpp computes otherwise in files that it loads, as it does with published ones."""
    values, loader = _own_values(architecture, metadata), LOADERS.get(architecture, LlamaCppLoader())
    window = _size(values, "attention.sliding_window")
    if loader.ignores_window and 0 < window < _size(values, "context_length"):
        yield f"llama.cpp ignores the window of {window} tokens: it attends to all, so that longer texts differ"
    if architecture == "gpt-oss" and values.get("rope.scaling.type") == "yarn":
        yield "llama.cpp rounds the bounds of YaRN, which gpt-oss does not, so that its logits differ"


def _size(values: Values, key: str) -> int:
    """Return a number of the metadata; 0 if it is not stated, or differs by layer."""
    value = values.get(key)
    return value if isinstance(value, int) else 0


def _own_values(architecture: str, metadata: Mapping[str, object]) -> Values:
    prefix = f"{architecture}."
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
