"""Skeletons of transformers' decoder-only models: modules without weights, and the names of layers, table and head.

    config.json --AutoConfig--> config --from_config on the meta device--> model
        ties broken            lm_head.weight and the embedding are two parameters, so that each can be filled
        buffers made real      engine/fallback/computed_buffers.py: rotary frequencies, masks, slopes; no file has them
        layers found           the one list of as many modules as the config says there are layers

transformers' own classes do all of the mathematics, masks, positions and caches; this module knows no architecture.
Code inside a checkpoint is never run.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from graphcore.engine.fallback.computed_buffers import materialise_buffers
from graphcore.engine.fallback.config import one_line, refusing, torchs_own_defaults
from graphcore.engine.fallback.table_and_head import SlicedHead, TableEmbedding, replace_module, table_name
from graphcore.errors import ConfigError, UnsupportedError, quoted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Skeleton:
    """A transformers model whose weights are on the meta device and whose other buffers are on the CPU.

    Attributes:
        layers: name of the list of layers, such as "model.layers".
        num_layers: number of layers in the list.
        table: name of the module that embeds token ids, such as "model.embed_tokens".
        head: name of the module that makes logits, such as "lm_head".
        aliases: names that are tied together, its own included, by each name of a tied weight; any may be stored.
        attention: name of the attention implementation that runs.
    """

    model: "PreTrainedModel"
    layers: str
    num_layers: int
    table: str
    head: str
    aliases: Mapping[str, tuple[str, ...]]
    attention: str

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must hold, by name: parameters and persistent buffers."""
        weights: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        return weights

    def layer_modules(self) -> list[nn.Module]:
        """Return the layers, in order of use."""
        return list(self.model.get_submodule(self.layers).children())

    @property
    def table_weight(self) -> str:
        """Name of the weight of the embedding's table."""
        return f"{self.table}.weight"

    @property
    def head_weight(self) -> str:
        """Name of the weight of the head's matrix."""
        return f"{self.head}.weight"

    @property
    def table_module(self) -> TableEmbedding | None:
        """The embedding, if its rows can be fetched one by one; else None."""
        module = self.model.get_submodule(self.table)
        return module if isinstance(module, TableEmbedding) else None

    @property
    def sliced_head(self) -> SlicedHead | None:
        """The head, if it is computed slice by slice; else None."""
        module = self.model.get_submodule(self.head)
        return module if isinstance(module, SlicedHead) else None


def build_skeleton(config: "PreTrainedConfig", attention: str, dtype: torch.dtype, source: str) -> Skeleton:
    """Return the skeleton of a config's model.

    Args:
        config: config of the checkpoint; not changed.
        attention: "auto", or the name of an attention implementation of transformers.
        dtype: dtype of the weights; some classes keep a few of them in float32.
        source: the checkpoint's source, for messages.

    Raises:
        ConfigError: the class has no such attention implementation, or its package is not installed.
        UnsupportedError: transformers has no language model for the config or cannot make it, or its layers cannot be
            found.
    """
    import transformers

    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or config.get_text_config() is not config:
        raise UnsupportedError(
            f"{source}: transformers {transformers.__version__} has no plain language model of model_type "
            f"{quoted(config.model_type)}; choose a decoder-only model"
        )
    with refusing(source, config.model_type), torchs_own_defaults():
        model, used = _on_meta(config, attention, dtype, source)
    model.train(mode=False)
    model.requires_grad_(False)
    for name in float32_names(model, dtype):  # as from_pretrained does
        replace_parameter(model, name, torch.empty_like(model.get_parameter(name), dtype=torch.float32))
    aliases = untie(model)
    with torchs_own_defaults():
        materialise_buffers(model, source)
    layers = find_layers(model, config.num_hidden_layers, source)
    head = _slice_head(model, layers, source)
    return Skeleton(model, layers, config.num_hidden_layers, table_name(model), head, aliases, used)


def _on_meta(
    config: "PreTrainedConfig", attention: str, dtype: torch.dtype, source: str
) -> tuple["PreTrainedModel", str]:
    """Return the model on the meta device and its attention implementation; "auto" is sdpa where the class has it."""
    from transformers import AutoModelForCausalLM

    def made(implementation: str) -> "PreTrainedModel":
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call, no-any-return]
                deepcopy(config), attn_implementation=implementation, dtype=dtype
            )

    if attention == "auto":
        with suppress(ValueError, ImportError):
            return made("sdpa"), "sdpa"
        return made("eager"), "eager"
    try:
        return made(attention), attention
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"model.attention={attention} is not possible for {source}: {one_line(error)}; use model.attention=auto"
        ) from error


def float32_names(model: "PreTrainedModel", dtype: torch.dtype) -> list[str]:
    """Return the names of the parameters that the class keeps in float32 while others have `dtype`.

    Source: transformers/modeling_utils.py, PreTrainedModel._keep_in_fp32_modules: a few routers and scales.
    """
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype is not torch.float32 else set[str]()
    if dtype is torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    names = (str(name) for name, _ in model.named_parameters(remove_duplicate=False))
    return [name for name in names if any(re.search(pattern.replace("*", ".*"), name) for pattern in kept)]


def untie(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Replace tied parameters by one parameter for each name; return for each such name all names tied to it.

    A tied parameter is one meta tensor under two names: replaced under one name, it has no bytes under the other.
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
    """Replace the parameter `name` of the model by `tensor`."""
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))


def find_layers(model: nn.Module, num_layers: int, source: str) -> str:
    """Return the name of the list of the model's layers: the only one of that length that is inside no other.

    Raises:
        UnsupportedError: there is no such list or more than one, or layers share a module.
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
    """Replace the head by one in slices of at most a layer's bytes if it is a plain Linear; return its name."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # as transformers leaves it
    names = [str(name) for name, module in model.named_modules() if module is head and head is not None]
    if not names:
        raise UnsupportedError(f"{source}: {type(model).__name__} does not say which module makes its logits")
    if type(head) is nn.Linear and head.weight.numel():  # an empty one fits no file, as `match_skeleton` says
        most = max(layer_matrices_nbytes(layer) for layer in model.get_submodule(layers).children())
        replace_module(model, names[0], SlicedHead(head, most))
    return names[0]


def layer_matrices_nbytes(layer: nn.Module) -> int:
    """Return the bytes of a layer's weights of two or more dimensions."""
    return sum(weight.nbytes for weight in layer.state_dict(keep_vars=True).values() if weight.dim() > 1)
