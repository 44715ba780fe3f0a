"""The public face: load a model, ask for text, tokens, logits or hidden states.

Legend: B batch, T tokens, D model dim, H heads, V vocab.
"""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from graphcore.engine.batch_run import BatchRun, TokenStream
from graphcore.engine.inputs import (
    Prompt,
    check_hidden,
    check_messages,
    check_new_tokens,
    check_stops,
    equal_rows,
    is_conversation,
    params_from,
    prompts_of,
    sampling_params,
    token_row,
)
from graphcore.engine.loaded_model import LoadedModel
from graphcore.engine.sampler import SamplingParams
from graphcore.engine.sequence import Generation, TokenEvent, requests_of
from graphcore.engine.teacher_forced import teacher_forced
from graphcore.errors import ConfigError
from graphcore.tokenizer.chat_template import Message


class Engine(LoadedModel):
    """A loaded model that answers.

    Use `Engine.load`; close it, or use it as a context manager, to give its memory back. Calls may come from several
    threads: one runs at a time, the others wait for their turn, in the order in which they came. A call that would
    wait for itself, such as one inside the loop over a stream of the same engine, is refused with BusyError.

    `LoadedModel` lists the attributes.
    """

    def logits(
        self,
        token_ids: Tensor | Sequence[Sequence[int]],
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Tensor | tuple[Tensor, *tuple[tuple[Tensor, ...], ...]]:
        """Return the logits after each of the given tokens, without sampling.

        Args:
            token_ids: [B, T] int64; any B, run batch_size at a time.
            output_hidden_states: also return the residual stream after the embedding and after each block.
            output_attentions: also return each layer's attention weights (model.attention=eager of the fallback only).

        Returns:
            [B, T, V] float32 on the CPU; with more than that a tuple: logits, then num_hidden_layers + 1 hidden states
            [B, T, D], then num_hidden_layers attention weights [B, H, T, T].

        Raises:
            ConfigError: T is 0 or longer than the context or differs between rows, an id is no token, what runs never
                has attention weights, or the engine is closed.
            BusyError: it is called inside the loop over a stream of this engine.
        """
        rows = equal_rows(token_ids, self.config.vocab_size)
        with self._alone("logits") as runner:
            return teacher_forced(runner, rows, output_hidden_states, output_attentions)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Run hidden states through all blocks, at positions 0 .. T-1.

        Args:
            hidden_states: [B, T, D] residual stream; any B, run batch_size at a time.

        Returns:
            [B, T, D] residual stream, before the final norm.

        Raises:
            ConfigError: the shape is another, T is longer than the context, or the engine is closed.
            BusyError: it is called inside the loop over a stream of this engine.
        """
        check_hidden(hidden_states, self.config.hidden_size)
        with self._alone("forward") as runner:
            return torch.cat([runner.blocks(wave) for wave in torch.split(hidden_states, runner.batch_size)])

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 64,
        stop: Sequence[str] = (),
        logprobs: bool = False,
        ignore_eos: bool = False,
        **sampling: float | int,
    ) -> list[Generation]:
        """Generate for each prompt, batch_size at a time; return when all have ended.

        Args:
            prompts: one prompt or a list of them. A prompt is a text, encoded as it is; or a list of token ids, such as
                `chat_ids` returns; or the messages of a conversation, [{"role": "user", "content": "..."}], which are
                answered in the model's chat template.
            max_new_tokens: most tokens for each prompt; at least 1.
            stop: texts that end a generation, or one such text.
            logprobs: record the log probability of each new token.
            ignore_eos: go on after end-of-sequence tokens, for measurements.
            **sampling: fields of `SamplingParams`: temperature (0 is greedy), top_k, top_p, min_p, repetition_penalty,
                seed.

        Returns:
            One Generation for each prompt, in order.

        Raises:
            ConfigError: a value is out of range, a prompt is empty or longer than the context, or the engine is closed.
            TokenizerError: a text was given and the checkpoint has no tokenizer, or messages and it has no template.
            BusyError: it is called inside the loop over a stream of this engine.
        """
        rows = [self._ids(prompt) for prompt in prompts_of(prompts)]
        self.runner.check_context(max(map(len, rows), default=0))
        params = sampling_params(sampling)
        end_ids = frozenset[int]() if ignore_eos else self.end_ids
        done: list[Generation] = []
        for at in range(0, len(rows), self.runner.batch_size):
            wave = rows[at : at + self.runner.batch_size]
            run = self.open_run(wave, max_new_tokens, stop, params_from(params, at), logprobs, end_ids, name="generate")
            for _ in run.events():
                continue
            done += run.generations()
        return done

    def stream(
        self, prompt: Prompt, max_new_tokens: int = 64, stop: Sequence[str] = (), **sampling: float | int
    ) -> Generator[TokenEvent, None, None]:
        """Yield the tokens of one prompt as they are made.

        Wrong arguments are refused at once; the first token waits for the calls before it. Others wait until the stream
        has ended: run it to its end, or close it (`events.close()`); one that nobody refers to is closed by Python.

        Args:
            prompt: one prompt, as for `generate`; so are the other arguments, and errors.

        Yields:
            A TokenEvent for each new token; the last one has its `finish_reason`.
        """
        rows = prompts_of(prompt)
        if len(rows) > 1:
            raise ConfigError(f"stream takes one prompt, found {len(rows)}; use generate for several")
        return TokenStream(self.open_run(rows, max_new_tokens, stop, sampling_params(sampling)).events())

    def open_run(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        stop: Sequence[str],
        params: SamplingParams,
        logprobs: bool = False,
        end_ids: frozenset[int] | None = None,
        reuse_cache: bool = False,
        name: str = "stream",
    ) -> BatchRun:
        """Return a run of at most batch_size prompts that has not begun; see `BatchRun`.

        Args:
            prompts, max_new_tokens, stop, params, logprobs: as for `generate`.
            end_ids: tokens that end a generation; None is the model's own.
            reuse_cache: go on from what the last such run left in the cache, where the prompt begins with that (one
                prompt only).
            name: of the method that is called, for messages.

        Raises:
            ConfigError, TokenizerError: as for `generate`.
        """
        check_new_tokens(max_new_tokens)
        stops = check_stops(stop)
        rows = [self._ids(prompt) for prompt in prompts]
        if not rows:
            raise ConfigError("there is no prompt; give at least one")
        self.runner.check_context(max(map(len, rows)))
        ends = self.end_ids if end_ids is None else end_ids
        requests = requests_of(rows, max_new_tokens, ends, self._model.tokenizer, stops)
        turn = self._turns.ask(name)
        return BatchRun(self.runner, requests, params, turn, logprobs, reuse_cache, self._on_progress)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a generation, of the tokenizer and of the config."""
        ends = frozenset(self.config.eos_token_ids)
        return ends | frozenset(self._model.tokenizer.eos_token_ids) if self._model.tokenizer else ends

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation in the model's chat template, ready for its answer.

        What messages say is text, even if it spells control tokens, unless special_tokens=parse.

        Args:
            messages: "role" and "content" of each turn, oldest first.

        Raises:
            ConfigError: they are no list of messages.
            TokenizerError: the checkpoint has no tokenizer or no chat template, or the template refuses the messages.
        """
        parses_messages = self.settings.special_tokens == "parse"
        return self.tokenizer.encode_chat(check_messages(messages), parses_messages=parses_messages)

    def text_ids(self, text: str, is_beginning: bool = True) -> list[int]:
        """Return the token ids of a raw text. Control tokens that it spells are parsed, unless special_tokens=text.

        Args:
            is_beginning: put BOS before it where the checkpoint asks for it.
        """
        return self.tokenizer.encode(text, is_beginning, is_plain=self.settings.special_tokens == "text")

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str) and not prompt:
            raise ConfigError("the prompt is empty; give at least one character")
        if isinstance(prompt, str):
            return token_row(self.text_ids(prompt), self.config.vocab_size)
        ids = self.chat_ids(prompt) if is_conversation(prompt) else prompt
        return token_row(ids, self.config.vocab_size)
