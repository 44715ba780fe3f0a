"""The reader of PEFT's LoRA adapters: a folder with adapter_config.json and adapter_model.safetensors.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight            [R, I]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight    [O, R]; old versions wrote ".default"

The product of a module is scaled by alpha / R, with use_rslora by alpha / sqrt(R). rank_pattern and alpha_pattern set
R and alpha of some modules. The tensors decide which modules have an adapter. What the config says about training
alone is ignored, and so is fan_in_fan_out: B A is [O, I] in any case, and whether the matrix is stored by input row is
known from the model. A setting that changes the mathematics otherwise is refused.

Source: peft 0.21, tuners/lora/config.py, tuners/lora/model.py (`_create_and_replace`), utils/save_and_load.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from types import MappingProxyType

from graphcore.checkpoint.adapter import MERGE, Adapter, paired, refuse_experts
from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.file_bytes import file_names, is_folder
from graphcore.checkpoint.file_kind import kind_of, refusal
from graphcore.checkpoint.json_object import read_json_object
from graphcore.checkpoint.model_file_names import ADAPTER_CONFIG, ADAPTER_PREFIX, PICKLE_SUFFIXES
from graphcore.checkpoint.safetensors_file import read_safetensors_header
from graphcore.errors import CheckpointError, CheckpointNotFoundError, UnsupportedError, quoted

ADAPTER_NAME = "adapter_model.safetensors"
WRAPPER = "base_model.model."
LARGEST_NUMBER = 1e30  # of a config's ranks and alphas, far from the limits of float32
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(\.(?!weight$|bias$)[^.]+)?\.weight", re.DOTALL)
# Settings that change what an adapter computes, if they are not empty: name to what they are.
CHANGES: Mapping[str, str] = MappingProxyType(
    {
        "use_dora": "DoRA",
        "use_qalora": "QALoRA",
        "use_bdlora": "block-diagonal factors",
        "alora_invocation_tokens": "activated LoRA",
        "arrow_config": "routing between adapters",
        "kasa_config": "KaSA",
        "monteclora_config": "MonteCLoRA",
        "layer_replication": "replicated layers",
        "target_parameters": "factors of parameters, which are experts",
        "trainable_token_indices": "changed rows of the embedding",
        "modules_to_save": "whole modules beside the factors",
    }
)
# Initialisations that leave the base model as it is; others, such as PiSSA, subtract the initial factors from it.
KEEP_BASE = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraConfig:
    """The settings of adapter_config.json that say what an adapter computes.

    Attributes:
        ranks, alphas: values of modules by patterns of their names; `rank` and `alpha` are those of all others.
        is_stabilised: True if products are scaled by alpha / sqrt(R) rather than alpha / R.
    """

    rank: float
    alpha: float
    ranks: Mapping[str, float]
    alphas: Mapping[str, float]
    is_stabilised: bool

    def scale(self, module: str, rank: int, source: str) -> float:
        """Return the factor of a module's product.

        Args:
            rank: rank R of its factors.
            source: name of the config, for messages.

        Raises:
            CheckpointError: the config states another rank.
        """
        stated = _of_module(self.ranks, module, self.rank, source)
        if stated != rank:
            raise CheckpointError(
                f"{source}: says rank {stated:g} for {quoted(module)}, whose factors have rank {rank}; config and "
                "weights are of different adapters"
            )
        alpha = _of_module(self.alphas, module, self.alpha, source)
        return alpha / (sqrt(rank) if self.is_stabilised else rank)


def read_peft_adapter(path: Path) -> Adapter:
    """Return the adapter in a folder, or of a safetensors file with its adapter_config.json beside it.

    Raises:
        CheckpointNotFoundError: the path, the config or the weights are missing.
        UnsupportedError: the adapter is of another kind than LoRA, or a variant that is not supported.
        CheckpointError: config and weights are damaged or contradict each other.
    """
    folder, weights = _files(path)
    source = str(folder / ADAPTER_CONFIG)
    config = _read_config(read_json_object(folder / ADAPTER_CONFIG), source)
    tensors, identity = read_safetensors_header(weights)
    factors = list(_factors(tensors, str(weights)))
    fitting = paired(str(weights), factors, {module: 1.0 for module, _, _ in factors})
    pairs = tuple(replace(pair, scale=config.scale(pair.module, pair.rank, source)) for pair in fitting)
    return Adapter(str(path), "hf", "", pairs, MappingProxyType({weights: identity}))


def _files(path: Path) -> tuple[Path, Path]:
    """Return the folder of the config, and the file of the weights."""
    folder = path if is_folder(path) else path.parent
    names = file_names(folder)
    if ADAPTER_CONFIG not in names:
        raise CheckpointNotFoundError(
            f"{path}: has no {ADAPTER_CONFIG}; an adapter is PEFT's folder with {ADAPTER_CONFIG} and {ADAPTER_NAME}, "
            "or a GGUF file"
        )
    if path != folder:
        return folder, path
    pickled = [name for name in names if name.startswith(ADAPTER_PREFIX) and name.endswith(PICKLE_SUFFIXES)]
    if ADAPTER_NAME not in names and pickled:
        raise refusal(folder / pickled[0], kind_of(folder / pickled[0]))
    if ADAPTER_NAME not in names:
        raise CheckpointNotFoundError(f"{path}: has no {ADAPTER_NAME}; fetch the adapter again")
    return folder, folder / ADAPTER_NAME


def _read_config(raw: Mapping[str, object], source: str) -> LoraConfig:
    if raw.get("peft_type") != "LORA":
        raise UnsupportedError(
            f"{source}: peft_type is {quoted(raw.get('peft_type'))}, and only LORA adapters are read; {MERGE}"
        )
    for key, what in CHANGES.items():
        if raw.get(key):
            raise UnsupportedError(f"{source}: has {what} ({key}), which is not supported; {MERGE}")
    init = raw.get("init_lora_weights", True)
    if init not in KEEP_BASE:
        raise UnsupportedError(
            f"{source}: init_lora_weights={quoted(init)} begins with another base model than the stored one; save the "
            "adapter as plain LoRA (PEFT's path_initial_model_for_weight_conversion), or merge it"
        )
    return LoraConfig(
        rank=_number(raw, "r", 8, source),
        alpha=_number(raw, "lora_alpha", 8, source),
        ranks=_pattern(raw, "rank_pattern", source),
        alphas=_pattern(raw, "alpha_pattern", source),
        is_stabilised=_flag(raw, "use_rslora", source),
    )


def _number(raw: Mapping[str, object], key: str, otherwise: float, source: str) -> float:
    """Return a finite number of the config, or PEFT's default where it is absent."""
    value = raw.get(key, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST_NUMBER:
        raise CheckpointError(f"{source}: {key} is {quoted(value)}, not a number; save the adapter again")
    return value


def _flag(raw: Mapping[str, object], key: str, source: str) -> bool:
    """Return a boolean of the config, False where it is absent."""
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"{source}: {key} is {quoted(value)}, not true or false; save the adapter again")
    return value


