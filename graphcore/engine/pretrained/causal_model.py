"""An engine as a transformers model: token ids in, logits out, so that `generate` and all that builds on it run.

Legend: B batch, T tokens, P columns that the cache holds, K columns with logits, D model dim, V vocab.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from graphcore.engine.pretrained.padded_batch import PaddedBatch
from graphcore.engine.pretrained.pretrained_config import generation_config, pretrained_config
from graphcore.engine.pretrained.sequence_cache import EngineCache
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.sequence_state import Extension
from graphcore.errors import ConfigError

if TYPE_CHECKING:
    from graphcore.engine.engine import Engine

# transformers 5.24 calls the cache "cache", earlier versions "past_key_values"
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
logger = logging.get_logger(__name__)


class GraphcoreForCausalLM(PreTrainedModel, GenerationMixin):
    """A transformers model without weights of its own, which asks an engine for logits.

    `generate` is transformers' own: searches, logits processors, stopping criteria and streamers run as they do there.

    Attributes:
        engine: Engine, engine that computes the logits; the model cannot be used after it is closed.
    """

    main_input_name = "input_ids"

    def __init__(self, engine: "Engine") -> None:
        config = pretrained_config(engine.loaded)
        config._attn_implementation = "eager"  # attention runs in the engine
        super().__init__(config)
        self.engine = engine
        self._uses_cache = bool(config.get_text_config().to_dict().get("use_cache", True))
        self.post_init()
        self.generation_config = generation_config(engine.loaded)
        self.eval()

    @property
    def device(self) -> torch.device:
        """Device that logits are on."""
        return self.engine.choices.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype; logits are float32."""
        return self.engine.choices.dtype

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Run tokens after those that the cache holds.

        Args:
            input_ids: [B, T] int64.
            attention_mask: [B, P + T], 0 where a column is padding; None for no padding.
            position_ids: [B, T]; must number the tokens of each row, padding left out, as `generate` does.
            past_key_values, cache: cache that an earlier call returned; two names of one argument. It is updated.
            inputs_embeds, output_attentions: refused; the engine takes token ids, and has no attention weights.
            labels: [B, T] int64, -100 for none; the loss is that of the next tokens.
            use_cache: True returns a cache; None is the config's choice.
            logits_to_keep: number of last columns with logits, 0 for all; or the columns, [K] int64.
            output_hidden_states: True also returns the hidden states, the last ones after the final norm.
            **kwargs: arguments of the loss.

        Returns:
            Logits [B, K, V] float32, zeros where a column is padding; loss, hidden states and cache if requested.

        Raises:
            ConfigError: an argument is refused, has another shape, or is longer than the context.
            BusyError: as for `Engine.logits`.
        """
        if output_attentions:
            raise ConfigError("output_attentions: an engine never has its attention weights in memory; leave it out")
        if input_ids is None or inputs_embeds is not None:
            raise ConfigError("inputs_embeds: an engine takes token ids; give input_ids")
        past = self._past_of(past_key_values if cache is None else cache)
        batch = PaddedBatch.of(input_ids, attention_mask, past.rows.get_seq_length())
        batch.check_positions(position_ids, past.rows.num_tokens(len(input_ids)))
        num_logits = logits_to_keep if isinstance(logits_to_keep, int) and logits_to_keep else input_ids.shape[1]
        keeps_states = self._uses_cache if use_cache is None else use_cache
        found = self._extend(past, batch, num_logits, bool(output_hidden_states), keeps_states)
        logits = batch.spread(found.logits, num_logits)
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep.to(logits.device)]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
        hidden = self._hidden_states(batch, found.hidden_states) if output_hidden_states else None
        output = CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=hidden)
        if keeps_states:
            output[CACHE] = past
        return output

    def new_cache(self) -> EngineCache:
        """Return an empty cache for `past_key_values`."""
        return EngineCache(self.engine.choices.context_length)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ConfigError: the weights are the engine's."""
        raise ConfigError("save_pretrained: this model has no weights of its own; task=pack writes those of an engine")

    def _past_of(self, cache: Cache | None) -> EngineCache:
        """Return the cache of a call."""
        if cache is None:
            return self.new_cache()
        if not isinstance(cache, EngineCache):
            raise ConfigError(
                f"past_key_values is a {type(cache).__name__}, which an engine cannot fill; leave it out, or give what "
                "this model returned or made (model.new_cache())"
            )
        return cache

    def _extend(
        self, past: EngineCache, batch: PaddedBatch, num_logits: int, output_hidden_states: bool, keeps_states: bool
    ) -> Extension:
        """Run the tokens of a batch after those of the cache, in rows that have some, and update the cache."""
        sequences = past.rows.sequences_of(len(batch.ids))
        begun = [(sequence, new) for sequence, new in zip(sequences, batch.tokens, strict=True) if new]
        rows = [[*sequence.pending, *new] for sequence, new in begun]
        states = [sequence.states[-1] for sequence, _ in begun]
        found = self.engine.extend(rows, states, num_logits, output_hidden_states, keeps_states)
        if keeps_states:
            past.rows.append(sequences, batch.columns, found.states)
        return found

    def _hidden_states(self, batch: PaddedBatch, rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Return the residual stream of each layer [B, T, D], the last one after the final norm, as transformers."""
        runner = self.engine.runner
        assert isinstance(runner, ProgramRunner), "Engine.extend has refused other runners"
        layers = [batch.spread(layer, batch.ids.shape[1]).to(self.device) for layer in zip(*rows, strict=True)]
        with torch.inference_mode():
            last = runner.builder.decoder.head.norm(layers[-1])
        return (*layers[:-1], last.clone())

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: object = None,
        batch_size: int = 0,
        max_cache_length: int = 0,
    ) -> bool:
        """Give `generate` a cache of the engine's, which it crops if this model drafts for another."""
        if generation_config.cache_implementation not in (None, "hybrid", "dynamic"):
            logger.warning_once(
                f"cache_implementation={generation_config.cache_implementation} has no effect: the engine has its own "
                "cache (kv_dtype, streaming)"
            )
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = self.new_cache()
        self._end_at_context(generation_config, model_kwargs.get("position_ids"))
        if generation_config.is_assistant and model_kwargs.get(CACHE) is not None:
            model_kwargs[CACHE].activate_past_recording()
        return True

    def _end_at_context(self, generation_config: GenerationConfig, position_ids: Tensor | None) -> None:
        """Lower `max_length` to where the longest row fills the context; `Engine.generate` ends there as well.

        A prompt that is longer than the context is left to `forward`, which refuses it.

        Args:
            position_ids: [B, T], numbers of the prompt's tokens, padding left out.
        """
        context = self.engine.choices.context_length
        if position_ids is None or int(position_ids.max()) >= context:
            return
        columns = position_ids.shape[1]
        padding = columns - 1 - int(position_ids.max())
        beyond = max(0, (generation_config.prompt_lookup_num_tokens or 1) - 1)  # drafts are not cut at max_length
        most = max(columns, padding + context - beyond) + 1  # the last token is not run
        if generation_config.max_length > most:
            logger.warning_once(
                f"max_length={generation_config.max_length} is more than context_length={context} allows: generation "
                f"ends at {most}; load the engine with a larger context_length for more"
            )
            generation_config.max_length = most
