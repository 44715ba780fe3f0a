"""The runner of a transformers model: prefill in chunks, decode token by token, over caches that the model makes.

With graph=compiled the layers of decode steps are compiled (compiled_layers.py).

A decode program has one step, which is a whole pass. The pass acquires its weights itself, group by group
(layer_hooks.py), so the program runs under a policy that moves nothing.

Legend: B batch, T tokens, D model dim, H heads, V vocab.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from graphcore.engine.fallback.cached_model import CachedModel, HeldCache, PassStep
from graphcore.engine.fallback.compiled_layers import CompiledLayers
from graphcore.engine.fallback.layer_hooks import LayerHooks, recording
from graphcore.engine.fallback.skeleton_weights import SkeletonWeights
from graphcore.engine.loading.runtime_config import RuntimeConfig
from graphcore.engine.model_runner import RunnerSizes, StaticRunner
from graphcore.errors import ConfigError, UnsupportedError
from graphcore.graph.program import Program
from graphcore.graph.state import StepState
from graphcore.graph.step import GreedyStep, Step
from graphcore.kernels.backend import prebuilt_backend
from graphcore.kvcache.forward_sequences import ForwardCache
from graphcore.planning.workspace import scored_tokens
from graphcore.progress import Progress, ignore_progress
from graphcore.sampling_params import SamplingParams
from graphcore.streaming.policy import Policy, Resident


class TransformersRunner(StaticRunner):
    """Runner of a transformers skeleton whose weights are bound.

    Args:
        weights: weights that are bound for good, or to slots that `policy` fills.
        policy: streaming policy that layer groups and the head's slices are acquired from.
        runtime: device and sizes.
        longest: most tokens that the model was trained for.
        compiled: compiled layers of the skeleton; None if all run eager.
    """

    def __init__(
        self,
        weights: SkeletonWeights,
        policy: Policy,
        runtime: RuntimeConfig,
        longest: int,
        spare_nbytes: int,
        compiled: CompiledLayers | None = None,
    ) -> None:
        self.policy = Resident()
        self.device = runtime.device
        self.backend = prebuilt_backend(self.device)  # it only samples tokens, which is not worth a build
        self.skeleton = skeleton = weights.skeleton
        vocab = weights.weights[skeleton.head_weight].shape[0]
        self.sizes = RunnerSizes(runtime.batch_size, runtime.prefill_chunk, vocab, runtime.context_length, longest)
        self.scored_tokens = scored_tokens(vocab, spare_nbytes)
        layers = skeleton.layer_modules()
        groups = [[layers[index] for index in group.layers] for group in weights.layer_groups]
        whole = [skeleton.model.get_submodule(skeleton.head)]
        heads = whole if skeleton.sliced_head is None else skeleton.sliced_head.slices
        self.hooks = LayerHooks(skeleton.model, groups, heads, policy)
        self.cached = CachedModel(skeleton, self.hooks, self.device, compiled)

    @property
    def num_compiled(self) -> int:
        """Number of compiled graphs, those of layers."""
        compiled = self.cached.compiled
        return 0 if compiled is None else compiled.num_compiled

    @property
    def needs_equal_lengths(self) -> bool:
        """Whether prompts that begin together must have one length: the model cannot leave padding out."""
        return "attention_mask" not in self.cached.takes

    def width(self, num_sequences: int) -> int:
        """Return the number of rows of a pass for that many sequences: one for each."""
        most = self.sizes.batch_size
        assert num_sequences <= most, f"{num_sequences} sequences in a batch of {most}"
        return num_sequences

    def program(self, phase: str, width: int, is_greedy: bool = False) -> Program:
        """Return a program that decodes one token of each row, the only one that there is."""
        assert phase == "decode", f"a transformers model has no program for {phase}"
        state = StepState.empty(width, 1, self.device)
        steps: list[Step] = [PassStep(0, state, self.cached)]
        return Program(state, [*steps, GreedyStep(0, state)] if is_greedy else steps)

    def num_passes(self, lengths: Sequence[int], start: int = 0) -> int:
        """Return the number of passes over the weights in which `extend` runs rows of these lengths from `start` on."""
        return -(-max(lengths) // self.sizes.prefill_chunk)

    def release(self) -> None:
        """Do nothing: nothing was captured."""

    @torch.inference_mode()
    def warm_up(self, num_sequences: int, params: SamplingParams | None = None) -> None:
        """Compile the layers for decode batches of that many sequences of equal length, unless they run eager."""
        self.cached.build(num_sequences, is_padded=False)

    def lend_cache(self, rows: Sequence[int], tokens: int) -> Callable[[], None]:
        """Use an empty cache until the returned function restores the old one; do nothing without rows."""
        if not rows:
            return lambda: None
        kept, self.cached = self.cached, self.cached.empty()

        def restore() -> None:
            self.cached = kept

        return restore

    def new_state(self) -> HeldCache:
        """Return an empty state for `extend_state`."""
        return HeldCache()

    def extend_state(self, state: ForwardCache, hidden: Tensor, start: int) -> Tensor:
        """Run hidden states [B, T, D] through all blocks after the tokens of a state, and update the state."""
        assert isinstance(state, HeldCache), "a state of this runner"
        self.cached = state.cached or self.cached.empty()
        try:
            found = self.blocks(hidden, start)
            state.cached = self.cached
        finally:
            self.cached = self.cached.empty()
        return found

    def reusable(self, cached: Sequence[int], prompt: Sequence[int]) -> int:
        """Return the length of `cached` if the prompt begins with it and the cache holds exactly that, else 0."""
        goes_on = len(prompt) > len(cached) and list(prompt[: len(cached)]) == list(cached)
        return len(cached) if goes_on and self.cached.held == len(cached) and self.cached.mask is None else 0

    @torch.inference_mode()
    def extend(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], on_progress: Progress = ignore_progress
    ) -> Tensor:
        """Append tokens to the rows' caches and return the logits after each row's last, [len(rows), V] float32."""
        self.sizes.check_context(max(start + len(ids) for start, ids in zip(starts, rows, strict=True)))
        if not any(starts):
            self.cached.restart(list(map(len, rows)))
        assert self.cached.mask is None or not any(starts), "rows of different lengths go on by decoding only"
        output, done, total = None, 0, max(map(len, rows))
        for token_ids, positions in self._chunks(rows):
            output = self.cached.run(token_ids, positions)
            done += token_ids.shape[1]
            on_progress("prefill", None, min(done, total), total)
        assert output is not None, "there is no token to run"
        logits: Tensor = output.logits[:, -1].float()
        return logits

    @torch.inference_mode()
    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return teacher-forced logits of rows of one length, from empty caches: [B, T, V] float32 on the CPU."""
        parts = [self.cached.run(*chunk, all_logits=True).logits.float().cpu() for chunk in self._from_empty(rows)]
        return torch.cat(parts, dim=1)

    @torch.inference_mode()
    def logit_slices(self, token_ids: Sequence[int], first: int) -> Iterator[Tensor]:
        """Yield teacher-forced logits of a sequence, from an empty cache, slice by slice: [t, V] float32."""
        done = 0
        self._begin([token_ids])
        for ids, positions in self._chunks([token_ids], min(self.scored_tokens, self.sizes.prefill_chunk)):
            done += ids.shape[1]
            if done <= first:
                self.cached.run(ids, positions)
                continue
            logits = self.cached.run(ids, positions, all_logits=True).logits[0]
            yield logits[max(0, first - done + len(logits)) :].float()
            del logits

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Return the residual stream after the embedding and after each block, from empty caches: [B, T, D] each."""
        chunks: list[list[Tensor]] = []
        for chunk in self._from_empty(rows):
            self.cached.prepare(chunk[0])  # outside: it runs the layers
            with recording(self.hooks.layers) as seen:
                self.cached.run(*chunk)
            chunks.append([layer.cpu() for layer in seen])
        return tuple(torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True))

    @torch.inference_mode()
    def attentions(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Return each layer's attention weights, [B, H, T, T]; the rows run in one pass, however long.

        Raises:
            ConfigError: model.attention is not eager: other implementations never have the weights.
            UnsupportedError: the model does not return them.
        """
        if self.skeleton.attention != "eager":
            raise ConfigError(
                f"model.attention={self.skeleton.attention} never has the attention weights in memory; load the model "
                "with model.attention=eager to get them"
            )
        self._begin(rows)
        found = self.cached.run(torch.tensor(rows, device=self.device, dtype=torch.int64), attentions=True).get(
            "attentions"
        )
        if not found:
            raise UnsupportedError(f"{type(self.skeleton.model).__name__} does not return its attention weights")
        return tuple(layer.cpu() for layer in found)

    @torch.inference_mode()
    def blocks(self, hidden: Tensor, start: int = 0) -> Tensor:
        """Run hidden states [B, T, D] through all layers, after the first `start` positions; returns [B, T, D]."""
        num_rows, length = hidden.shape[:2]
        parts = []
        done = 0
        rows = [[0] * length] * num_rows
        self.sizes.check_context(start + length)
        for token_ids, positions in self._chunks(rows) if start else self._from_empty(rows):
            upto = done + token_ids.shape[1]
            piece = hidden[:, done:upto].to(self.device, self.skeleton.model.dtype)
            self.cached.prepare(token_ids)
            with self.hooks.starting_from(piece), recording(self.hooks.layers) as seen:
                self.cached.run(token_ids, positions)
            parts.append(seen[-1])
            done = upto
        return torch.cat(parts, dim=1)

    def _begin(self, rows: Sequence[Sequence[int]]) -> None:
        lengths = list(map(len, rows))
        self.sizes.check_context(max(lengths))
        self.cached.restart(lengths)

    def _from_empty(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, Tensor | None]]:
        self._begin(rows)
        yield from self._chunks(rows)

    def _chunks(self, rows: Sequence[Sequence[int]], most: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the next columns of the rows, padded at the left: token ids and, if any is padded, positions [B, T].

        Args:
            most: most columns at once; 0 for the chunk of prompts.
        """
        longest = max(map(len, rows))
        padded = [[0] * (longest - len(ids)) + list(ids) for ids in rows]
        token_ids = torch.tensor(padded, dtype=torch.int64, device=self.device)
        positions = None
        if self.cached.mask is not None:
            positions = (self.cached.mask.cumsum(dim=1) - 1).clamp(min=0)
        most = most or self.sizes.prefill_chunk
        for begin in range(0, longest, most):
            end = begin + most
            yield token_ids[:, begin:end], None if positions is None else positions[:, begin:end]