def _pattern(raw: Mapping[str, object], key: str, source: str) -> Mapping[str, float]:
    """Return the numbers of a pattern, by regular expressions of modules' names."""
    found = raw.get(key) or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{source}: {key} is {quoted(found)}, not an object; save the adapter again")
    return {name: _number(found, name, 0, f"{source}: {key}") for name in found}


def _of_module(pattern: Mapping[str, float], module: str, otherwise: float, source: str) -> float:
    """Return the number of the first pattern that matches the end of a module's name; else the one of all others."""
    for key, value in pattern.items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error as error:
            raise CheckpointError(f"{source}: the pattern {quoted(key)} is no regular expression ({error})") from error
    return otherwise


def _factors(tensors: Mapping[str, TensorInfo], source: str) -> Iterator[tuple[str, str, TensorInfo]]:
    """Yield module, "A" or "B", and description of each factor; refuse every other tensor."""
    for name, info in tensors.items():
        match = FACTOR.fullmatch(name.removeprefix(WRAPPER))
        if match is None:
            raise UnsupportedError(f"{source}: tensor {quoted(name)} {_what_else(name.split('.'))}; {MERGE}")
        refuse_experts(source, match["module"])
        if not DENSE_DTYPES[info.encoding].is_floating_point:
            raise CheckpointError(f"{source}: tensor {quoted(name)} holds {info.encoding}, not weights")
        yield match["module"], match["which"], info


def _what_else(parts: Sequence[str]) -> str:
    """Return what a tensor is that is no factor of a matrix, from the parts of its name."""
    if any(part.startswith("lora_embedding") for part in parts):
        return "changes the embedding, which adapters here cannot"
    if "lora_magnitude_vector" in parts:
        return "is a magnitude of DoRA, which is not supported"
    if parts[-1] == "bias":
        return "is a bias, which adapters here cannot change"
    return "is no LoRA factor of a matrix"
