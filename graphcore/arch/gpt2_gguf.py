"""The tensors that a GGUF file of the GPT-2 family must have, and the check of a file against them.

    token_embd  [D, V]     position_embd  [D, P]     output_norm  [D] + bias     output  [D, V], absent where it is tied
    blk.N.  attn_norm  [D] + bias    attn_qkv  [D, 3D] + bias    attn_output  [D, D] + bias
            ffn_norm   [D] + bias    ffn_up    [D, F] + bias     ffn_down     [F, D] + bias

Shapes here and in messages are the file's (ne order: inputs, then outputs); torch has them reversed. Any encoding will
do for any tensor: norms and biases are stored dense, matrices and both embedding tables packed or dense.

Legend: D model dim, F hidden dim of the MLP, P positions, V vocab, N layer.
Source: llama.cpp, gguf-py/gguf/constants.py, MODEL_TENSORS[MODEL_ARCH.GPT2].
"""

from collections.abc import Iterable, Mapping

from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.checkpoint.quoted import quoted
from graphcore.errors import CheckpointError

OPTIONAL = "output.weight"
SHOWN = 4  # names of tensors in one message

Shape = tuple[int, ...]


def gpt2_tensors(config: ModelConfig, num_layers: int) -> dict[str, Shape]:
    """Return the name and shape (ne order) of every tensor, `output.weight` included, in the order of their use."""
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


def check_gpt2_tensors(checkpoint: Checkpoint, config: ModelConfig, num_layers: int) -> None:
    """Return if the file has GPT-2's tensors, all of them and no other, each of the shape that its metadata asks for.

    Args:
        num_layers: that the file says it has.

    Raises:
        CheckpointError: it does not; names are checked first, then whether one is missing, then shapes.
    """
    expected = gpt2_tensors(config, num_layers)
    found = {name: tuple(reversed(info.shape)) for name, info in checkpoint.tensors.items()}
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        raise CheckpointError(
            f"{checkpoint.source}: Invalid GPT tensor name: {_listed(unknown)}; a GPT-2 file of {num_layers} layers "
            f"has {_known(expected)}; convert the model anew, and merge adapters first"
        )
    missing = [name for name in expected if name not in found and name != OPTIONAL]
    if missing:
        raise CheckpointError(
            f"{checkpoint.source}: Missing required tensor: {_listed(missing)}; the file is incomplete or is no GPT-2 "
            "model, fetch it again or convert it anew"
        )
    _check_shapes(found, expected, checkpoint.source)


def _check_shapes(found: Mapping[str, Shape], expected: Mapping[str, Shape], source: str) -> None:
    for name, shape in expected.items():
        if name in found and found[name] != shape:
            raise CheckpointError(
                f"{source}: Shape mismatch for {name}: expected {list(shape)}, got {list(found[name])} (inputs first); "
                "metadata and weights are of different models, convert the model anew"
            )


def _listed(names: list[str]) -> str:
    """Return the first few names, printable, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(quoted(name)[1:-1] for name in names[:SHOWN]) + more


def _known(expected: Iterable[str]) -> str:
    """Return the names that are right: "token_embd, ..., blk.N.(attn_norm, ...)", weights and biases alike."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name in expected)
    leaves = dict.fromkeys(name.split(".", 2)[2] for name in modules if name.startswith("blk."))
    return ", ".join([*(name for name in modules if "." not in name), f"blk.N.({', '.join(leaves)})"])
