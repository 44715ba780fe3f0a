"""An engine whose answers are scripted, token by token, and the server's application over it, without a network.

Tokenizer, chat template, grammars, requests and handles are the engine's own; only the model is missing. The vocabulary
has a token for each byte, some for pairs of them, and the tokens and tags of all families. Templates are rendered in
the tests' process: one for each family would take seconds to start.

What a model of each family writes for an answer - thoughts, a text and calls - is as its chat template has it.
"""

import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import httpx
import jinja2
import tokenizers
from llguidance import LLMatcher
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from graphcore import Engine
from graphcore.engine.masks import MaskThreads
from graphcore.engine.output import TokenEvent
from graphcore.engine.prompt_encoder import PromptEncoder
from graphcore.engine.request import TokenTotals
from graphcore.engine.request_builder import RequestBuilder
from graphcore.engine.request_handle import RequestHandle
from graphcore.engine.sampling_defaults import SamplingDefaults
from graphcore.serving.app import new_app
from graphcore.serving.guard import Guard
from graphcore.serving.metrics import ServingMetrics
from graphcore.serving.served_model import ServedModel
from graphcore.serving.tool_formats.families import FAMILIES
from graphcore.tokenizer.bounded_process import NoAnswerError
from graphcore.tokenizer.chat_template import ChatTemplate
from graphcore.tokenizer.grammar import GrammarMask, GrammarTokens, grammar_mask
from graphcore.tokenizer.template_sandbox import compile_template, render_template
from graphcore.tokenizer.tokenizer import Tokenizer
from graphcore.tokenizer.tokenizer_parts import TokenizerParts
from support.serving import serve_settings
from support.tool_texts import ENDS, SOURCES, SPECIAL, format_named, rendered, turn

CONTEXT = 1 << 20
TURNS = ("<|im_start|>", "<|turn>", "<|start_header_id|>", "<|end_header_id|>", "<|start_of_role|>", "<|end_of_role|>")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
PAIRS = (
    '{"',
    '"}',
    "</",
    ">\u010a",
    "}\u010a",
    '":',
    "\u010a<",
    "\u00c3\u00a9",
)  # tokens of two bytes, as BPE spells them
MID = {"gpt_oss": ("<|end|>",)}  # controls that do not end an answer, though another family's do


@cache
def backend() -> tokenizers.Tokenizer:
    """Return the tokenizer of all families."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {spelt: at for at, spelt in enumerate([*letters, *PAIRS])}
    found = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in PAIRS]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    controls = [control for family in FAMILIES for control in family.controls]
    special = dict.fromkeys([*SPECIAL, *TURNS, *map(str.strip, ENDS), *controls])
    found.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    found.add_tokens([AddedToken(name, special=False, normalized=False) for name in TAGS])
    return found


def end_ids(known_controls: Iterable[str], name: str) -> frozenset[int]:
    """Return the ids of the tokens that end a family's answers."""
    ends = {*map(str.strip, ENDS), "<|user|>", "<|observation|>"} & set(known_controls) - set(MID.get(name, ()))
    return frozenset(backend().token_to_id(end) for end in ends)


