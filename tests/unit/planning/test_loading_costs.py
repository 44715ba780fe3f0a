"""What loading takes at its peak, as the plan says, beside what the process really had in memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from graphcore.device import find_cpp_compiler

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
DIM, HIDDEN, LAYERS, VOCAB = 1024, 4096, 2, 60000
# Beyond the plan: what the interpreter, torch's threads and the allocator take meanwhile.
SLACK_NBYTES = 24 << 20

PROCESS = """
import sys, threading
from pathlib import Path
import torch
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.decoder_loader import DecoderLoader
from graphcore.engine.loading.plan_run import plan_run

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

settings = compose_settings(["device=cpu", "graph=eager", "context_length=64", "threads=2", *sys.argv[1:]])
torch.set_num_threads(2)
backend = DecoderLoader()
model = backend.open(settings, lambda *stage: None)
with torch.inference_mode():
    parts, plan, tier = plan_run(settings, backend.prepare(settings, model, lambda *stage: None))
    before, peak, over = anonymous(), [0], threading.Event()
    def watch():
        while not over.wait(0.002):
            peak[0] = max(peak[0], anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    backend.build(settings, parts, plan, tier, lambda *stage: None)
    over.set()
    thread.join()
print(plan.load_peak_nbytes, plan.other.loading_nbytes, peak[0] - before)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of which the table takes most: 123 MB of 190 in bf16."""
    made = tmp_path_factory.mktemp("llama")
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    norm = torch.ones(DIM, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(VOCAB, DIM), "model.norm.weight": norm}
    sizes = {f"self_attn.{name}_proj": (DIM, DIM) for name in "qkvo"}
    sizes |= {"mlp.gate_proj": (HIDDEN, DIM), "mlp.up_proj": (HIDDEN, DIM), "mlp.down_proj": (DIM, HIDDEN)}
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.{name}.weight": matrix(*size) for name, size in sizes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = norm.clone()
    save_file(tensors, made / "model.safetensors")
    config = (
        '{"model_type": "llama", "hidden_size": %d, "intermediate_size": %d, "vocab_size": %d, "num_hidden_layers": %d,'
        ' "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": true, "torch_dtype": "bfloat16",'
        ' "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}'
    )
    (made / "config.json").write_text(config % (DIM, HIDDEN, VOCAB, LAYERS), encoding="utf-8")
    return made


@pytest.mark.skipif(not find_cpp_compiler(), reason="needs a C++ compiler: packed weights in the kernels' form")
@pytest.mark.parametrize(
    ("overrides", "most_loading"),
    [
        (["dtype=bf16"], 16 << 20),  # copied a few rows at a time
        (["dtype=fp32"], 32 << 20),
        (["dtype=bf16", "quant=q8_0"], 48 << 20),  # packed a few rows at a time
        (["dtype=bf16", "quant=q4_k"], 48 << 20),
    ],
    ids=str,
)
def test_loading_takes_what_the_plan_says_and_no_more(folder: Path, overrides: list[str], most_loading: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, f"model.checkpoint={folder}", *overrides],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    planned, loading, seen = map(int, done.stdout.split())
    assert loading <= most_loading
    assert seen <= planned + SLACK_NBYTES
    assert seen >= planned - loading  # what stays is there


def test_random_weights_are_made_whole_and_counted(folder: Path) -> None:
    shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    asked = ["model=llama3", "model.checkpoint='random:'", "dtype=bf16"]
    asked += [f"++model.random_config.{key}={value}" for key, value in shape.items()]
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, *asked], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    planned, loading, seen = map(int, done.stdout.split())
    assert loading == 2 * VOCAB * DIM  # the table
    assert loading < seen <= planned + SLACK_NBYTES
