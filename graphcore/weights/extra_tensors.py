"""Stored tensors that no weight of the model uses: refused if results could be wrong without them, else noted.

in a layer             refused, except buffers that old versions stored (rotary tables, causal masks)
outside all layers     refused if it looks like an adapter, a bias or a scale of the model, or lies inside the model;
                       else noted: a value head, a counter, an optimizer's state
"""

import re
from collections.abc import Collection, Sequence

from graphcore.arch.architecture import Architecture
from graphcore.arch.checkpoint_config import ROPE_TENSORS
from graphcore.arch.config.model_config import ModelConfig
from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.errors import CheckpointError
from graphcore.quant.format_choice import HEAD

GGUF_IGNORED = ROPE_TENSORS  # read with the config, not as a weight
PREDICTION = "multi-token prediction"  # name of the part that layers behind the last one are
SHOWN = 4  # number of tensor names in one message

_BUFFER = re.compile(r"(.*\.)?(masked_bias|causal_mask|position_ids|(original_)?inv_freq|(cos|sin)_cached)")
_ADAPTER = re.compile(
    r"lora|adapter|dora|loha|lokr|hada_|vera_|ia3|oft_|prompt|prefix|modules_to_save|original_module|base_layer"
)
_CHANGE = re.compile(
    r"bias|scale|shift|zero|gain|gamma|beta|alpha|temperature|multiplier|softcap|quant|qweight|absmax|g_idx|scb"
)
_PREDICTS = re.compile(r"(.*\.)?(nextn|eh_proj|enorm|hnorm|shared_head)\..*")  # what only a prediction layer has
_OTHER_HEAD = re.compile(r"(?!lm_head)(\w*_)?(head|heads|score|classifier|critic|reward|value)s?")
_OF_THE_MODEL = re.compile(r"embed|norm|proj|ln_|_ln|layer|wte|wpe|position|token|attn|mlp")


def refuse_unexpected(
    architecture: Architecture, config: ModelConfig, checkpoint: Checkpoint, used: Collection[str], stored_layers: int
) -> None:
    """Refuse stored tensors without which results would be wrong: an adapter, a bias, a norm, a layer of the trunk.

    Args:
        used: names of the stored tensors that weights use.
        stored_layers: number of layers in the checkpoint; `config` may ask for only the first ones.

    Raises:
        CheckpointError: there are such tensors.
    """
    extra = _extra(architecture, config, checkpoint, used)
    left_out = range(config.num_hidden_layers, stored_layers + config.num_predicting_layers)
    _refuse_left_out_trunk(checkpoint, extra, stored_layers, left_out.stop)
    harmless = harmless_tensors(checkpoint, used, extra)
    unexpected = [name for name in extra if name not in harmless and not _is_of_layers(name, left_out)]
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.source}: unexpected tensor {listed(unexpected)}, which a {config.model_type} model does not "
            f"have; {cause_of_unexpected(unexpected, left_out.stop, checkpoint.layout)}"
        )


def _refuse_left_out_trunk(checkpoint: Checkpoint, extra: Collection[str], stored_layers: int, end: int) -> None:
    """Refuse layers that the counts leave out as multi-token prediction, and that hold no tensor of it.

    Args:
        extra: names of stored tensors that no weight uses.
        stored_layers: number of layers of the trunk, as the config counts them.
        end: number of these and of the prediction layers behind them.
    """
    predicting = {layer_of(name) for name in extra if _PREDICTS.fullmatch(name)}
    for layer in range(stored_layers, end):
        of_layer = [name for name in extra if layer_of(name) == layer]
        if of_layer and layer not in predicting:
            count, added, part = (
                ("num_hidden_layers", "num_nextn_predict_layers", "eh_proj")
                if checkpoint.layout == "hf"
                else ("block_count", "nextn_predict_layers", "nextn.*")
            )
            counted = stored_layers if checkpoint.layout == "hf" else end
            raise CheckpointError(
                f"{checkpoint.source}: {count} {counted} and {added} {end - stored_layers} leave layer {layer} out as "
                f"multi-token prediction, but it holds {listed(of_layer)} and no {part}: it is a layer of the model; "
                f"correct {added} (0 for none) or {count}, or take config and weights from the same model"
            )


def cause_of_unexpected(names: Collection[str], num_layers: int, layout: str) -> str:
    """Return why a model has no place for stored tensors, and what to do.

    Args:
        names: names of the stored tensors.
        num_layers: number of layers that the config states.
        layout: layout of the checkpoint, "hf" or "gguf".
    """
    layers = [layer_of(name) for name in names]
    if min(layers) >= num_layers:
        stated = "num_hidden_layers in config.json" if layout == "hf" else "block_count"
        return (
            f"{stated} says {num_layers} layers, the weights have {1 + max(layers)}: "
            "correct it, or take both from the same model"
        )
    return "the files are of another architecture or have adapters that must be merged first"


