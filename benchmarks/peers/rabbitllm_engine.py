"""RabbitLLM, a later AirLLM, which reads a model layer by layer from files of its own."""

from typing import Any

from peer import OnToken, StreamedRun, StreamingEngine, StreamingPeer

from peers.transformers_engine import generate_by_transformers


class RabbitLLM(StreamingEngine):
    """RabbitLLM on the CPU; at its first load it writes a second copy of the model, one file per layer."""

    packages = ("rabbitllm", "transformers", "torch")
    prepares = True

    def __init__(self, run: StreamedRun) -> None:
        import importlib

        import torch
        from rabbitllm import AutoModel

        module, name = AutoModel.get_module_class(run.source)
        base: type[Any] = getattr(importlib.import_module(module), name)

        class WithoutTokenizer(base):
            def get_tokenizer(self, token: str | None = None) -> None:
                """Return nothing: the runs are of token ids, and a random model has no tokenizer."""

        torch.set_num_threads(run.threads)
        self.model = WithoutTokenizer(
            run.source, device="cpu", dtype=torch.bfloat16, layer_shards_saving_path=run.scratch
        )

    def generate(self, token_ids: list[int], new_tokens: int, on_token: OnToken) -> list[int]:
        return generate_by_transformers(self.model, token_ids, new_tokens, on_token)


RABBITLLM = StreamingPeer("rabbitllm", RabbitLLM)
