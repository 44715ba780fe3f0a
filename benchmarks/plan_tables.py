"""Writes docs/plan_tables.md: the planner's results for real model shapes under 14 GiB, beside a published estimate.

    python benchmarks/plan_tables.py            # seconds; sizes follow from shapes and formats, no weight is made

The estimate is that of the original specification of layer streaming (sections 5.1 to 5.3), which has no shapes; the
shapes here are Llama's. Memory bandwidth and link are arguments, not measurements.
"""

import argparse
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from graphcore.config.compose import compose_settings
from graphcore.config.settings import KEPT
from graphcore.engine.loading.open_model import Model, open_model
from graphcore.engine.loading.prepare_model import match_model
from graphcore.errors import PlanError
from graphcore.kernels.backend import TorchBackend
from graphcore.kernels.ops.kv_formats import KVType, kv_types
from graphcore.kvcache.sizes import CacheSizes, cache_nbytes
from graphcore.planning.gpu_overhead import allocated_cache_nbytes, overhead_nbytes
from graphcore.planning.machine import Memory
from graphcore.planning.planner import Costs, PlanRequest, plan_streaming
from graphcore.planning.prediction import Rates, predict
from graphcore.planning.sizes import WeightSizes, sizes_of
from graphcore.planning.workspace import workspace_nbytes
from graphcore.weights.groups import split_layers
from graphcore.weights.packed_weights import PackingPolicy
from graphcore.weights.plan import GIB, Plan, bytes_per_token

PAGE = Path(__file__).parents[1] / "docs" / "plan_tables.md"
BUDGET = 14 * GIB
DEVICE = Memory("cuda:0", free_nbytes=16 * GIB, physical_nbytes=16 * GIB)
CONTEXTS = {"8K": 8192, "128K": 131072}
FORMATS = {"bf16": "stored", "q4_k": "q4_k", "i2_s": "i2_s"}
KV_DTYPES: dict[str, KVType] = {"bf16": torch.bfloat16, "q4_0": "q4_0"}  # kv_dtype, with more and with fewest bits
SEED_GROUP = 4  # layers
# hidden_size, intermediate_size, layers, heads, kv heads, vocabulary: the models' own config.json
SHAPES = {
    "Llama 2 7B": (4096, 11008, 32, 32, 32, 32000),
    "Llama 2 13B": (5120, 13824, 40, 40, 40, 32000),
    "Llama 30B": (6656, 17920, 60, 52, 52, 32000),
    "Llama 2 70B": (8192, 28672, 80, 64, 8, 32000),
    "Llama 3 70B": (8192, 28672, 80, 64, 8, 128256),
}


@dataclass(frozen=True)
class Estimate:
    """The specification's figures for a size: weights in GB, groups of four layers, ms to move all, loss of speed."""

    gigabytes: float
    groups: str
    milliseconds: int
    loss: str


ESTIMATES = {
    "Llama 2 7B": Estimate(1.4, "6-8", 44, "< 5 %"),
    "Llama 2 13B": Estimate(2.6, "10-12", 81, "10 %"),
    "Llama 30B": Estimate(6.0, "20-24", 188, "25 %"),
    "Llama 2 70B": Estimate(14.0, "40-48", 438, "50 %"),
}


@dataclass(frozen=True)
class Case:
    """A shape in a format: its spec, what CUDA itself takes, and its sizes in groups of one layer and of four."""

    name: str
    format: str
    model: Model
    overhead_nbytes: int
    single: WeightSizes
    grouped: WeightSizes

    def kv_nbytes(self, context: int, kv: str = "bf16") -> int:
        return cache_nbytes(self.model.spec, CacheSizes(1, context, kv_types(KV_DTYPES[kv])))

    def costs(self, kv: str) -> Costs:
        """Return what a GPU holds besides weights."""
        spec = self.model.spec
        return Costs(
            lambda context: allocated_cache_nbytes(spec, CacheSizes(1, context, kv_types(KV_DTYPES[kv]))),
            workspace_nbytes(spec, 1, 512, torch.bfloat16),
            overhead_nbytes=self.overhead_nbytes,
        )

    def plan(self, policy: str, context: int, kv: str = "bf16") -> Plan | None:
        """Return the plan, of single layers under auto and of four under on; None where none fits."""
        request = PlanRequest(
            policy, KEPT[policy], BUDGET, 1 if policy == "on" else None, "async", None, context, False
        )
        sizes = self.grouped if policy == "on" else self.single
        try:
            return plan_streaming(sizes, request, self.costs(kv), DEVICE)
        except PlanError:
            return None

    def smallest(self, context: int, kv: str) -> int:
        """Return the bytes of the smallest plan."""
        request = PlanRequest("auto", "most", 1, None, "async", None, context, False)
        try:
            plan_streaming(self.single, request, self.costs(kv), DEVICE)
        except PlanError as error:
            if not isinstance(error.smallest, Plan):
                raise
            return error.smallest.total_nbytes
        raise AssertionError("a budget of one byte was enough")