def notes_on_unused(
    architecture: Architecture, config: ModelConfig, checkpoint: Checkpoint, used: Collection[str], stored_layers: int
) -> tuple[str, ...]:
    """Return notes on the parts of a checkpoint that the model does not use.

    Args:
        used: names of the stored tensors that weights use.
        stored_layers: number of layers in the checkpoint; `config` may ask for only the first ones.
    """
    found = dict.fromkeys((*architecture.unused.values(), PREDICTION), 0)
    predicting = range(stored_layers, stored_layers + config.num_predicting_layers)
    for name in checkpoint.tensors:
        parts_of = {part for substring, part in architecture.unused.items() if substring in name}
        if not parts_of and _is_of_layers(name, predicting):
            parts_of = {PREDICTION}
        for part in parts_of:
            found[part] += 1
    parts = [f"{part} ({count} tensor{'s' * (count > 1)})" for part, count in found.items() if count]
    harmless = harmless_tensors(checkpoint, used, _extra(architecture, config, checkpoint, used))
    return notes_on_files(checkpoint, [*parts, *([listed(harmless)] if harmless else [])])


def notes_on_files(checkpoint: Checkpoint, left_out: Sequence[str]) -> tuple[str, ...]:
    """Return the checkpoint's own notes, and notes about parts and contradictions that concern no needed tensor."""
    notes = [f"left out of the checkpoint: {' and '.join(left_out)}"] if left_out else []
    if checkpoint.faults:
        names = listed(sorted(checkpoint.faults))
        notes.append(
            f"files of the checkpoint contradict each other about tensors that the model does not need: {names}"
        )
    return (*checkpoint.notes, *notes)


def harmless_tensors(checkpoint: Checkpoint, used: Collection[str], extra: Collection[str]) -> list[str]:
    """Return the extra tensors without which results are the same, as far as names and types tell.

    The list is always empty for GGUF files, because llama.cpp refuses every extra tensor.

    Args:
        used: names of the stored tensors that weights use.
        extra: names of stored tensors that no weight uses.
    """
    if checkpoint.layout != "hf":
        return []
    layers = {match[1] for name in used if (match := re.match(r"(.*?\.)\d+\.", name)) is not None}
    modules = {name.rpartition(".")[0] + "." for name in used if not name.startswith(tuple(layers))}
    inside = {f"{place.rstrip('.').rpartition('.')[0]}." for place in layers} - {"."}
    infos = [checkpoint.tensors[name] for name in extra]
    return [
        info.name
        for info in infos
        if _BUFFER.fullmatch(info.name)
        or checkpoint.is_zero_bias(info.name)
        or (not info.name.startswith((*layers, *modules)) and _changes_nothing(info, tuple(inside), extra))
    ]


def _changes_nothing(info: TensorInfo, inside: tuple[str, ...], extra: Collection[str]) -> bool:
    """Return whether a tensor outside all layers and modules of a model is no part of the model.

    Args:
        inside: prefixes of the names of everything before the head.
    """
    module, _, leaf = info.name.rpartition(".")
    is_of_a_module = f"{module}.weight" in extra  # an unused module may have its own bias
    if _ADAPTER.search(info.name.lower()) or (_CHANGE.search(leaf.lower()) and not is_of_a_module):
        return False
    if any(_OTHER_HEAD.fullmatch(part) for part in info.name.split(".")):
        return True
    if info.shape in ((), (1,)) or not info.encoding.startswith(("f", "bf")):
        return True  # a counter or a table
    return not info.name.startswith(inside) and _OF_THE_MODEL.search(info.name) is None


def _extra(architecture: Architecture, config: ModelConfig, checkpoint: Checkpoint, used: Collection[str]) -> list[str]:
    """Return the names of stored tensors that no weight uses and no rule of the architecture ignores."""
    return sorted(
        name
        for name in checkpoint.tensors.keys() - set(used)
        if not is_of_other_part(architecture, config, name)
        and not any(part in name for part in GGUF_IGNORED)
        and not (config.tie_word_embeddings and name.endswith(HEAD))
    )


def is_of_other_part(architecture: Architecture, config: ModelConfig, name: str) -> bool:
    """Return whether a stored tensor is of a part of the model that text generation does not use, such as vision."""
    return any(part in name for part in architecture.unused) or architecture.ignores(name, config)


def _is_of_layers(name: str, layers: range) -> bool:
    """Return whether the first number in a stored name is the index of one of the layers."""
    return layer_of(name) in layers


def layer_of(name: str) -> int:
    """Return the first number in a tensor's name, the index of its layer; -1 if it has none."""
    return next((int(part) for part in name.split(".") if re.fullmatch("[0-9]{1,9}", part)), -1)


def listed(names: list[str]) -> str:
    """Return the first few names, quoted, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:SHOWN]) + more
