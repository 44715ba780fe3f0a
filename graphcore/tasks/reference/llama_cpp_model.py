"""A GGUF file's model in llama.cpp: the residual stream after each block, and the logits, of one pass.

llama.cpp calls `cb_eval` for each tensor of its graph, first to ask whether it is wanted, then with its values:

    l_out-N            the residual stream after block N, [T, D] float32
    result_output      the logits, [T, V] float32

llama-cpp-python is optional. On packed weights llama.cpp rounds activations to 8 bits before each product. It runs in a
process of its own: one that was built for another processor, or for instructions that a virtual machine lists and does
not run (AMX), dies by a signal.

Legend: T tokens, D model dim, V vocab.
"""

import ctypes
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphcore.errors import UnsupportedError
from graphcore.tasks.reference.comparison import Outputs

BLOCK, LOGITS = "l_out-", "result_output"
FLOAT32 = 0  # GGML_TYPE_F32
CURES = {
    signal.SIGILL: "it was built for instructions that this processor does not run: CMAKE_ARGS=-DGGML_NATIVE=OFF pip "
    "install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python",
    signal.SIGKILL: "the system may have had too little memory for it: free some, or set model.num_hidden_layers",
}


def has_llama_cpp() -> bool:
    """Return whether llama-cpp-python is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


def run_llama_cpp(file: Path, token_ids: Sequence[int], threads: int) -> Outputs:
    """Return the outputs of one pass of llama.cpp on the CPU, with keys and values in float32.

    Args:
        file: path of a GGUF file; of a split model, the first part.

    Returns:
        Outputs whose layers begin after the first block: the embedding is not among them.

    Raises:
        UnsupportedError: llama.cpp cannot load or run the file, or its process died.
    """
    source = f"from {__name__} import save_outputs; save_outputs()"
    with tempfile.TemporaryDirectory(prefix="graphcore-") as folder:
        output = Path(folder) / "outputs.safetensors"
        asked = json.dumps([str(file), list(token_ids), threads, str(output)])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # finds what this process finds
        command = [sys.executable, "-c", source]
        done = subprocess.run(command, input=asked, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return _outputs(load_file(output))
    if done.returncode < 0:
        cause = signal.Signals(-done.returncode)
        cure = CURES.get(cause, "see whether llama.cpp's own tools run the file")
        raise UnsupportedError(f"{file}: llama.cpp died by {cause.name}: {cure}")
    raise UnsupportedError(done.stderr.strip().rpartition("\n")[2])


def save_outputs() -> None:
    """Run llama.cpp as stdin asks (JSON: file, token ids, threads, output), and save the tensors of its graph."""
    file, token_ids, threads, output = json.load(sys.stdin)
    try:
        save_file(_run_here(Path(file), token_ids, threads), output)
    except UnsupportedError as error:
        sys.exit(str(error))


def _run_here(file: Path, token_ids: Sequence[int], threads: int) -> dict[str, Tensor]:
    """Return the blocks' outputs and the logits by their names in llama.cpp's graph."""
    import llama_cpp

    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)  # it prints llama.cpp's lines from that level on
    graph = _GraphReader(llama_cpp)
    with ExitStack() as stack:
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(str(file).encode(), model_params)
        if not model:
            raise UnsupportedError(f"{file}: llama.cpp (llama-cpp-python {llama_cpp.__version__}) cannot load it")
        stack.callback(llama_cpp.llama_model_free, model)
        context = llama_cpp.llama_init_from_model(model, _context_params(llama_cpp, graph, len(token_ids), threads))
        if not context:
            raise UnsupportedError(f"{file}: llama.cpp makes no context of {len(token_ids)} tokens for it")
        stack.callback(llama_cpp.llama_free, context)
        batch = llama_cpp.llama_batch_init(len(token_ids), 0, 1)
        stack.callback(llama_cpp.llama_batch_free, batch)
        _fill(batch, token_ids)
        status = llama_cpp.llama_decode(context, batch)
    if status != 0 or LOGITS not in graph.found:
        raise UnsupportedError(f"{file}: llama.cpp cannot run it (status {status})")
    return graph.found


def _outputs(found: dict[str, Tensor]) -> Outputs:
    """Return the blocks' outputs in order, and the logits."""
    count = sum(name.startswith(BLOCK) for name in found)
    return Outputs(tuple(found[f"{BLOCK}{index}"] for index in range(count)), found[LOGITS])


def _context_params(llama_cpp: Any, graph: "_GraphReader", tokens: int, threads: int) -> Any:
    """Return the parameters of a context that runs all tokens in one pass, on the CPU."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = tokens
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = FLOAT32
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.offload_kqv = params.op_offload = False
    params.cb_eval = graph.callback
    return params


def _fill(batch: Any, token_ids: Sequence[int]) -> None:
    """Make the tokens the batch: one sequence, with the logits after each."""
    batch.n_tokens = len(token_ids)
    for position, token_id in enumerate(token_ids):
        batch.token[position], batch.pos[position] = token_id, position
        batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
        batch.logits[position] = 1


class _GraphReader:
    """The callback of llama.cpp's graph, and the tensors that it has kept.

    Attributes:
        callback: C function for `cb_eval`; it must live as long as the context.
        found: [T, width] float32 tensors by their names in llama.cpp's graph.
    """

    def __init__(self, llama_cpp: Any) -> None:
        folder = Path(llama_cpp.__file__).parent / "lib"
        self._ggml = ctypes.CDLL(str(next(folder.glob("*ggml-base.*"))))
        self._ggml.ggml_get_name.restype, self._ggml.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._ggml.ggml_nbytes.restype, self._ggml.ggml_nbytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
        self._ggml.ggml_nrows.restype, self._ggml.ggml_nrows.argtypes = ctypes.c_int64, [ctypes.c_void_p]
        self._ggml.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 2
        self.callback = llama_cpp.llama_cpp.ggml_backend_sched_eval_callback(self._take)
        self.found: dict[str, Tensor] = {}

    def _take(self, tensor: int, is_question: bool, _user: int | None) -> bool:
        """Answer whether a tensor is wanted, or keep its values; True lets llama.cpp continue."""
        name = self._ggml.ggml_get_name(tensor).decode()
        is_wanted = name == LOGITS or name.startswith(BLOCK)
        if is_wanted and not is_question:
            values = np.empty(self._ggml.ggml_nbytes(tensor) // 4, dtype=np.float32)
            self._ggml.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
            self.found[name] = torch.from_numpy(values.reshape(self._ggml.ggml_nrows(tensor), -1))
        return is_wanted or not is_question
