"""What Inductor makes of every kind of block: its nodes and its launches, as text. Nothing is built or run.

    python tests/lowered_graphs.py                          writes the golden files of the torch that runs it
    python tests/lowered_graphs.py cpu,cuda FOLDER [NAME]   writes files of these devices below a folder, or one model's

Shapes are those of published models; tensors are fake, so they take no memory, and on "cuda" they need no GPU. Each
file has one paragraph for each compiled function. A process of its own: `absent_cuda` changes torch for good, so "cuda"
comes last.
"""

import gc
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import absent_cuda
import torch
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor.exc import InductorError
from torch._subclasses.fake_tensor import FakeTensorMode

from graphcore.arch.config_from_json import parse_model_config
from graphcore.arch.random_checkpoint import RandomCheckpoint
from graphcore.arch.registry import architecture_of
from graphcore.config.compose import compose_settings
from graphcore.device import find_cpp_compiler
from graphcore.engine.loading.open_model import Model
from graphcore.engine.loading.prepare_model import match_model
from graphcore.graph.builder import GraphBuilder
from graphcore.kernels.backend import Backend, TritonBackend, find_backend
from graphcore.kvcache import buffers
from graphcore.kvcache.sizes import CacheSizes
from graphcore.weights.groups import split_layers
from graphcore.weights.packed_weights import PackingPolicy