def open_case(name: str, format_name: str) -> Case:
    """Return a case; every weight is on the meta device."""
    hidden, intermediate, layers, heads, kv_heads, vocab = SHAPES[name]
    settings = compose_settings(["model=llama3", "model.checkpoint=random:"])
    settings.model.random_config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": max(CONTEXTS.values()),
        "tie_word_embeddings": False,
    }
    model = open_model(settings.model, 0, Path("unused"), lambda *_: None)
    packing = PackingPolicy(TorchBackend(), "wide", FORMATS[format_name])
    decoder, loader = match_model(model, torch.bfloat16, packing)
    sizes = [sizes_of(decoder, loader.is_tied, split_layers(len(decoder.layers), size)) for size in (1, SEED_GROUP)]
    overhead = overhead_nbytes(model.spec, decoder, 1, True, torch.bfloat16)
    return Case(name, format_name, model, overhead, *sizes)


def plan_rows(cases: Mapping[tuple[str, str], Case], context: str, rates: Rates) -> Iterator[list[str]]:
    """Yield a row for each case: what stays and what streams under auto, and everything streamed in groups of four."""
    tokens = CONTEXTS[context]
    for case, kv in itertools.product(cases.values(), KV_DTYPES):
        start = [case.name, case.format, gigabytes(case.single.total_nbytes), kv, gigabytes(case.kv_nbytes(tokens, kv))]
        auto, on = case.plan("auto", tokens, kv), case.plan("on", tokens, kv)
        if auto is None:
            yield [*start, f"does not fit: {gigabytes(case.smallest(tokens, kv))} at least", "", "", "", "", "", ""]
            continue
        stay = sum(auto.groups.is_resident(number) for number in range(1, auto.groups.num_layer_groups + 1))
        kept = "all" if not auto.groups.streamed else f"{stay} of {auto.groups.num_layer_groups}"
        yield [
            *start,
            kept,
            gigabytes(bytes_per_token(auto)),
            gigabytes(auto.total_nbytes),
            f"{predict(auto, rates).tokens_per_second:.2f}",
            gigabytes(on.groups.slots_nbytes) if on else "-",
            gigabytes(on.total_nbytes) if on else "does not fit",
            f"{predict(on, rates).tokens_per_second:.2f}" if on else "-",
        ]


def seed_rows(cases: Mapping[tuple[str, str], Case], rates: Rates) -> Iterator[list[str]]:
    """Yield the estimate's figures for ternary weights beside the plan's, at 8K."""
    for name, estimate in ESTIMATES.items():
        case = cases[name, "i2_s"]
        on, auto = case.plan("on", CONTEXTS["8K"]), case.plan("auto", CONTEXTS["8K"])
        seconds = case.single.read_nbytes / rates.memory
        yield [
            name,
            f"{estimate.gigabytes:.1f}",
            gigabytes(case.single.total_nbytes),
            estimate.groups,
            str(len(case.grouped.groups)),
            str(estimate.milliseconds),
            f"{1e3 * (on.groups.streamed_nbytes / rates.link):.0f}" if on else "-",
            estimate.loss,
            loss(on, rates, seconds),
            loss(auto, rates, seconds),
        ]


def loss(plan: Plan | None, rates: Rates, resident_seconds: float) -> str:
    """Return how much slower than all-resident weights the plan decodes."""
    if plan is None:
        return "does not fit"
    return f"{1 - resident_seconds / predict(plan, rates).seconds:.0%}".replace("%", " %")


def component_rows(cases: Mapping[tuple[str, str], Case]) -> Iterator[list[str]]:
    """Yield the parts of the estimate's memory budget beside the plan's."""
    seven, seventy = cases["Llama 2 7B", "i2_s"], cases["Llama 2 70B", "i2_s"]
    for kv, estimate in (("q4_0", "8-10 (4 bits)"), ("bf16", "-")):
        sizes = [gigabytes(case.kv_nbytes(CONTEXTS["128K"], kv)) for case in (seven, seventy)]
        yield [f"KV cache, 128K, {kv}", estimate, *sizes]
    for label in ("Active group, four layers", "Prefetch buffer"):
        yield [label, "0.2", gigabytes(max(seven.grouped.groups)), gigabytes(max(seventy.grouped.groups))]
    work = [workspace_nbytes(case.model.spec, 1, 512, torch.bfloat16) for case in (seven, seventy)]
    yield ["Activations, 512 tokens", "1", gigabytes(work[0]), gigabytes(work[1])]
    overheads = [gigabytes(case.overhead_nbytes) for case in (seven, seventy)]
    yield ["CUDA: libraries, graphs, unpacking", "1", *overheads]
    yield ["CUDA: the driver's context", "in that", "outside the budget", "outside the budget"]


