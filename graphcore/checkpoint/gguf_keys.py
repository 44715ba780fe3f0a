"""The keys of one GGUF architecture: full names, sizes that may be arrays, and the keys that are refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphcore.checkpoint.config_defaults import BITNET, GEMMA3_TEXT, GPT2, GPT_OSS, LLAMA, QWEN2, QWEN3, ClassDefaults
from graphcore.checkpoint.config_fields import Fields
from graphcore.checkpoint.quoted import quoted
from graphcore.errors import CheckpointError, UnsupportedError

ARCHITECTURES: Mapping[str, ClassDefaults] = {
    "llama": LLAMA,  # also Mistral, SmolLM2 and TinyLlama
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3": GEMMA3_TEXT,
    "gpt2": GPT2,
    "gpt": GPT2,
    "gpt-oss": GPT_OSS,
    "bitnet-b1.58": BITNET,  # the 2B-4T
    "bitnet-25": BITNET,  # its first upload, with a head of its own
    "bitnet": replace(BITNET, hidden_act="silu"),  # the 3B of 1bitLLM, and llama.cpp's own converter
}

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 3),  # softmax over the chosen ones' scores
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),  # a negative one is llama.cpp's "as the type says"
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""By key, the values that change nothing (llama.cpp takes 0 as unset)."""


@dataclass(frozen=True)
class GGUFKeys:
    """The metadata of one file, read under its architecture's prefix.

    Attributes:
        fields: the whole metadata.
        architecture: general.architecture, which the model's own keys start with.
        defaults: of the Hugging Face model type it corresponds to.
    """

    fields: Fields
    architecture: str
    defaults: ClassDefaults

    def name(self, key: str) -> str:
        """Return the full name of one of the architecture's keys."""
        return f"{self.architecture}.{key}"

    def size(self, key: str) -> int | None:
        """Return a size, or the one value of an array that repeats it per layer.

        Raises:
            CheckpointError: it is not a positive integer.
            UnsupportedError: it differs by layer.
        """
        name = self.name(key)
        value = self.fields.raw.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) == 0:
            return self.fields.size(name)
        if any(member != value[0] for member in value):
            raise UnsupportedError(f"{self.fields.source}: {name} differs by layer, which is not supported")
        return Fields({name: value[0]}, self.fields.source).size(name)

    def required_size(self, key: str) -> int:
        """Return a size that `check_required` has seen; see `size`."""
        value = self.size(key)
        assert value is not None, f"{key} was not checked to be there"
        return value

    def check_required(self, keys: Sequence[str]) -> None:
        """Pass if all of them are there.

        Raises:
            CheckpointError: some are not; the message names every one.
        """
        missing = [self.name(key) for key in keys if self.fields.raw.get(self.name(key)) is None]
        if missing:
            raise CheckpointError(
                f"{self.fields.source}: lacks {', '.join(missing)}; fetch the file again or convert it anew"
            )

    def refuse_unknown_mathematics(self) -> None:
        """Pass if every key that changes the mathematics is one that graphcore computes.

        Raises:
            UnsupportedError: one is not; the message names it.
        """
        for key, neutral in NEUTRAL_VALUES.items():
            value = self.fields.raw.get(self.name(key))
            is_computed = self.defaults.num_local_experts is not None and key == "expert_count"
            if value is not None and value not in neutral and not is_computed:
                raise UnsupportedError(
                    f"{self.fields.source}: {self.name(key)} is {quoted(value)}, which changes the mathematics and is "
                    "not supported; use a checkpoint without it"
                )


def gguf_keys(fields: Fields) -> GGUFKeys:
    """Return the keys of the file's architecture.

    Raises:
        CheckpointError: general.architecture is missing.
        UnsupportedError: it is not one of `ARCHITECTURES`.
    """
    architecture = fields.text("general.architecture")
    if architecture is None:
        raise CheckpointError(f"{fields.source}: lacks general.architecture; fetch the file again or convert it anew")
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{fields.source}: architecture {quoted(architecture)} is not supported; "
            f"known: {', '.join(sorted(ARCHITECTURES))}; "
            "choose a checkpoint of one of these"
        )
    return GGUFKeys(fields, architecture, ARCHITECTURES[architecture])
