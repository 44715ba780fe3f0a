"""Selection of the reader for a local checkpoint or adapter, by its path."""

from pathlib import Path
from types import MappingProxyType

from safetensors import safe_open

from graphcore.checkpoint.absent_files import Elsewhere
from graphcore.checkpoint.adapter import Adapter
from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.checkpoint.file_bytes import file_names, is_folder
from graphcore.checkpoint.file_kind import FileKind, kind_of
from graphcore.checkpoint.gguf_adapter import read_gguf_adapter
from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.checkpoint.model_file_names import INDEX_NAME, SINGLE_NAME, model_names
from graphcore.checkpoint.mxfp4_checkpoint import Mxfp4Checkpoint, has_pairs
from graphcore.checkpoint.peft_adapter import read_peft_adapter
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.errors import CheckpointError, UnsupportedError, quoted

MLX_EXPERTS = (".switch_mlp.", ".switch_glu.")  # MLX's names of stacked experts


def open_checkpoint(path: str | Path, elsewhere: Elsewhere = MappingProxyType({})) -> Checkpoint:
    """Open the checkpoint at `path` and check its headers; no tensor is read.

    Args:
        path: path of a file, whose first bytes tell its kind; or of a folder with, in this order, safetensors under
            their usual names, one GGUF model (possibly split; mmproj files are ignored), or one other .safetensors
            file.

    Raises:
        CheckpointNotFoundError: the path or a file of the checkpoint is missing.
        UnsupportedError: the weights are pickled, of an unsupported type, or in MLX's own form.
        CheckpointError: the path holds no checkpoint, a damaged one, or more than one model.
    """
    path = Path(path)
    if is_folder(path):
        return _open_folder(path, elsewhere)
    # Other kinds of files are refused by the safetensors reader, with a message that names the kind.
    is_gguf = kind_of(path) is FileKind.GGUF
    return GGUFCheckpoint(path, elsewhere) if is_gguf else _open_safetensors(path, elsewhere)


def _open_folder(folder: Path, elsewhere: Elsewhere) -> Checkpoint:
    names = file_names(folder)
    if INDEX_NAME in names or SINGLE_NAME in names:
        return _open_safetensors(folder, elsewhere)
    models = model_names(names)
    if len(models) > 1:
        raise CheckpointError(
            f"{folder}: holds {len(models)} GGUF models ({', '.join(models)}); name one of these files"
        )
    return GGUFCheckpoint(folder / models[0], elsewhere) if models else _open_safetensors(folder, elsewhere)


def _open_safetensors(path: Path, elsewhere: Elsewhere) -> SafetensorsCheckpoint:
    plain = SafetensorsCheckpoint(path, elsewhere)
    of_mlx = next((info for info in plain.tensors.values() if _is_in_mlx_form(info, plain)), None)
    if of_mlx is not None:
        raise UnsupportedError(
            f"{plain.source}: is a folder of MLX, whose tensor {quoted(of_mlx.name)} ({of_mlx.encoding} "
            f"{list(of_mlx.shape)}) is in a form that MLX alone reads; choose the model that it was "
            "converted from, or a GGUF file of it"
        )
    return Mxfp4Checkpoint(path, elsewhere) if has_pairs(plain.tensors) else plain


def _is_in_mlx_form(info: TensorInfo, checkpoint: SafetensorsCheckpoint) -> bool:
    """Return whether a tensor has a layout that only MLX writes: quantised, stacked experts or a convolution.

    MLX's other tensors are those of the model that it converted, under the same names. Source: mlx 0.32,
    nn.quantize and nn.Conv1d, and mlx-lm's `SwitchLinear`.
    """
    is_quantised = info.encoding == "u32" and info.name.removesuffix("weight") + "scales" in checkpoint.tensors
    if is_quantised or any(part in info.name for part in MLX_EXPERTS):
        return True
    if "conv" not in info.name or len(info.shape) != 3 or info.file not in checkpoint.files:
        return False
    _, taps, inputs = info.shape  # MLX has inputs last, of which a depthwise convolution has one; transformers taps
    if inputs != 1 or taps == 1:
        return False
    with safe_open(info.file, "numpy") as file:  # a convolution of width 1 has the same shape elsewhere
        return (file.metadata() or {}).get("format") == "mlx"


def open_adapter(path: str | Path) -> Adapter:
    """Open the LoRA adapter at `path` and check its headers; no tensor is read.

    Args:
        path: path of PEFT's folder, or of a GGUF file.

    Raises:
        CheckpointNotFoundError: the path or a file of the adapter is missing.
        UnsupportedError: the adapter is not LoRA, or a variant that is not supported.
        CheckpointError: the adapter is damaged.
    """
    path = Path(path)
    is_gguf = not is_folder(path) and kind_of(path) is FileKind.GGUF
    return read_gguf_adapter(path) if is_gguf else read_peft_adapter(path)
