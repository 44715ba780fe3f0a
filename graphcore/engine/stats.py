"""What an engine says of itself in a few numbers."""

from graphcore.engine.assembly import Choices
from graphcore.engine.token_runner import TokenRunner
from graphcore.engine.weight_stream import WeightStream
from graphcore.weights.plan import Plan


def stats_of(choices: Choices, plan: Plan, runner: TokenRunner, stream: WeightStream) -> dict[str, int | str | float]:
    """Return what `Engine.stats` gives; what was captured and fetched only where something is."""
    hit_rate, captures = stream.expert_hit_rate, runner.captures
    return {
        "graph": choices.graph,
        "prefill": choices.prefill,
        "dtype": str(choices.dtype).removeprefix("torch."),
        "device": str(choices.device),
        "compiled_graphs": runner.num_compiled,
        "weight_bytes": plan.weight_nbytes,
        "kv_bytes": plan.kv_nbytes,
        **({} if captures is None else captures.stats),
        **({} if hit_rate is None else {"expert_hit_rate": hit_rate}),
    }
