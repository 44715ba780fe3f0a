"""transformers on random weights, as a process of its own: a static cache and a compiled forward for decode.

    python transformers_peer.py DEVICE CONTEXT < lines

The first line of standard input is the config of the model as JSON. It then says that it is ready with a line of JSON,
and answers each line "prompt_tokens new_tokens" with another. Nothing of the timed loop waits for the host: the token
stays on the device until the end.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


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
        self.step = self.compiled(fullgraph=True) if device.type == "cuda" else self.model.forward  # a dry run's

    def compiled(self, fullgraph: bool) -> Callable[..., Any]:
        """Return the forward, compiled and captured at its first call."""
        return torch.compile(self.model.forward, fullgraph=fullgraph, dynamic=False, mode="reduce-overhead")

    def first_decode(self, prompt_tokens: int) -> None:
        """Compile; where the model is no whole graph, with breaks in it."""
        try:
            self.decode(self.prefill(prompt_of(prompt_tokens)), prompt_tokens, 4)
        except torch._dynamo.exc.TorchDynamoException as error:
            print(f"no whole graph: {error}", file=sys.stderr)
            self.is_whole, self.step = False, self.compiled(fullgraph=False)
            self.decode(self.prefill(prompt_of(prompt_tokens)), prompt_tokens, 4)

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

    def run(self, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
        """Return tokens/s of a prefill and of a decode after it."""
        prompt = prompt_of(prompt_tokens)
        began = time.perf_counter()
        token = self.prefill(prompt)
        token.item()
        middle = time.perf_counter()
        chosen = self.decode(token, prompt_tokens, new_tokens)
        ended = time.perf_counter()
        rates = {"prefill": prompt_tokens / (middle - began), "decode": new_tokens / (ended - middle)}
        return {**rates, "tokens": chosen[:8]}


def prompt_of(tokens: int) -> list[int]:
    """Return the prompt that both engines run."""
    return [(7 * index) % 400 + 100 for index in range(tokens)]


def main() -> None:
    device, context = torch.device(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    import transformers

    peer = StaticPeer(json.loads(sys.stdin.readline()), device, context)
    peer.first_decode(8)
    whole = "compiled whole" if peer.is_whole else "compiled with graph breaks"
    ready = {"weight_bytes": peer.weight_nbytes(), "transformers": f"{transformers.__version__} ({whole})"}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        prompt_tokens, new_tokens = map(int, line.split())
        print(json.dumps(peer.run(prompt_tokens, new_tokens)), file=answers, flush=True)


if __name__ == "__main__":
    main()
