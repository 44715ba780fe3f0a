"""Models of two layers, one for each kind of block, with logits that transformers computed once.

    golden/engines.json   config and the rule of each tensor, by kind of block
    golden/engines.npz    token ids [2, T], and transformers' float32 logits [2, T, V] of each kind

Weights are drawn from the raw bits of a PCG64 generator, which are the same on every platform and with every version of
numpy, so that tests write the checkpoints without transformers. `python tests/support/golden_models.py` records both
files again; the slow test in test_engine_matrix.py computes the logits again and compares.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

GOLDEN = Path(__file__).parents[1] / "golden"
VOCAB, TOKENS = 96, 50  # more tokens than three chunks of a prompt, and than six windows
KINDS = {  # kind of block: builder of tests/support/tiny_models.py and what is changed in its config
    "dense": ("_llama3", {}),
    "window": ("gemma3", {"layer_types": ["sliding_attention", "full_attention"]}),
    "mixture": ("qwen3_moe", {}),
    "scored": ("glm4_moe", {}),  # one dense layer, and one whose experts are chosen by scores within groups
    "recurrent": ("qwen3_5", {"full_attention_interval": 2}),  # a delta rule, and gated attention
    "latent": ("deepseek_v3", {}),
    "ternary": ("_bitnet", {"hidden_size": 128, "intermediate_size": 256}),  # whole blocks of 128, for the kernels
    "beside": ("gemma4", {"layer_types": ["sliding_attention", "full_attention"]}),  # an MLP beside experts
}
Rule = tuple[str, list[int], float, float]  # dtype, shape, centre and spread of a stored tensor


@cache
def recorded() -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
    """Return golden/engines.json and golden/engines.npz."""
    with np.load(GOLDEN / "engines.npz") as logits:
        return json.loads((GOLDEN / "engines.json").read_text()), dict(logits)


def golden_ids() -> Tensor:
    """Return two sequences of tokens, [2, T]."""
    return torch.from_numpy(recorded()[1]["ids"])


def golden_logits(kind: str) -> Tensor:
    """Return transformers' float32 logits of `golden_ids`, [2, T, V]."""
    return torch.from_numpy(recorded()[1][kind])


def write_checkpoint(kind: str, folder: Path) -> Path:
    """Write the model of a kind of block as Hugging Face stores it, and return its folder."""
    about = recorded()[0]["models"][kind]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about["config"]))
    save_file(draw_tensors(about["tensors"]), folder / "model.safetensors", {"format": "pt"})
    return folder


def draw_tensors(rules: Mapping[str, Rule]) -> dict[str, Tensor]:
    """Return a tensor for each rule: sums of four 16-bit numbers, which are exact in float32, as a normal variable."""
    tensors = {}
    for number, (name, (dtype, shape, centre, spread)) in enumerate(sorted(rules.items())):
        count = int(np.prod(shape))
        raw = np.random.PCG64(number).random_raw(count).astype(np.uint64)
        parts = [(raw >> np.uint64(16 * at)) & np.uint64(0xFFFF) for at in range(4)]
        if dtype == "U8":  # four ternary weights in a byte, each 0, 1 or 2
            values = sum((part % np.uint64(3)) << np.uint64(2 * at) for at, part in enumerate(parts))
            tensors[name] = torch.from_numpy(values.astype(np.uint8).reshape(shape))
            continue
        deviations = (sum(part.astype(np.int64) for part in parts) - 2 * 0xFFFF) / np.float32(37837.0)
        drawn = torch.from_numpy(np.float32(centre) + deviations.astype(np.float32) * np.float32(spread))
        tensors[name] = drawn.reshape(shape).to({"F32": torch.float32, "BF16": torch.bfloat16}[dtype])
    return tensors


