"""A checkpoint's model in transformers, the reference of task=verify.

    a Hugging Face folder,      -> from_pretrained: files, names, folds and mathematics are transformers' own
    model.fallback=transformers
    GGUF files, MXFP4 folders,  -> a model of our config, filled with our unpacked weights: the mathematics is its own,
    random weights                 the reading is ours (transformers' own GGUF loading drops settings of some families,
                                   and it unpacks MXFP4 only where accelerate is installed)

Legend: T tokens, D model dim, V vocab.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from graphcore.arch.architecture import Architecture
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.folds import AddOne, Fold, NegatedExp, Times
from graphcore.arch.registry import architecture_of
from graphcore.arch.transformers_settings import transformers_settings
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.model_file_names import INDEX_NAME, SINGLE_NAME
from graphcore.checkpoint.mxfp4_checkpoint import Mxfp4Checkpoint
from graphcore.checkpoint.quantized.layout import ORDER
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.engine.fallback.layer_hooks import recording
from graphcore.engine.fallback.skeleton import find_layers, float32_names
from graphcore.engine.loading.open_model import Model
from graphcore.errors import UnsupportedError
from graphcore.tasks.reference.comparison import Outputs
from graphcore.tasks.reference.ternary_layers import cast_ternary_layers, use_ternary_layers
from graphcore.weights.loader import Loader
from graphcore.weights.matching import HEAD, SCALE, WEIGHT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FROM_FOLDER = "transformers' from_pretrained"
FROM_OUR_WEIGHTS = "a transformers model filled with graphcore's unpacked weights"


@dataclass(frozen=True)
class Reference:
    """A transformers model in float32 on the CPU, and a description of how it was made.

    Attributes:
        blocks: blocks of the text decoder, in order of use.
    """

    model: "PreTrainedModel"
    origin: str
    blocks: nn.ModuleList

    def cast(self, dtype: torch.dtype) -> None:
        """Cast the weights to `dtype` in place, but for those that from_pretrained keeps in float32."""
        kept = set(float32_names(self.model, dtype))
        for name, parameter in self.model.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if name in kept else dtype)
        cast_ternary_layers(self.model, dtype)

    @torch.no_grad()
    def run(self, token_ids: list[int]) -> Outputs:
        """Return the outputs of one teacher-forced pass."""
        # transformers compiles its ternary layers in parts
        with recording(list(self.blocks)) as seen, torch.compiler.set_stance("force_eager"):
            logits = self.model(torch.tensor([token_ids], dtype=torch.int64, device="cpu"), use_cache=False).logits
        return Outputs(tuple(layer[0].float() for layer in seen), logits[0].float())


def blocks_of(model: "PreTrainedModel") -> nn.ModuleList:
    """Return the blocks of the text decoder."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]  # transformers does not type it
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    assert lists, f"{type(model).__name__} has no list of blocks"
    return lists[0]


def load_reference(model: Model, loader: Loader) -> Reference:
    """Return transformers' model of a checkpoint, in float32.

    Args:
        model: the opened checkpoint.
        loader: loader of its weights.

    Raises:
        UnsupportedError: transformers has no such model.
    """
    with _loading(model.checkpoint.source):
        folder = None if model.adapters else plain_folder(model.checkpoint)  # our weights have the adapters merged
        if folder is not None:
            loaded, origin = from_folder(folder, model.config), FROM_FOLDER
        else:
            loaded, origin = from_weights(model.config, loader), FROM_OUR_WEIGHTS
        return Reference(loaded, origin, blocks_of(loaded))


def load_own_class(checkpoint: SafetensorsCheckpoint, config: ModelConfig) -> Reference:
    """Return the model that transformers' own class loads from a folder, in float32: the reference of a fallback.

    Raises:
        UnsupportedError: transformers cannot load it.
    """
    with _loading(checkpoint.source):
        loaded = from_folder(checkpoint.folder, config)
        layers = loaded.get_submodule(find_layers(loaded, config.num_hidden_layers, checkpoint.source))
        assert isinstance(layers, nn.ModuleList), "layers are in a list"
        return Reference(loaded, FROM_FOLDER, layers)


@contextmanager
def _loading(source: str) -> Iterator[None]:
    """Silence transformers while it loads a model, and turn its errors into UnsupportedError."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers does not type it
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers does not type it
    try:
        yield
    except (KeyError, ValueError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedError(
            f"{source}: transformers {transformers.__version__} cannot load it ({reason:.200})"
        ) from error


def plain_folder(checkpoint: Checkpoint) -> Path | None:
    """Return the checkpoint's folder if from_pretrained can read it without further packages; else None."""
    if not isinstance(checkpoint, SafetensorsCheckpoint) or isinstance(checkpoint, Mxfp4Checkpoint):
        return None
    return checkpoint.folder if has_usual_names(checkpoint.folder) else None


