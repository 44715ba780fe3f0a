"""Readers of a quantization_config: BitNet's states the scaling of ternary weights, bitsandbytes' can be a leftover.

Source: transformers, utils/quantization_config.py (`BitNetQuantConfig`) and integrations/bitnet.py.
"""

from graphcore.arch.config.typed_fields import Fields
from graphcore.checkpoint.ternary_checkpoint import TernaryScaling
from graphcore.errors import UnsupportedError, quoted

BITNET_METHOD = "bitnet"

NOT_LINEAR = ("lm_head", "embed_tokens", "norm")
"""Last parts of names in modules_to_not_convert that change nothing, because these modules are never ternary."""


# bitsandbytes' flags; transformers writes the latter beside the former, or alone.
LOADED = ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit")


def note_on_full_weights(fields: Fields) -> tuple[str, ...]:
    """Return a note about a quantization_config that quantises nothing, or none.

    Programs that merge or unpack bitsandbytes' weights leave it behind; transformers ignores it (quantizers/auto.py,
    `supports_quant_method`).

    Args:
        fields: settings of config.json.

    Raises:
        CheckpointError: a setting has the wrong type.
    """
    stated = fields.section("quantization_config")
    if stated.text("quant_method") != "bitsandbytes" or any(stated.flag(name) for name in LOADED):
        return ()
    return (f"{fields.source}: quantization_config is ignored: both load_in_4bit and load_in_8bit of it are off",)


def read_ternary_scaling(fields: Fields) -> TernaryScaling | None:
    """Return how the ternary weights of a checkpoint are scaled; None if its quantization_config is not BitNet's.

    Args:
        fields: settings of config.json.

    Raises:
        UnsupportedError: a setting of the quantization_config is not supported; the message names it.
        CheckpointError: a setting has the wrong type.
    """
    stated = fields.section("quantization_config")
    if stated.text("quant_method") != BITNET_METHOD:
        return None
    if stated.flag("use_rms_norm"):
        raise _unsupported(stated, "use_rms_norm", True)
    kept = stated.texts("modules_to_not_convert")
    if kept is not None and not _keeps_the_head_alone(kept):
        raise _unsupported(stated, "modules_to_not_convert", list(kept))
    linear_class = stated.text("linear_class") or "bitlinear"
    mode = stated.text("quantization_mode") or "offline"
    if linear_class not in ("bitlinear", "autobitlinear"):
        raise _unsupported(stated, "linear_class", linear_class)
    if mode not in ("offline", "online"):
        raise _unsupported(stated, "quantization_mode", mode)
    if linear_class == "bitlinear":
        return "divided"  # this class has no online mode, so quantization_mode is ignored
    if mode == "online":
        return "online"
    if fields.flag("attention_bias") or fields.flag("mlp_bias"):
        raise UnsupportedError(
            f"{fields.source}: linear_class 'autobitlinear' scales biases with the weights, which is not supported; "
            "use a checkpoint without biases"
        )
    return "multiplied"


def _keeps_the_head_alone(names: tuple[str, ...]) -> bool:
    """Return whether the head is excluded from conversion, and no projection of a block is."""
    leaves = {name.removesuffix(".weight").rpartition(".")[2] for name in names}
    return "lm_head" in leaves and leaves <= set(NOT_LINEAR)


def _unsupported(stated: Fields, name: str, value: object) -> UnsupportedError:
    return UnsupportedError(
        f"{stated.source}: {name} is {quoted(value)}, which is not supported; use a checkpoint without it"
    )
