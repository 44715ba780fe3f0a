"""How many layers of a shape a machine has room for: one with less memory measures fewer instead of refusing.

    device   resident weights, or what does not stream | keys and values | RESERVE
    RAM      streamed weights                                            | RESERVE

Bytes are those of matrices, within some percent of the plan's. A smaller shape is said in the report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Bytes of a weight; what a checkpoint of `random:bf16` stores packed is in EXPERTS and TERNARY.
WIDTHS = {"": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_k": 144 / 256, "i2_s": 2 / 8}
TABLES = {"": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_k": 0.69, "i2_s": 0.69}  # 0.69: one in q4_k, one in q6_k
EXPERTS = 17 / 32  # mxfp4
TERNARY = 2 / 8
GIB = 1 << 30
DEVICE_RESERVE = 4 * GIB  # libraries, activations, ceilings' buffers, graphs
RAM_RESERVE = 8 * GIB


@dataclass(frozen=True)
class Room:
    """Bytes that are free.

    Attributes:
        device: of the GPU, less where a fence or a budget says so.
        ram: that this process may take.
    """

    device: int
    ram: int


@dataclass(frozen=True)
class Shape:
    """The bytes of a model.

    Attributes:
        layers: number of them.
        layer: bytes of one's matrices.
        tables: bytes of embedding table and head.
        kv: bytes of one layer's keys and values for one token.
    """

    layers: int
    layer: int
    tables: int
    kv: int


def shape_of(config: Mapping[str, Any], format_name: str, is_all_dense: bool = False) -> Shape:
    """Return the bytes of a config.json in one of `random:`'s formats; all in bf16 where a peer runs it so."""
    width = 2.0 if is_all_dense else WIDTHS[format_name]
    table_width = 2.0 if is_all_dense else TABLES[format_name]
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, head_dim = config["num_key_value_heads"], config.get("head_dim") or dim // heads
    experts = config.get("num_local_experts") or 1
    is_ternary = not is_all_dense and bool(config.get("quantization_config"))
    attention = dim * head_dim * (2 * heads + 2 * kv_heads) * (TERNARY if is_ternary else width)
    mlp = 3 * dim * config["intermediate_size"] * experts
    mlp_width = EXPERTS if experts > 1 and not is_all_dense else TERNARY if is_ternary else width
    tables = (1 if config.get("tie_word_embeddings") else 2) * config["vocab_size"] * dim * table_width
    kv = 2 * kv_heads * head_dim * 2
    return Shape(config["num_hidden_layers"], round(attention + mlp * mlp_width), round(tables), kv)


def layers_that_fit(shape: Shape, room: Room, ways: Sequence[str], tokens: int, copies: float = 1.0) -> int:
    """Return how many layers a machine has room for in each of the ways, at least one.

    Args:
        ways: streaming's policies that the shape runs in: "off", "on", "auto".
        tokens: that keys and values are kept for, of all sequences together.
        copies: how often the weights are on the device at once.
    """
    kv, most = shape.kv * tokens, [shape.layers]
    device, ram = room.device - DEVICE_RESERVE, room.ram - RAM_RESERVE
    if "off" in ways:
        most.append(int((device - copies * shape.tables) // (copies * (shape.layer + kv))))
    if "on" in ways:
        most.append((ram - shape.tables) // shape.layer)
    if "auto" in ways:  # what is not on the device is in RAM
        most.append((ram + max(0, device - shape.tables)) // (shape.layer + kv))
    return max(1, min(most))
