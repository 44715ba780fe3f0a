"""llama.cpp on the CPU, as llama-cpp-python builds it; of a model larger than memory the file is mapped."""

import numpy as np
from peer import OnToken, Peer, PeerEngine, StreamedRun, StreamingEngine, StreamingPeer


def gguf_weight_nbytes(path: str) -> int:
    """Return the bytes of weights in a GGUF file that a decode step reads."""
    from gguf import GGUFReader

    tensors = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(path).tensors}
    if "output.weight" in tensors:
        del tensors["token_embd.weight"]
    return sum(tensors.values())


class LlamaCpp(PeerEngine):
    def __init__(self, path: str, threads: int, context: int) -> None:
        import llama_cpp

        self.llama = llama_cpp.Llama(
            path, n_ctx=context, n_batch=512, n_threads=threads, n_threads_batch=threads, n_gpu_layers=0, verbose=False
        )
        self.vocab = self.llama.n_vocab()
        self.path = path

    def weight_nbytes(self) -> int:
        return gguf_weight_nbytes(self.path)

    def prefill(self, token_ids: list[int]) -> int:
        self.llama.reset()
        self.llama.eval(token_ids)
        return self._likeliest()

    def extend(self, token_ids: list[int]) -> int:
        self.llama.eval(token_ids)
        return self._likeliest()

    def decode(self, token_id: int, new_tokens: int) -> list[int]:
        chosen = []
        for _ in range(new_tokens):
            self.llama.eval([token_id])
            token_id = self._likeliest()
            chosen.append(token_id)
        return chosen

    def _likeliest(self) -> int:
        logits = self.llama._ctx.get_logits()
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())


class MappedLlamaCpp(StreamingEngine):
    packages = ("llama-cpp-python",)

    def __init__(self, run: StreamedRun) -> None:
        self.engine = LlamaCpp(run.source, run.threads, run.context)  # maps the file unless told not to

    def generate(self, token_ids: list[int], new_tokens: int, on_token: OnToken) -> list[int]:
        chosen = [self.engine.prefill(token_ids)]
        on_token()
        while len(chosen) < new_tokens:
            chosen += self.engine.decode(chosen[-1], 1)
            on_token()
        return chosen


LLAMA_CPP = Peer("llama.cpp", LlamaCpp)
MAPPED = StreamingPeer("llama.cpp", MappedLlamaCpp)
