"""GPT-2: LayerNorm with bias, learned positions, fused qkv, plain GELU MLP.

Hugging Face stores projections by input row (Conv1D), GGUF by output row. Both fuse q, k and v, in this order.

A GGUF file must have these tensors and no others:

    token_embd  [D, V]     position_embd  [D, P]     output_norm  [D] + bias     output  [D, V], absent if tied
    blk.N.  attn_norm  [D] + bias    attn_qkv  [D, 3D] + bias    attn_output  [D, D] + bias
            ffn_norm   [D] + bias    ffn_up    [D, F] + bias     ffn_down     [F, D] + bias

Shapes here and in messages are those of the file (ne order: inputs, then outputs); torch reverses them. Every tensor
may have any encoding; norms and biases are dense in memory, matrices and both embedding tables packed or dense.

Legend: D model dim, F hidden dim of the MLP, P positions, V vocab, N layer.
Source: llama.cpp, gguf-py/gguf/constants.py, MODEL_TENSORS[MODEL_ARCH.GPT2].
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import GGUFKeys
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.folds import Fold, PickRows, Transpose
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.errors import CheckpointError, quoted
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec

HF_LEAVES = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "embed_tokens": "wte",
    "norm": "ln_f",
    "lm_head": "lm_head",
}
GGUF_LEAVES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
POSITIONS = "embed_tokens.positions"
BY_INPUT_ROW = (*QKV, "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
OPTIONAL = "output.weight"
SHOWN = 4  # number of tensor names in one message

Shape = tuple[int, ...]


class GPT2(Architecture):
    """The architecture of GPT-2, the only family here with learned positions."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: LayerNorm, biases everywhere, an MLP without gate."""
        norm = NormSpec("layer", config.norm_eps)
        heads, head_dim = config.attention.num_attention_heads, config.attention.head_dim
        attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, qkv_bias=True, output_bias=True)
        mlp = MLPSpec(config.intermediate_size, config.hidden_act, gated=False, bias=True)
        block = BlockSpec(config.hidden_size, norm, attention, mlp, int8_activations=config.ternary)
        return ModelSpec(
            dim=config.hidden_size,
            vocab=config.vocab_size,
            blocks=(block,) * config.num_hidden_layers,
            norm=norm,
            context=config.max_position_embeddings,
            positions=config.max_position_embeddings,
            tied=config.tie_word_embeddings,
        )

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under GPT-2's own name; Conv1D weights are transposed."""
        if name == POSITIONS:
            return TensorSource("wpe.weight")
        index, leaf = split_layer(name)
        module, _, parameter = leaf.rpartition(".")
        stored = f"{'attn.c_attn' if module in QKV else HF_LEAVES[module]}.{parameter}"
        transposes = (Transpose(),) if module in BY_INPUT_ROW and parameter == "weight" else ()
        prefix = "" if index is None else f"h.{index}."
        return TensorSource(prefix + stored, (*transposes, *_rows_of(module, config)))

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name; q, k and v are rows of one tensor."""
        if name == POSITIONS:
            return TensorSource("position_embd.weight")
        leaves = {**GGUF_LEAVES, **dict.fromkeys(QKV, "attn_qkv")}
        module = split_layer(name)[1].rpartition(".")[0]
        return TensorSource(gguf_name(name, leaves), _rows_of(module, config))

    def check_gguf(self, checkpoint: Checkpoint, config: ModelConfig, num_layers: int) -> None:
        """Check that the file has exactly GPT-2's tensors, with the shapes that its metadata implies.

        Unknown names are reported first, then missing tensors, then wrong shapes.
        """
        expected = gpt2_tensors(config, num_layers)
        found = {name: tuple(reversed(info.shape)) for name, info in checkpoint.tensors.items()}
        unknown = sorted(found.keys() - expected.keys())
        if unknown:
            raise CheckpointError(
                f"{checkpoint.source}: Invalid GPT tensor name: {_listed(unknown)}; a GPT-2 file of {num_layers} "
                f"layers has {_known(expected)}; convert the model anew, and merge adapters first"
            )
        missing = [name for name in expected if name not in found and name != OPTIONAL]
        if missing:
            raise CheckpointError(
                f"{checkpoint.source}: Missing required tensor: {_listed(missing)}; the file is incomplete or is no "
                "GPT-2 model, fetch it again or convert it anew"
            )
        _check_shapes(found, expected, checkpoint.source)

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with the vocabulary size of the metadata, which the tensors are checked against."""
        return replace(config, vocab_size=keys.size("vocab_size") or config.vocab_size)