DEVICES = ("cpu", "cuda")
GOLDEN = Path(__file__).parent / "golden" / "graphs"
DTYPE = torch.bfloat16
CONTEXT = 4096
WIDTH = 116
MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
GEMMA4_E2B = {  # with its four kinds of layers next to each other: the last two attend the keys of the first two
    "model_type": "gemma4_text",
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 256,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
# A model group of conf/model, or a config; the first layers of each that have all of its kinds.
MODELS: Mapping[str, tuple[str | dict[str, object], int, str]] = {
    "llama3": ("llama3", 1, "stored"),
    "llama3_q4_k": ("llama3", 1, "q4_k"),
    "mistral": (MISTRAL, 1, "stored"),
    "qwen2": (QWEN2, 1, "stored"),
    "qwen3": ("qwen3", 1, "stored"),
    "gemma3": ("gemma3_1b", 6, "stored"),
    "gpt2": ("gpt2", 1, "stored"),
    "gpt_oss": ("gpt_oss", 2, "stored"),
    "qwen3_moe": ("qwen3_moe", 1, "stored"),
    "qwen3_5": ("qwen3_5", 4, "stored"),
    "qwen3_6_moe": ("qwen3_6_moe", 4, "stored"),
    "gemma4_e2b": (GEMMA4_E2B, 4, "stored"),
    "gemma4_26b_a4b": ("gemma4_26b_a4b", 6, "stored"),
    "bitnet": ("bitnet", 1, "stored"),
    "lfm2": ("lfm2", 3, "stored"),
    "glm4_moe": ("glm4_moe", 2, "stored"),
    "deepseek_v2_lite": ("deepseek_v2_lite", 2, "stored"),
}
LAYERS = {"gpt2": "n_layer"}  # where a config calls their number otherwise
ENDS_A_LINE = {"mm", "addmm", "bmm", "baddbmm"}


class LoweredError(Exception):
    """Ends a compilation where all kernels are written and none is built."""


@dataclass
class Lowering:
    """Stands in for torch.compile: what is called is compiled up to its kernels' text, then runs as it is.

    Attributes:
        found: a paragraph for each function, by name.
    """

    whole: Callable[..., Callable[..., Any]]
    found: dict[str, str] = field(default_factory=dict)
    name: str = ""

    def compile(self, function: Callable[..., Any], **options: object) -> Callable[..., Any]:
        compiled = self.whole(function, **options)

        def run(*arguments: object) -> object:
            if function.__name__ not in self.found:
                self.name = function.__name__
                with suppress(InductorError):
                    compiled(*arguments)
                assert self.name in self.found, f"{self.name} was not lowered"
            return function(*arguments)

        return run

    def take(self, graph: Any) -> None:
        """Describe a graph that Inductor would now build; the method `compile_to_module` of its GraphLowering."""
        code, _ = graph.codegen()
        self.found[self.name] = paragraph(self.name, graph.orig_gm.graph, code.value)
        raise LoweredError


def paragraph(name: str, graph: torch.fx.Graph, code: str) -> str:
    """Return a graph's inputs, launches and nodes."""
    launches = list(launches_in(code))
    called = [node_text(node) for node in graph.nodes if node.op == "call_function"]
    given = [value_text(node.meta["val"]) for node in graph.nodes if node.op == "placeholder"]
    lines = [f"{name}: {len(launches)} launches, {len(called)} nodes", *wrapped("given", given)]
    lines += [f"  launch {launch}" for launch in launches]
    line: list[str] = []
    for text in called:
        line.append(text)
        if text in ENDS_A_LINE or text.startswith("graphcore."):
            lines += wrapped("nodes", line)
            line = []
    return "\n".join([*lines, *(wrapped("nodes", line) if line else [])]) + "\n"


def launches_in(code: str) -> Iterator[str]:
    """Yield what the generated Python launches, in order, without the numbers that only tell kernels apart."""
    pattern = r"^[^#\n]*?\b(cpp_fused\w*|triton_\w+(?=\.run)|extern_kernels\.\w+|torch\.ops\.[\w.]+)(?:\.run)?\("
    for launch in re.findall(pattern, code[code.index("def call(") :], flags=re.MULTILINE):
        yield re.sub(r"_\d+$|^extern_kernels\.|^torch\.ops\.|\.default$", "", launch)


def node_text(node: torch.fx.Node) -> str:
    """Return a node's operation: aten's by its own name, others with their namespace."""
    text = re.sub(r"^(aten|prims)\.|\.(default|Tensor|Scalar)$", "", str(node.target))
    if text == "convert_element_type":
        return f"to_{str(node.args[1]).removeprefix('torch.')}"
    return re.sub(r"<built-in function (\w+)>", r"\1", text)


def value_text(value: object) -> str:
    """Return an input's dtype and shape; T is any symbol: the length of a chunk, or a cache's slots."""
    is_tensor = isinstance(value, torch.Tensor)
    text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if is_tensor else str(value)
    return re.sub(r"\bs\d+\b", "T", text).replace(" ", "")


def wrapped(label: str, words: list[str]) -> list[str]:
    """Return lines of words, the first with a label."""
    indent = " " * (len(label) + 4)
    return textwrap.wrap(f"  {label}  {' '.join(words)}", WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def model_of(config: str | dict[str, object], layers: int) -> Model:
    """Return a model of random weights, which nobody draws. Args: config: a model group's name, or a config.json."""
    raw = compose_settings([f"model={config}"]).model.random_config if isinstance(config, str) else config
    parsed = parse_model_config({**raw, LAYERS.get(raw["model_type"], "num_hidden_layers"): layers}, __file__)
    spec = architecture_of(parsed).spec(parsed)
    weights = RandomCheckpoint(spec, seed=0)
    return Model(
        checkpoint=weights, path=None, config=parsed, spec=spec, stored_layers=layers, dtype="bfloat16", tokenizer=None
    )


def builder_of(name: str, device: torch.device, backend: Backend) -> GraphBuilder:
    """Return the builder of a model whose tensors are fake, made inside the mode that fakes them."""
    config, layers, quant = MODELS[name]
    model = model_of(config, layers)
    decoder, _ = match_model(model, DTYPE, PackingPolicy(backend, "wide", quant))
    for module in decoder.modules():
        for key, buffer in module.named_buffers(recurse=False):
            module.register_buffer(key, torch.empty_like(buffer, device=device))
    with mock.patch.object(buffers, "zeros", fake_zeros):
        caches = buffers.allocate_cache(model.spec, CacheSizes(1, CONTEXT, DTYPE), device)
    return GraphBuilder(decoder, "compiled", split_layers(layers, layers), caches, CONTEXT, device)


def fake_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, _touched: int | None = None
) -> torch.Tensor:
    """Return what the mode fakes: a cache's own pages would be real."""
    return torch.zeros(shape, dtype=dtype, device=device)


def lower(name: str, device: torch.device, backend: Backend) -> str:
    """Return a paragraph for each function that a model's programs for one sequence consist of."""
    from torch._inductor.graph import GraphLowering

    lowering = Lowering(torch.compile)
    with (
        mock.patch.object(torch, "compile", lowering.compile),
        mock.patch.object(GraphLowering, "compile_to_module", lambda graph: lowering.take(graph)),
        torch.inference_mode(),
        FakeTensorMode(),
    ):
        builder = builder_of(name, device, backend)
        builder.prefill(1)
        builder.decode(1, is_greedy=False)
    return "\n".join(lowering.found.values())


def write(device: str, folder: Path, names: Iterable[str]) -> None:
    """Write a file for each model of that name."""
    inductor.compile_threads = 1
    inductor.fx_graph_cache = False
    functorch.enable_autograd_cache = False
    compiler = find_cpp_compiler()
    assert compiler is not None, "a C++ compiler is needed"
    backend: Backend = TritonBackend()
    if device == "cuda":
        inductor.joint_graph_constant_folding = False  # it computes constants on the device
        absent_cuda.pretend(compiler)
    else:
        backend, _ = find_backend(torch.device(device), compose_settings([]).cache_folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"{name}.txt").write_text(lower(name, torch.device(device), backend), encoding="utf-8")


def golden_folder() -> Path:
    """Return where this torch's golden files are, by device: Inductor changes with every minor version."""
    return GOLDEN / f"torch-{'.'.join(torch.__version__.split('.')[:2])}"


if __name__ == "__main__":
    if sys.argv[1:]:
        gc.disable()  # the process is short, and a tenth of its time would go into collections
        for each in sys.argv[1].split(","):
            write(each, Path(sys.argv[2]) / each, sys.argv[3:] or MODELS)
    else:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, __file__, ",".join(DEVICES), str(golden_folder())]
        subprocess.run(command, check=True, env=environment)
