"""OpenVINO GenAI on the CPU, for GGUF files that it converts when it loads them: Llama's and Qwen's shapes."""

from peer import GeneratingEngine, Peer

from peers.llama_cpp_engine import gguf_weight_nbytes


class OpenVino(GeneratingEngine):
    """`LLMPipeline.generate` of token ids, greedy."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        import numpy
        from openvino import Tensor
        from openvino_genai import GenerationConfig, LLMPipeline, TokenizedInputs

        self.path = path
        self.pipeline = LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, enable_save_ov_model=False)
        self.settings = GenerationConfig

        def inputs(prompts: list[list[int]]) -> object:
            ids = numpy.array(prompts, dtype=numpy.int64)
            return TokenizedInputs(Tensor(ids), Tensor(numpy.ones_like(ids)))

        self.inputs = inputs

    def weight_nbytes(self) -> int:
        return gguf_weight_nbytes(self.path)

    def run_together(self, prompts: list[list[int]], new_tokens: int) -> None:
        settings = self.settings(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        self.pipeline.generate(self.inputs(prompts), settings)


OPENVINO = Peer("openvino", OpenVino, packages=("openvino-genai==2026.4.1.0", "gguf==0.17.1"))