def rule_of(name: str, tensor: Tensor) -> Rule:
    """Return how a tensor of a model that transformers has initialised is drawn: far from neutral, logits near one."""
    dtype, shape = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}[tensor.dtype], list(tensor.shape)
    if name.endswith("A_log"):
        return dtype, shape, -2.0, 0.0  # forgets half of a state in about three tokens
    if name.endswith("layer_scalar"):
        return dtype, shape, 0.9, 0.25
    if name.endswith("e_score_correction_bias"):
        return dtype, shape, 0.0, 0.2
    if name.endswith("weight_scale"):  # divisor of ternary weights, two thirds of which are not 0
        return dtype, shape, 5.0, 1.0
    if tensor.ndim == 1:
        return dtype, shape, float(tensor.float().mean().round()), 0.3
    return dtype, shape, 0.0, shape[-1] ** -0.5


def tamed(kind: str, rules: dict[str, Rule]) -> dict[str, Rule]:
    """Return the rules with scores near one in Gemma 4, which leaves their size to the norms of queries and keys."""
    norms = ("q_norm.weight", "k_norm.weight")
    if kind != "beside":
        return rules
    return {
        name: (rule[0], rule[1], rule[1][0] ** -0.25, 0.0) if name.endswith(norms) else rule
        for name, rule in rules.items()
    }


def builder_of(kind: str) -> Callable[[], nn.Module]:
    """Return a function that builds transformers' model of a kind, as transformers initialises it."""
    from support import tiny_models

    name, changes = KINDS[kind]
    changes = {"num_hidden_layers": 2, **changes}
    if name == "gemma3":
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        return lambda: Gemma3ForCausalLM(Gemma3TextConfig(**{**tiny_models.GEMMA_TEXT, **changes}))
    if name == "gemma4":
        changes = {**tiny_models.GEMMA4_MOE, **changes}
    return lambda: getattr(tiny_models, name)(**changes)


def describe(kind: str) -> dict[str, Any]:
    """Return the entry of golden/engines.json: the config and tensors that transformers saves."""
    torch.manual_seed(0)
    model = builder_of(kind)()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        stored = load_file(Path(folder) / "model.safetensors")
    if kind == "ternary":
        config["quantization_config"] = {"quant_method": "bitnet"}
        for name in [name for name in stored if name.endswith("_proj.weight")]:
            stored[f"{name}_scale"] = torch.zeros(1, dtype=torch.bfloat16)
            stored[name] = torch.zeros(stored[name].shape[0] // 4, stored[name].shape[1], dtype=torch.uint8)
    rules = tamed(kind, {name: rule_of(name, tensor) for name, tensor in stored.items()})
    return {"config": config, "tensors": rules}


@torch.no_grad()
def logits_of_transformers(kind: str, folder: Path, ids: Tensor) -> Tensor:
    """Return transformers' float32 logits with the checkpoint in a folder, [B, T, V]."""
    if kind == "ternary":  # transformers' own loader needs accelerate
        from support.files.ternary_files import with_transformers_layers

        plain = builder_of(kind)()
        model = with_transformers_layers(plain, load_file(folder / "model.safetensors"), "default")
    else:
        model = type(builder_of(kind)()).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
    with torch.compiler.set_stance("force_eager"):
        return model.eval()(input_ids=ids, use_cache=False).logits.float()


def record() -> None:
    """Write golden/engines.json and golden/engines.npz."""
    import transformers

    models = {kind: describe(kind) for kind in KINDS}
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "models": models}
    (GOLDEN / "engines.json").write_text(json.dumps(about, separators=(",", ":")) + "\n")
    raw = np.random.PCG64(1000).random_raw(2 * TOKENS) % np.uint64(VOCAB)
    ids = raw.astype(np.int64).reshape(2, TOKENS)
    np.savez_compressed(GOLDEN / "engines.npz", ids=ids)
    recorded.cache_clear()
    logits = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            model = write_checkpoint(kind, Path(folder) / kind)
            logits[kind] = logits_of_transformers(kind, model, torch.from_numpy(ids)).numpy()
            print(kind, "standard deviation of the logits", logits[kind].std())
    np.savez_compressed(GOLDEN / "engines.npz", ids=ids, **logits)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    record()