def gigabytes(nbytes: float) -> str:
    """Return a number of bytes in GB."""
    return f"{nbytes / 1e9:.2f}"


def table(columns: list[str], rows: Iterator[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(cases: Mapping[tuple[str, str], Case], rates: Rates) -> str:
    """Return the page."""
    columns = ["model", "format", "weights", "kv_dtype", "KV", "layers that stay", "streamed", "total", "tokens/s"]
    columns += ["on: slots", "on: total", "on: tokens/s"]
    estimate = ["model", "weights: estimate", "plan", "groups: estimate", "plan", "ms to move all: estimate", "plan"]
    estimate += ["slower: estimate", "plan, on", "plan, auto"]
    link, memory = rates.link / 1e9, rates.memory / 1e9
    return f"""# Plans of real model shapes under 14 GiB

Written by `python benchmarks/plan_tables.py` from the planner (`planning/planner.py`): sizes are those of
shapes and formats, no weight was loaded, and **no speed was measured**. Sizes are in GB, 1e9 bytes. Predicted tokens/s
are those of one sequence, with a link of {link:.0f} GB/s and a memory bandwidth of {memory:.0f} GB/s (`--link`,
`--memory`): the time per token is the longer of copying and computing (`planning/prediction.py`). The KV cache
is bf16, or q4_0 with 4.5 bits a number (`kv_dtype`); q8_0 takes 8.5. Llama 2 was trained for a context of 4K, so its
rows for longer contexts only show sizes. i2_s has 2 bits for a weight of a layer; its head is q6_k and its embedding
table q4_k. Activations are those of a prefill chunk of 512 tokens. The memory of CUDA's libraries and captured graphs
is an estimate (`planning/gpu_overhead.py`) and part of every total; the driver's context is not counted, because it is
allocated before free memory is queried.

`auto` keeps as many layers as fit; `on` streams four layers at a time and the head, with one group read ahead.

## 8K

{table(columns, plan_rows(cases, "8K", rates))}

## 128K

{table(columns, plan_rows(cases, "128K", rates))}

## Comparison with the original estimate

The original specification of layer streaming (its sections 5.1 to 5.3) has an estimate for ternary weights under 14 GB.
Memory, in GB:

{table(["part", "estimate", "plan, Llama 2 7B", "plan, Llama 2 70B"], component_rows(cases))}

Weights in GB and time, at 8K:

{table(estimate, seed_rows(cases, rates))}

Where the estimate is wrong:

- **Speed.** It expects that compute hides the copies of small models and half of those of a large one. In decode a
  weight is used once for each token, so computing a group takes as long as reading it from memory, and copying it takes
  {memory / link:.0f} times as long here. With everything streamed the loss is the same for every size. What helps
  is to stream less: with `auto` models that fit lose nothing, and others lose the time to copy the rest. Prefill and
  large batches are different: there a copy serves many tokens.
- **Weights.** It counts 1.6 bits for each weight. Ternary weights take 2 bits in memory (i2_s), and embedding table and
  head are not ternary.
- **Groups.** 60 layers are 15 groups of four, and 80 layers are 20.
- **KV cache.** A model without grouped-query attention keeps the keys and values of every head: at 128K those of
  the 7B shape do not fit in 14 GiB even with `kv_dtype=q4_0`; those of the 70B shape do, with 8 of 64 heads. A number
  takes 4.5 bits, its part of a block's scale included.
- **Link.** 32 GB/s is PCIe 4.0 with 16 lanes or 5.0 with 8, before overhead; 5.0 with 16 lanes has 63.
"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", type=float, default=32.0, help="1e9 bytes/s; the default is that of the estimate")
    parser.add_argument("--memory", type=float, default=960.0, help="1e9 bytes/s; a 16 GB card with GDDR7")
    parser.add_argument("--output", type=Path, default=PAGE)
    asked = parser.parse_args()
    cases = {(name, form): open_case(name, form) for name in SHAPES for form in FORMATS}
    asked.output.write_text(page(cases, Rates(asked.link * 1e9, asked.memory * 1e9)), encoding="utf-8")
    print(f"{asked.output}: {len(cases)} shapes and formats, {len(CONTEXTS)} contexts")


if __name__ == "__main__":
    main()