def _rows_of(module: str, config: ModelConfig) -> tuple[Fold, ...]:
    """Return the fold that picks q, k or v out of the fused projection; none for other modules."""
    if module not in QKV:
        return ()
    part = QKV.index(module)
    return (PickRows(part * config.hidden_size, (part + 1) * config.hidden_size),)


def gpt2_tensors(config: ModelConfig, num_layers: int) -> dict[str, Shape]:
    """Return the shape (ne order) of every tensor by name, `output.weight` included, in the order of use."""
    dim, hidden, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    block = {
        "attn_norm": (dim,),
        "attn_qkv": (dim, 3 * dim),
        "attn_output": (dim, dim),
        "ffn_norm": (dim,),
        "ffn_up": (dim, hidden),
        "ffn_down": (hidden, dim),
    }
    shapes: dict[str, Shape] = {
        "token_embd.weight": (dim, vocab),
        "position_embd.weight": (dim, config.max_position_embeddings),
    }
    for layer in range(num_layers):
        for leaf, shape in block.items():
            shapes[f"blk.{layer}.{leaf}.weight"] = shape
            shapes[f"blk.{layer}.{leaf}.bias"] = shape[-1:]
    return {**shapes, "output_norm.weight": (dim,), "output_norm.bias": (dim,), OPTIONAL: (dim, vocab)}


def _check_shapes(found: Mapping[str, Shape], expected: Mapping[str, Shape], source: str) -> None:
    for name, shape in expected.items():
        if name in found and found[name] != shape:
            raise CheckpointError(
                f"{source}: Shape mismatch for {name}: expected {list(shape)}, got {list(found[name])} (inputs first); "
                "metadata and weights are of different models, convert the model anew"
            )


def _listed(names: list[str]) -> str:
    """Return the first few names, printable, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(quoted(name)[1:-1] for name in names[:SHOWN]) + more


def _known(expected: Iterable[str]) -> str:
    """Return the valid names, without ".weight" and ".bias": "token_embd, ..., blk.N.(attn_norm, ...)"."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name in expected)
    leaves = dict.fromkeys(name.split(".", 2)[2] for name in modules if name.startswith("blk."))
    return ", ".join([*(name for name in modules if "." not in name), f"blk.N.({', '.join(leaves)})"])


GPT_2 = GPT2(
    ClassDefaults(
        model_type="gpt2",
        window_rule="none",
        bias_rule="everywhere",
        vocab_size=50_257,
        hidden_size=768,
        intermediate_size=None,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=None,
        max_position_embeddings=1024,
        norm_eps=1e-5,
        hidden_act="gelu_new",
        tie_word_embeddings=True,
        bos_token_id=50_256,
        eos_token_ids=(50_256,),
        has_rope=False,
        has_layer_norm=True,
        own_names={
            "hidden_size": ("n_embd",),
            "intermediate_size": ("n_inner",),
            "num_hidden_layers": ("n_layer",),
            "num_attention_heads": ("n_head",),
            "max_position_embeddings": ("n_positions", "n_ctx"),
            "hidden_act": ("activation_function",),
        },
        required=("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    ),
    gguf_names=("gpt2", "gpt"),
    hf_prefixes=("", "transformer."),
    ignored=(".attn.bias", ".attn.masked_bias"),
)
