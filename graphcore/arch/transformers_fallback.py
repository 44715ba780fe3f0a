"""Any decoder-only architecture of transformers as a skeleton: modules without weights, and where their layers are.

    config.json --AutoConfig--> config --from_config on the meta device--> model
        ties broken            lm_head.weight and the embedding are two parameters, so that each can be filled
        buffers made real      arch/skeleton_buffers.py: rotary frequencies, masks, slopes; no file has them
        layers found           the one list of as many modules as the config says there are layers

transformers' own classes do all of the mathematics, masks, positions and caches; nothing here knows an architecture.
Code that a checkpoint brings along is never run.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from graphcore.arch.skeleton_buffers import materialise_buffers
from graphcore.arch.skeleton_ends import SlicedHead, TableEmbedding, replace_module, table_name
from graphcore.checkpoint.quoted import quoted
from graphcore.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Skeleton:
    """A transformers model whose weights are on the meta device and whose other buffers are on the CPU.

    Attributes:
        layers: name of the list of layers, such as "model.layers".
        num_layers: how many it holds.
        table: name of the module that token ids go to, such as "model.embed_tokens".
        head: name of the module that makes logits, such as "lm_head".
        aliases: name of a weight to the names that the model ties it to; any of them may be the one that is stored.
        attention: the attention implementation that runs.
    """

    model: "PreTrainedModel"
    layers: str
    num_layers: int
    table: str
    head: str
    aliases: Mapping[str, tuple[str, ...]]
    attention: str

    def weights(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold, by name: parameters and persistent buffers."""
        weights: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        return weights

    def layer_modules(self) -> list[nn.Module]:
        """Return the layers, in order of use."""
        return list(self.model.get_submodule(self.layers).children())

    @property
    def table_weight(self) -> str:
        """Name of the embedding's table."""
        return f"{self.table}.weight"

    @property
    def head_weight(self) -> str:
        """Name of the head's matrix."""
        return f"{self.head}.weight"

    @property
    def table_module(self) -> TableEmbedding | None:
        """The embedding, if its rows can be fetched one by one."""
        module = self.model.get_submodule(self.table)
        return module if isinstance(module, TableEmbedding) else None

    @property
    def sliced_head(self) -> SlicedHead | None:
        """The head, if it is computed slice by slice."""
        module = self.model.get_submodule(self.head)
        return module if isinstance(module, SlicedHead) else None


