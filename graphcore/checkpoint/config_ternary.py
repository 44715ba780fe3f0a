"""BitNet's quantization_config: how a checkpoint's ternary weights are scaled, and what of it is not computed.

Source: transformers, utils/quantization_config.py (`BitNetQuantConfig`) and integrations/bitnet.py.
"""

from typing import Literal

from graphcore.checkpoint.config_fields import Fields
from graphcore.checkpoint.quoted import quoted
from graphcore.errors import UnsupportedError

METHOD = "bitnet"
MODEL_TYPES = ("bitnet", "llama", "mistral", "qwen2", "qwen3")

TernaryScaling = Literal["divided", "multiplied", "online"]
"""weight_scale divides the ternary weight (linear_class "bitlinear"), multiplies it ("autobitlinear"), or is not there:
the weights are plain and become ternary when they are loaded ("autobitlinear" with quantization_mode "online")."""

NOT_LINEAR = ("lm_head", "embed_tokens", "norm")
"""The last part of names in modules_to_not_convert that changes nothing: these are never ternary here."""


def read_ternary_scaling(fields: Fields, model_type: str) -> TernaryScaling | None:
    """Return how the ternary weights of a checkpoint are scaled, or None if its quantization_config is not BitNet's.

    Args:
        fields: of config.json.
        model_type: of the model.

    Raises:
        UnsupportedError: a setting of the quantization_config is not computed here; the message names it.
        CheckpointError: a setting has the wrong type.
    """
    stated = fields.section("quantization_config")
    if stated.text("quant_method") != METHOD:
        return None
    if model_type not in MODEL_TYPES:
        raise UnsupportedError(
            f"{fields.source}: quant_method 'bitnet' is not supported for model_type {quoted(model_type)}; "
            f"known: {', '.join(MODEL_TYPES)}"
        )
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
        return "divided"  # its class has no online mode, whatever the file says
    if mode == "online":
        return "online"
    if fields.flag("attention_bias") or fields.flag("mlp_bias"):
        raise UnsupportedError(
            f"{fields.source}: linear_class 'autobitlinear' scales biases with the weights, which is not supported; "
            "use a checkpoint without biases"
        )
    return "multiplied"


def _keeps_the_head_alone(names: tuple[str, ...]) -> bool:
    """Return whether the head is left as it is, and no projection of a block is."""
    leaves = {name.removesuffix(".weight").rpartition(".")[2] for name in names}
    return "lm_head" in leaves and leaves <= set(NOT_LINEAR)


def _unsupported(stated: Fields, name: str, value: object) -> UnsupportedError:
    return UnsupportedError(
        f"{stated.source}: {name} is {quoted(value)}, which is not supported; use a checkpoint without it"
    )
