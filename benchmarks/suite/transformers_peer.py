"""transformers on random weights, as a process of its own: a static cache and a compiled forward for decode.

    python transformers_peer.py DEVICE CONTEXT < lines                 (peer_answers.py has the lines)

Nothing of the timed loop waits for the host: the token stays on the device until the end.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from suite.peer_answers import answer, prompt_of


class StaticPeer:
    """A model in bf16; prefill runs eager, decode compiled and captured (mode="reduce-overhead")."""

    def __init__(self, config: dict[str, Any], device: torch.device, context: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

        made = AutoConfig.for_model(**config)
        torch.manual_seed(0)
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()
        self.device = device
        self.cache = StaticCache(config=self.model.config, max_cache_len=context)
        self.is_whole = True
        self.step: Callable[..., Any] = self.model.forward

    def compile(self, **how: str) -> None:
        """Compile a token's forward and run it until it is captured; where it is no whole graph, with breaks in it.

        Args:
            how: torch.compile's.
        """
        for self.is_whole in (True, False):
            self.step = torch.compile(  # type: ignore[call-overload]  # its options
                self.model.forward, fullgraph=self.is_whole, dynamic=False, **how
            )
            try:
                self.decode(self.prefill(prompt_of(8)), 8, 4)
            except torch._dynamo.exc.TorchDynamoException as error:
                if not self.is_whole:
                    raise
                print(f"no whole graph: {error}", file=sys.stderr)
            else:
                return

    def weight_nbytes(self) -> int:
        """Return the bytes of parameters, the embedding table left out unless it is the head."""
        parameters: dict[int, int] = {each.data_ptr(): each.nbytes for each in self.model.parameters()}
        table = self.model.get_input_embeddings().weight
        is_tied: bool = table.data_ptr() == self.model.get_output_embeddings().weight.data_ptr()
        return sum(parameters.values()) - (0 if is_tied else int(table.nbytes))

    @torch.no_grad()
    def prefill(self, prompt: list[int]) -> torch.Tensor:
        """Empty the cache, run the prompt; return the next token, [1, 1] on the device."""
        self.cache.reset()
        ids = torch.tensor([prompt], device=self.device)
        positions = torch.arange(len(prompt), device=self.device)[None]
        out = self.model(ids, past_key_values=self.cache, position_ids=positions, logits_to_keep=1)
        token: torch.Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        return token

    @torch.no_grad()
    def decode(self, token: torch.Tensor, start: int, new_tokens: int) -> list[int]:
        """Return that many greedy tokens."""
        chosen = []
        position = torch.tensor([[start]], device=self.device)
        for _ in range(new_tokens):
            torch.compiler.cudagraph_mark_step_begin()
            out = self.step(token, past_key_values=self.cache, position_ids=position)
            token = out.logits[:, -1].argmax(-1, keepdim=True).clone()
            position = position + 1
            chosen.append(token)
        return torch.cat(chosen, dim=1)[0].tolist()

    def name(self) -> str:
        """Return transformers' version, and whether its forward is one graph."""
        import transformers

        whole = "compiled whole" if self.is_whole else "compiled with graph breaks"
        return f"transformers {transformers.__version__}, static cache, {whole}"


def make(config: dict[str, Any], device: torch.device, context: int) -> StaticPeer:
    """Return a peer that has compiled its step; without a GPU, where nothing can be captured, one that has not."""
    peer = StaticPeer(config, device, context)
    if device.type == "cuda":
        peer.compile(mode="reduce-overhead")
    return peer


if __name__ == "__main__":
    answer(make)