def read_transformers_config(folder: Path) -> "PreTrainedConfig":
    """Return transformers' own reading of a folder's config.json.

    Raises:
        UnsupportedError: transformers does not know the model type, or finds the settings contradictory.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError, StrictDataclassError) as error:
        raise UnsupportedError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} cannot run it ({one_line(error)}); "
            "choose a checkpoint of an architecture that is part of transformers"
        ) from error
    assert isinstance(config, transformers.PreTrainedConfig), f"AutoConfig gave {type(config).__name__}"
    return config


def build_skeleton(config: "PreTrainedConfig", attention: str, dtype: torch.dtype, source: str) -> Skeleton:
    """Return the model of a config.

    Args:
        config: of the checkpoint; left as it is.
        attention: "auto", or the implementation that transformers is asked for by name.
        dtype: of the weights; some classes keep a few of them in float32.
        source: of the checkpoint, for messages.

    Raises:
        ConfigError: the class has no such attention implementation, or its package is not installed.
        UnsupportedError: transformers has no language model for the config, or none whose layers can be found.
    """
    import transformers

    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or config.get_text_config() is not config:
        raise UnsupportedError(
            f"{source}: transformers {transformers.__version__} has no plain language model of model_type "
            f"{quoted(config.model_type)}; choose a decoder-only model"
        )
    model, used = _on_meta(config, attention, dtype, source)
    model.train(mode=False)
    model.requires_grad_(False)
    _keep_in_float32(model, dtype)
    aliases = untie(model)
    materialise_buffers(model, source)
    layers = find_layers(model, config.num_hidden_layers, source)
    head = _slice_head(model, layers, source)
    return Skeleton(model, layers, config.num_hidden_layers, table_name(model), head, aliases, used)


def _on_meta(
    config: "PreTrainedConfig", attention: str, dtype: torch.dtype, source: str
) -> tuple["PreTrainedModel", str]:
    """Return the model without weights, and its attention implementation; "auto" is sdpa where the class has it."""
    from transformers import AutoModelForCausalLM

    wanted = ("sdpa", "eager") if attention == "auto" else (attention,)
    for implementation in wanted:
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # as transformers leaves it
                    deepcopy(config), attn_implementation=implementation, dtype=dtype
                )
        except (ValueError, ImportError) as error:
            refusal = error
        else:
            return model, implementation
    raise ConfigError(
        f"model.attention={attention} is not possible for {source}: {one_line(refusal)}; use model.attention=auto"
    ) from refusal


def _keep_in_float32(model: "PreTrainedModel", dtype: torch.dtype) -> None:
    """Give weights that the class wants in float32 that dtype, as from_pretrained does.

    Source: transformers/modeling_utils.py, PreTrainedModel._keep_in_fp32_modules: a few routers and scales.
    """
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype is not torch.float32 else set[str]()
    if dtype is torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if any(re.search(pattern.replace("*", ".*"), name) for pattern in kept):
            replace_parameter(model, name, torch.empty_like(parameter, dtype=torch.float32))


def untie(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Make every name of a parameter a parameter of its own; return the names that were one, by each of them.

    A tied parameter is one tensor under two names: filled under one name, it stays without bytes under the other.
    """
    tied: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied[id(parameter)].append(name)
    aliases = {}
    for names in tied.values():
        for name in names[1:]:
            replace_parameter(model, name, torch.empty_like(model.get_parameter(name)))
        aliases.update({name: tuple(names) for name in names if len(names) > 1})
    return aliases


def replace_parameter(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Make the parameter `name` of the model be `tensor`."""
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))


def find_layers(model: nn.Module, num_layers: int, source: str) -> str:
    """Return the name of the list that holds the model's layers: the only one of that length, inside no other.

    Raises:
        UnsupportedError: there is none, or more than one, or layers share a module.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    fitting = [name for name in outer if len(lists[name]) == num_layers]
    if len(fitting) != 1:
        raise UnsupportedError(
            f"{source}: {type(model).__name__} has {len(fitting)} lists of {num_layers} layers, so it is not known "
            "what runs in order; model.fallback=transformers needs a decoder with one list of layers"
        )
    modules = [id(part) for layer in lists[fitting[0]] for part in layer.modules()]
    if len(set(modules)) < len(modules):
        raise UnsupportedError(f"{source}: layers of {type(model).__name__} share modules; such a model does not run")
    return str(fitting[0])


def _slice_head(model: "PreTrainedModel", layers: str, source: str) -> str:
    """Return the name of the head, replaced by one in slices of at most a layer's bytes if it is a plain Linear."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # as transformers leaves it
    names = [str(name) for name, module in model.named_modules() if module is head and head is not None]
    if not names:
        raise UnsupportedError(f"{source}: {type(model).__name__} does not say which module makes its logits")
    if type(head) is nn.Linear:
        most = max(matrices_nbytes(layer) for layer in model.get_submodule(layers).children())
        replace_module(model, names[0], SlicedHead(head, most))
    return names[0]


def matrices_nbytes(layer: nn.Module) -> int:
    """Return the bytes of a layer's weights that are no vectors."""
    return sum(weight.nbytes for weight in layer.state_dict(keep_vars=True).values() if weight.dim() > 1)


def one_line(error: BaseException) -> str:
    """Return the beginning of an error's text on one line."""
    text = " ".join(str(error).split())
    return text[:200]