class TrialsHere:
    """Tries grammars in this process, in place of `GrammarTrials`."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self._tokens = tokens
        self._known: dict[str, str] = {}

    def problem(self, source: str) -> str:
        """Return why llguidance cannot compile a grammar; empty if it can."""
        if source not in self._known:
            matcher = LLMatcher(self._tokens.known, source)
            self._known[source] = matcher.get_error() if matcher.is_error() else ""
        return self._known[source]


def _tokenizer(name: str, ends: Iterable[int]) -> Tokenizer:
    bos = "<s>" if name.startswith("mistral") else ""
    variables = {"bos_token": bos, "eos_token": "</s>" if name.startswith("mistral") else ""}
    tokenizer = Tokenizer.__new__(Tokenizer)
    tokenizer._assemble(TokenizerParts(backend(), name, None, tuple(sorted(ends)), SOURCES[name], variables))
    vars(tokenizer)["_chat_template"] = TemplateHere(SOURCES[name], name)  # what its cached property would make
    return tokenizer


@cache
def _compiled(source: str) -> jinja2.Template:
    template, reason = compile_template(source)
    assert template is not None, reason
    return template


class TemplateHere(ChatTemplate):
    """A template that is rendered in this process, because a conversation renders hundreds of times."""

    def _text_of(self, inputs: Mapping[str, object]) -> str:
        text, refusal = render_template(_compiled(self._text), json.loads(json.dumps(inputs)), 1 << 22)
        if text is None:
            raise NoAnswerError(f"refuses these messages: {refusal}")
        return text


class SlicedHandle(RequestHandle):
    """The handle of an answer that is there already, whose tokens come so many at a time."""

    num_tokens = 1

    async def arrivals(self, interval: float = 0.0) -> AsyncIterator[list[TokenEvent]]:
        """Yield the tokens."""
        at = 0
        while events := self._output.read_ready(at)[: self.num_tokens]:
            yield events
            at += len(events)


class ScriptedEngine:
    """Answers each request with a script.

    Args:
        name: family, a key of `tool_texts.SOURCES`.

    Attributes:
        script: function from a prompt's text to the whole text of its answer, end token included.
        num_tokens: tokens of an answer that come at once.
        prompts_seen: texts of the prompts so far.
        num_masks: number of grammars that were in force.
        refusal: what a grammar has refused of a script; empty for nothing.
    """

    failure, can_rebuild, pass_seconds = None, False, 0.0

    def __init__(self, name: str, controls: Iterable[str]) -> None:
        ends = end_ids(controls, name)
        self.tokenizer = _tokenizer(name, ends)
        vocab = backend().get_vocab_size()
        self.prompts = PromptEncoder(self.tokenizer, name, "text", vocab)
        self.config = SimpleNamespace(vocab_size=vocab, model_type="")
        self.choices = SimpleNamespace(context_length=CONTEXT)
        settings = SimpleNamespace(speculation=SimpleNamespace(kind="off"))
        stream = SimpleNamespace(raw_link=lambda: None)
        runtime = SimpleNamespace(speculation="off")
        self.loaded = SimpleNamespace(
            end_ids=ends,
            settings=settings,
            runtime=runtime,
            weight_stream=stream,
            prompts=self.prompts,
            runner=None,
            sampling=SamplingDefaults(),
        )
        sizes = SimpleNamespace(vocab=vocab, context=CONTEXT, check_context=lambda tokens: None)
        parts = cast("Any", self.loaded), self.prompts, cast("Any", sizes), MaskThreads(), TokenTotals()
        self._requests = RequestBuilder(*parts)
        self._grammar_tokens = GrammarTokens(self.tokenizer, vocab, ends)
        self._grammar_tokens.trials = cast("Any", TrialsHere(self._grammar_tokens))
        self.script: Callable[[str], str] = lambda prompt: ""
        self.num_tokens, self.num_masks, self.prompts_seen, self.refusal = 1, 0, list[str](), ""

    def chat_ids(self, *given: Any, **named: Any) -> list[int]:
        """Encode a conversation, as `Engine.chat_ids`."""
        return self.prompts.chat_ids(*given, **named)

    def grammar(self, frame: str = "", **given: Any) -> GrammarMask:
        """Return a mask, as `Engine.grammar`."""
        return grammar_mask(self._grammar_tokens, given, frame)

    def schema_problem(self, schema: Mapping[str, Any]) -> str:
        """Return why a schema cannot be kept to, as `Engine.schema_problem`."""
        return self._grammar_tokens.schema_problem(schema)

    def prepare_grammars(self) -> None:
        """Do nothing: the process that tries grammars is shared."""

    def submit(self, prompt: list[int], max_new_tokens: int, mask: GrammarMask | None = None, **more: Any) -> Any:
        """Return the handle of the script's answer, which the mask must allow."""
        requests = self._requests.one("submit", prompt, max_new_tokens=max_new_tokens, **more)
        self.prompts_seen.append(self.tokenizer.decode(prompt, skip_special_tokens=False))
        ids = self.tokenizer.encode(self.script(self.prompts_seen[-1]), add_special_tokens=False)
        for request in requests:
            request.begin(0, 0)
            for token in ids:
                request.take(token, -0.5 if request.wants_logprobs else None, CONTEXT)
            assert request.finish_reason is not None, f"no token ends the script: {self.tokenizer.decode(ids[-9:])}"
        if mask is not None:
            self.num_masks += 1
            self._note_refusal(mask, requests[0].token_ids)
        handle = SlicedHandle(requests, self)
        handle.num_tokens = self.num_tokens
        return handle

    def _note_refusal(self, mask: GrammarMask, ids: list[int]) -> None:
        """Note where a grammar refuses an answer, its end included."""
        matcher = mask.copy().matcher
        ends = self.loaded.end_ids
        said = ids[:-1] if ids and ids[-1] in ends else ids
        taken = matcher.try_consume_tokens(said)
        before = self.tokenizer.decode(said[:taken], skip_special_tokens=False)
        after = self.tokenizer.decode(said[taken:], skip_special_tokens=False)
        if taken < len(said):
            self.refusal = f"the grammar refuses {after!r:.80} behind {before!r}"
        elif len(said) < len(ids) and not matcher.is_accepting() and not matcher.is_stopped():
            self.refusal = f"the grammar allows no end behind {before!r}"


