"""Which of transformers' decoders run compiled: a small random model of each kind, model.fallback=transformers.

    python -m benchmarks.fallback_kinds                        every kind that transformers has; minutes each
    python -m benchmarks.fallback_kinds olmo2 gpt_neox         these
    python -m benchmarks.fallback_kinds --trace                traced whole, but no code is generated: seconds each

One line for each kind, to paste into docs/lab/fallback_kinds.md: what runs compiled, in how many graphs, and why not
all of it; whether greedy tokens are those of transformers' own generate; and the largest difference between logits that
decode steps make and those of one pass of transformers (float32).
"""

import argparse
import inspect
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from graphcore import Engine
from graphcore.engine.fallback import compiled_layers
from graphcore.errors import GraphcoreError
from graphcore.graph.compile import fresh_copy

TOKENS, NEW_TOKENS = 20, 10
SMALL: dict[str, Any] = {  # each where the kind's config has it
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "ffn_dim": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "is_decoder": True,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "embedding_size": 64,
    "input_embedding_size": 64,
    "output_embedding_size": 64,
    "word_embed_proj_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def traced(function: Callable[..., object], name: str) -> Callable[..., object]:
    """Return the function traced by Dynamo and AOTAutograd, whose graphs torch then runs op by op."""
    return torch.compile(fresh_copy(function, name), fullgraph=True, dynamic=False, backend="aot_eager")


def save_small(kind: str, folder: Path) -> Any:  # a class that is typed in part
    """Save a small random model of a kind, float32, and return it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    usual = CONFIG_MAPPING[kind]()
    computed = {name for name, value in inspect.getmembers(type(usual)) if isinstance(value, property)}
    known = {name: value for name, value in SMALL.items() if name not in computed and hasattr(usual, name)}
    config = CONFIG_MAPPING[kind](**known)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # as transformers leaves it
        config, dtype=torch.float32
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def line_of(kind: str) -> str:
    """Return the line of the table for a kind."""
    with tempfile.TemporaryDirectory() as name:
        try:
            reference = save_small(kind, Path(name))
        except Exception as error:  # noqa: BLE001  # whatever a class makes of small sizes
            return f"| `{kind}` | not built | {_short(error)} | | |"
        ids = torch.randint(2, 96, (1, TOKENS), generator=torch.Generator().manual_seed(1))
        keys = ["model.fallback=transformers", "graph=compiled", "context_length=64"]
        try:
            with Engine.load(name, device="cpu", dtype="fp32", overrides=keys) as engine:
                made = list(engine.generate(ids.tolist(), max_new_tokens=NEW_TOKENS)[0].token_ids)
                logits: Any = engine.logits(ids, by_token=True)
                reasons = [note for note in engine.notes if "runs eager, not compiled" in note]
                num, graph = engine.stats["compiled_graphs"], engine.stats["graph"]
        except GraphcoreError as error:
            return f"| `{kind}` | refused | {_short(error)} | | |"
        expected = reference.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, TOKENS:].tolist()
        difference = (logits - reference(input_ids=ids, use_cache=False).logits).abs().max().item()
    ran = "whole" if not reasons else "in part" if graph == "compiled" else "eager"
    are_same = "equal" if made == expected else "differ"
    return f"| `{kind}` | {ran} ({num}) | {_short('; '.join(reasons))} | {are_same} | {difference:.1e} |"


def _short(reason: object) -> str:
    text = " ".join(str(reason).replace("|", "/").split())
    return text[:160]


def main(arguments: Sequence[str]) -> None:
    """Print the lines."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="model types; all that transformers has if there are none")
    parser.add_argument("--trace", action="store_true", help="trace the layers without generating code")
    asked = parser.parse_args(arguments)
    print("| model type | compiled | why not | greedy tokens | logits |\n|---|---|---|---|---|")
    with ExitStack() as stack:
        if asked.trace:
            stack.enter_context(mock.patch.object(compiled_layers, "compile_whole", traced))
        for kind in asked.kinds or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            print(line_of(kind), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
