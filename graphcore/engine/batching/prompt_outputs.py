"""What requests ask of their prompts: log probabilities of its tokens, or an embedding, from its own chunks.

Legend: T tokens of a chunk, D model dim, V vocab.
"""

from torch import Tensor

from graphcore.engine.forward_pass import RowChunk
from graphcore.engine.output import PromptLogprob
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.sampler import likeliest_of


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
        """Append the log probabilities of the prompt's tokens that follow those of the chunk, slice by slice."""
        first = chunk.start + 1
        for logits in self._runner.projected_slices(hidden):
            _append_logprobs(request, first, logits)
            first += len(logits)
            del logits  # before the next slice's are made


def _append_logprobs(request: Request, first: int, logits: Tensor) -> None:
    """Append the log probabilities of a prompt's tokens from `first` on, unless they are known, from logits [t, V]."""
    prompt, known = request.prompt_ids, request.prompt_logprobs
    for at, row in enumerate(logits, start=first):
        # Known ones run again after their pages were taken; after the prompt's last token comes a new one.
        if at == len(known) < len(prompt):
            logprobs, top = row.log_softmax(dim=-1), request.num_prompt_logprobs or 0
            token_id = prompt[at]
            known.append(PromptLogprob(token_id, float(logprobs[token_id]), likeliest_of(logprobs, top)))