class ScriptedServer:
    """The server's application over a scripted engine.

    Args:
        name: family, a key of `tool_texts.SOURCES`.
    """

    def __init__(self, name: str, controls: Iterable[str]) -> None:
        self.engine = ScriptedEngine(name, controls)
        settings = serve_settings()
        self.served = ServedModel("tiny", settings, lambda: cast("Engine", self.engine))
        app = new_app(self.served, Guard.of(settings), ServingMetrics(self.served, ()))
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=60)

    async def __aenter__(self) -> "ScriptedServer":
        await self.served.load()
        if self.served.failure is not None:
            raise self.served.failure
        return self

    async def __aexit__(self, *_: object) -> None:
        self.served.drain()
        if self.served._watching is not None:
            self.served._watching.cancel()
        await self.client.aclose()

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the body of an answer, or the data of its events if it streams."""
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, f"{path} {response.status_code}: {response.text:.600}"
        if not body.get("stream"):
            return response.json()
        lines = re.findall(r"^data: (.*)$", response.text, re.MULTILINE)
        return [json.loads(line) for line in lines if line != "[DONE]"]


LAST = {"gpt_oss": ("<|return|>", "<|call|>"), "llama3": ("<|eot_id|>", "<|eom_id|>")}  # of a text, of a call
LAST |= dict.fromkeys(["glm4", "glm45", "glm47"], ("<|user|>", "<|observation|>"))


@cache
def written(name: str, content: str, made: str) -> str:
    """Return the answer that a model of a family writes, without thoughts and with its end token."""
    calls, known = json.loads(made), format_named(name)
    text = ("<|channel|>final<|message|>" if name == "gpt_oss" else "") + content
    if calls:
        text = rendered(name, turn(*calls, content=content))[1]
        for end in ENDS:
            text = text.removesuffix(end)
        text = re.sub(r"^\s*<think>\s*</think>\n*", "", text).removeprefix("</think>")
    ends = [end.strip() for end in ENDS if end.strip() in known.controls]
    return text + (LAST[known.name][bool(calls)] if known.name in LAST else ends[0])


def script_of(name: str, thoughts: str, body: str, told: list[str]) -> Callable[[str], str]:
    """Return the script of an answer; `told` gets its thoughts, which it has only where the prompt leaves it any."""
    opened, closed = format_named(name).reasoning_open, format_named(name).reasoning_close

    def script(prompt: str) -> str:
        end = prompt.rstrip()
        may_think = bool(opened) and (name == "gpt_oss" or not end.endswith(closed))
        may_think = may_think and not end.endswith("<turn|>")  # Gemma's, where results follow a text: no turn is opened
        is_open = bool(opened) and end.endswith(opened.strip())
        told[:] = [thoughts if may_think else ""]
        if not may_think or not (thoughts or is_open):
            return body
        if name == "gpt_oss":
            return f"{opened}{thoughts}{closed}<|start|>assistant{body}"
        line = "\n" if opened == "<think>" else ""
        return f"{'' if is_open else opened + line}{thoughts}{line}{closed}{line * 2}{body}"

    return script
