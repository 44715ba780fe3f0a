"""AirLLM, which reads a model layer by layer from files of its own."""

from peer import OnToken, StreamedRun, StreamingEngine, StreamingPeer

from peers.transformers_engine import generate_by_transformers


class AirLLM(StreamingEngine):
    """AirLLM on the CPU; at its first load it writes a second copy of the model, one file per layer."""

    packages = ("airllm", "transformers", "torch")
    prepares = True

    def __init__(self, run: StreamedRun) -> None:
        import torch
        from airllm import AirLLMBaseModel

        class WithoutTokenizer(AirLLMBaseModel):
            def get_tokenizer(self, hf_token: str | None = None) -> None:
                """Return nothing: the runs are of token ids, and a random model has no tokenizer."""

        torch.set_num_threads(run.threads)
        streamed = WithoutTokenizer(
            run.source, device="cpu", dtype=torch.bfloat16, layer_shards_saving_path=run.scratch
        )
        self.model = streamed.model

    def generate(self, token_ids: list[int], new_tokens: int, on_token: OnToken) -> list[int]:
        return generate_by_transformers(self.model, token_ids, new_tokens, on_token)


AIRLLM = StreamingPeer("airllm", AirLLM)
