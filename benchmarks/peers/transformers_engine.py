"""transformers in bf16, eager or compiled; of a model larger than memory, accelerate keeps layers on the disk."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from peer import OnToken, Peer, PeerEngine, StreamedRun, StreamingEngine, StreamingPeer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache, PreTrainedModel


class Transformers(PeerEngine):
    def __init__(self, path: str, threads: int, context: int, compiles: bool = False) -> None:
        import torch
        from transformers import DynamicCache, StaticCache

        torch.set_num_threads(threads)
        self.model = transformers_model(path)
        self.cache: Cache = StaticCache(config=self.model.config, max_cache_len=context) if compiles else DynamicCache()
        self.new_cache: Callable[[], Cache] = self._emptied_cache if compiles else DynamicCache
        self.step = self.model.forward
        if compiles:
            self.step = torch.compile(self.model.forward, fullgraph=True, dynamic=False)

    def weight_nbytes(self) -> int:
        parameters = {parameter.data_ptr(): parameter.nbytes for parameter in self.model.parameters()}
        table = self.model.get_input_embeddings().get_parameter("weight")
        is_tied = table.data_ptr() == self.model.get_output_embeddings().get_parameter("weight").data_ptr()
        return sum(parameters.values()) - (0 if is_tied else table.nbytes)

    def _emptied_cache(self) -> "Cache":
        self.cache.reset()
        return self.cache

    def prefill(self, token_ids: list[int]) -> int:
        import torch

        with torch.inference_mode():
            self.cache = self.new_cache()
            self.length = len(token_ids)
            positions = torch.arange(self.length)
            out = self.model.forward(
                torch.tensor([token_ids]), past_key_values=self.cache, position_ids=positions[None], logits_to_keep=1
            )
            return int(out.logits[0, -1].argmax())

    def decode(self, token_id: int, new_tokens: int) -> list[int]:
        import torch

        chosen = []
        with torch.inference_mode():
            for index in range(new_tokens):
                positions = torch.tensor([[self.length + index]])
                out = self.step(torch.tensor([[token_id]]), past_key_values=self.cache, position_ids=positions)
                token_id = int(out.logits[0, -1].argmax())
                chosen.append(token_id)
        return chosen


def transformers_model(path: str) -> "PreTrainedModel":
    """Return transformers' model of a checkpoint in bf16; of a GGUF file it gets graphcore's unpacked weights."""
    import torch

    from graphcore.config.compose import compose_settings
    from graphcore.engine.loading.open_model import open_model
    from graphcore.engine.loading.prepare_model import match_model
    from graphcore.tasks.reference.transformers_model import load_reference

    settings = compose_settings([f"model.checkpoint={path}"])
    model = open_model(settings.model, 0, settings.cache_folder, lambda *_: None)
    _, loader = match_model(model, torch.float32)
    reference = load_reference(model, loader)
    reference.cast(torch.bfloat16)
    evaluated: PreTrainedModel = reference.model.eval()
    return evaluated


def transformers_compiled(path: str, threads: int, context: int) -> Transformers:
    return Transformers(path, threads, context, compiles=True)


class DiskOffload(StreamingEngine):
    """accelerate's disk offload: layers are read from the mapped file before use and dropped after it."""

    packages = ("accelerate", "transformers", "torch")

    def __init__(self, run: StreamedRun) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(run.threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            run.source, dtype=torch.bfloat16, offload_folder=run.scratch, **self.placement(run)
        )

    def placement(self, run: StreamedRun) -> dict[str, Any]:
        return {"device_map": {"": "disk"}}

    def generate(self, token_ids: list[int], new_tokens: int, on_token: OnToken) -> list[int]:
        return generate_by_transformers(self.model, token_ids, new_tokens, on_token)


class BudgetedDiskOffload(DiskOffload):
    """The same, but what fits the budget stays in memory."""

    def placement(self, run: StreamedRun) -> dict[str, Any]:
        return {"device_map": "auto", "max_memory": {"cpu": run.budget}}


def generate_by_transformers(
    model: "PreTrainedModel", token_ids: list[int], new_tokens: int, on_token: OnToken
) -> list[int]:
    """Return the likeliest tokens by `model.generate`, none of which ends the text."""
    import torch
    from transformers.generation.streamers import BaseStreamer

    class Listener(BaseStreamer):
        has_prompt = False

        def put(self, value: "Tensor") -> None:
            if self.has_prompt:
                on_token()
            self.has_prompt = True  # the first call brings the prompt

        def end(self) -> None:
            pass

    prompt = torch.tensor([token_ids])
    out: Tensor = model.generate(  # type: ignore[operator]  # transformers' mixin is not typed as a method
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=Listener(),
    )
    new: list[int] = out[0, len(token_ids) :].tolist()
    return new


EAGER = Peer("transformers", Transformers)
COMPILED = Peer("transformers-compiled", transformers_compiled)
ON_DISK = StreamingPeer("accelerate-disk", DiskOffload)
PARTLY_ON_DISK = StreamingPeer("accelerate-auto", BudgetedDiskOffload)