def has_usual_names(folder: Path) -> bool:
    """Return whether from_pretrained would find the folder's weights."""
    return any((folder / name).is_file() for name in (INDEX_NAME, SINGLE_NAME))


def from_folder(folder: Path, config: ModelConfig) -> "PreTrainedModel":
    """Return the model that transformers loads from the folder, cut to the config's num_hidden_layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = stored.get_text_config()
    if config.num_hidden_layers < text.num_hidden_layers:
        text.num_hidden_layers = config.num_hidden_layers
        if "layer_types" in text.to_dict():
            text.layer_types = text.layer_types[: config.num_hidden_layers]
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, config=stored, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return loaded


def from_weights(config: ModelConfig, loader: Loader) -> "PreTrainedModel":
    """Return a transformers model of graphcore's config, filled with graphcore's weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = AutoConfig.for_model(**transformers_settings(config, loader.is_tied))
    built: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # not typed there
        stored, dtype=torch.float32, attn_implementation="eager"
    )
    built.eval()  # type: ignore[no-untyped-call]  # transformers does not type it
    parameters = dict(built.named_parameters(remove_duplicate=False))
    places = {**dict(built.named_buffers()), **parameters}  # a router's selection bias is a buffer
    architecture = architecture_of(config)
    filled = {
        copy_weight(places, architecture, config, name, loader)
        for name in loader.sources
        if not is_shared(name, loader) and not name.endswith((SCALE, ORDER))
    }
    missing = parameters.keys() - filled - ({HEAD} if loader.is_tied else set())
    assert not missing, f"nothing has filled {sorted(missing)}"
    if config.ternary is not None:
        use_ternary_layers(blocks_of(built), loader, config.ternary)
    if config.rope is not None and config.rope.freq_divisors is not None:
        divide_frequencies(built, config.rope.freq_divisors)
    return built


def is_shared(name: str, loader: Loader) -> bool:
    """Return whether the weight is the head's and tied to the embedding's."""
    return loader.is_tied and name == HEAD


@torch.no_grad()
def copy_weight(
    parameters: Mapping[str, Tensor], architecture: Architecture, config: ModelConfig, name: str, loader: Loader
) -> str:
    """Copy the decoder's weight `name` into transformers' parameter, undoing folds; return the parameter's name."""
    candidates = (
        (prefix + source.name, source.folds)
        for source in architecture.hf_sources(name, config)
        for prefix in ("", *architecture.hf_prefixes)
    )
    stored_name, folds = next(candidate for candidate in candidates if candidate[0] in parameters)
    place, value = parameters[stored_name], loader.dense(name, torch.float32)
    order = name.removesuffix(WEIGHT) + ORDER
    if order in loader.sources:
        value = value[:, loader.dense(order, torch.float32).long().argsort()]
    moves = []
    for fold in folds:
        match fold:
            case AddOne():
                value = value - 1.0
            case Times(factor):
                value = value / factor
            case NegatedExp():
                value = (-value).log()
            case _:
                moves.append(fold)
    put_moved(place, moves, value)
    return stored_name


def put_moved(parameter: Tensor, moves: Sequence[Fold], value: Tensor) -> None:
    """Write the elements that `moves` pick from a parameter, in their order, into their places in the parameter."""
    place = folded(moves, parameter)
    if place.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr():
        place.copy_(value)  # a view: transposed, or some rows
    else:
        places = folded(moves, torch.arange(parameter.numel(), dtype=torch.int64, device="cpu").view_as(parameter))
        parameter.view(-1)[places] = value.view_as(places)


def folded(folds: Sequence[Fold], tensor: Tensor) -> Tensor:
    """Return the tensor with the folds applied in order."""
    for fold in folds:
        tensor = fold.apply(tensor)
    return tensor


def divide_frequencies(model: "PreTrainedModel", divisors: tuple[float, ...]) -> None:
    """Divide each rotary frequency by its divisor, for which transformers has no setting."""
    names = ("rotary_emb.inv_freq", "rotary_emb.full_attention_inv_freq")  # the second where sliding layers have others
    frequencies = [buffer for name, buffer in model.named_buffers() if name.endswith(names)]
    assert frequencies, f"{type(model).__name__} has no rotary frequencies"
    for buffer in frequencies:
        buffer.div_(torch.tensor(divisors, dtype=buffer.dtype, device="cpu"))
