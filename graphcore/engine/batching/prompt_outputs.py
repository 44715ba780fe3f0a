"""What requests ask of their prompts: log probabilities of its tokens, or an embedding, from its own chunks.

Legend: T tokens of a chunk, D model dim, V vocab.
"""

from collections.abc import Iterator

from torch import Tensor

from graphcore.engine.forward_pass import RowChunk
from graphcore.engine.output import PromptLogprob
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.sampler import likeliest_of
from graphcore.engine.scoring import SLICE_LOGITS, slice_tokens
from graphcore.kernels.backend import NativeBackend
from graphcore.kernels.cpu.kernel_packing import DENSE_TOKENS


class PromptOutputs:
    """Computes prompt log probabilities and embeddings from the hidden states of each prompt chunk after its pass."""

    def __init__(self, runner: ProgramRunner) -> None:
        self._runner = runner

    def read(self, request: Request, chunk: RowChunk, hidden: Tensor) -> None:
        """Add what a chunk gives to the outputs of its request.

        Args:
            hidden: [1, T, D] residual stream after the last block.
        """
        if not self._runner.builder.decoder.has_ends:
            return  # another process has the head, and the request
        if request.pooled is not None:
            request.pooled.add(self._runner.final_norm(hidden)[0])
        if request.num_prompt_logprobs is not None:
            self._add_logprobs(request, chunk, hidden)

    def _add_logprobs(self, request: Request, chunk: RowChunk, hidden: Tensor) -> None:
        """Append the log probabilities of the prompt's tokens that follow those of the chunk, unless they are known."""
        prompt, known = request.prompt_ids, request.prompt_logprobs
        for start, logits in self._logits_of(hidden):
            for at, row in enumerate(logits, start=chunk.start + start + 1):
                # Known ones run again after their pages were taken; after the prompt's last token comes a new one.
                if at == len(known) < len(prompt):
                    logprobs, top = row.log_softmax(dim=-1), request.num_prompt_logprobs or 0
                    token_id = prompt[at]
                    known.append(PromptLogprob(token_id, float(logprobs[token_id]), likeliest_of(logprobs, top)))

    def _logits_of(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield logits after the tokens of a chunk, slice by slice: the first token's number, and [t, V] float32.

        No slice is shorter than `DENSE_TOKENS` unless the chunk is, so that C++ kernels give each row the bits that it
        has in the whole chunk.
        """
        length = hidden.shape[1]
        is_native = isinstance(self._runner.backend, NativeBackend)  # other kernels' bits depend on the slice's length
        most = max(slice_tokens(self._runner), DENSE_TOKENS) if is_native else SLICE_LOGITS // self._runner.sizes.vocab
        most = max(most, 2)
        at = 0
        while at < length:
            end = length if length - at < most + DENSE_TOKENS else at + most
            (logits,) = self._runner.project([hidden[:, at:end]])
            yield at, logits[0]
            at = end
