"""Conversations of agents, made from seeds, for every family of calls and in each interface of the server.

The model's answers are scripted (`scripted_engine.py`). Each turn is asked for six times: in three interfaces, whole
and streamed. A client sends back what it has got there, results of tools, and whatever else agents send.

    GRAPHCORE_SEEDS=300 pytest -m thorough tests/integration/test_agent_conversations.py     more seeds
"""

import asyncio
import json
import os
import random
import re
import secrets
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from itertools import count
from typing import Any

import jsonschema
import pytest
from agent_clients import (
    CHAT,
    INTERFACES,
    MESSAGES,
    RESPONSES,
    Said,
    Turn,
    Wish,
    body_of,
    is_whole,
    results,
    said,
    spoken,
)
from scripted_engine import ScriptedServer, render_here
from tool_texts import CLOCK, ENDS, PARALLEL, PARAMETERS, SEARCH, SILENT, SOURCES, format_named, rendered, turn

from graphcore.tokenizer.chat_template import ChatTemplate

SEEDS = int(os.environ.get("GRAPHCORE_SEEDS", "30"))
ROUNDS = 5
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
PERSON |= {"additionalProperties": False}
HARD = ['"', "\\", "\n", " ", "\u00e9", "\U0001f30d", "<tool_call>", "</tool_call>", "{", "}", "]", "a", "```", "null", "5"]
PLAIN = ["Bern", " ", "\u00e9", "x_1", "{", "]"]
TEXTS = [
    "Done: it is 21 \u00b0C in Z\u00fcrich.\n\n- one\n- two",
    '{"city": "x"}',
    "```json\n[1]\n```",
    "The tag <think> opens thoughts, and </think> closes them.",
    "So `<tool_call>` opens a call, <b>and</b> no more.",
    "clock.now-utc says {} here",
]
THOUGHTS = ["I must look.", "One\n\n  two } so.", 'Not {"name": yet, `x`'] 
DETAILS = ["", ' {"a": [1, null]}', "\n<tool_response>", " </tool_response> <|im_end|>", " Z\u00fcrich </think>", " [TOOL_CALLS]"]
BROKEN: list[tuple[str, dict[str, Any]]] = [
    ('{"city": "Bern", "count": ', {"city": "Bern"}),
    ("", {}),
    ("null", {}),
    ("{'city'}", {}),
    ('[{"city": "Bern"}]', {"city": "Bern"}),
]


@pytest.fixture(autouse=True)
def templates_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatTemplate, "_text_of", render_here)


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    changed = deepcopy(tool)
    changed["function"]["strict"] = True
    return changed


@cache
def written(name: str, made: str) -> str:
    """Return an answer's text as the family's template writes it, without thoughts and with a token that ends it."""
    answer = json.loads(made)
    if "tool_calls" in answer:
        text = rendered(name, answer)[1]
        for end in ENDS:
            text = text.removesuffix(end)
        text = re.sub(r"^\s*<think>\s*</think>\n*", "", text).removeprefix("</think>")
    else:  # some templates change texts that speak of thoughts
        text = ("<|channel|>final<|message|>" if name == "gpt_oss" else "") + answer["content"]
    ends = {"gpt_oss": ("<|return|>", "<|call|>"), "glm": ("<|user|>", "<|observation|>"), "llama3": ("<|eot_id|>", "<|eom_id|>")}
    known = format_named(name)
    family = "glm" if known.name.startswith("glm") else known.name
    first = next(end.strip() for end in ENDS if end.strip() in known.controls) if family not in ends else ""
    return text + (first or ends[family]["tool_calls" in answer])


def script_of(name: str, thoughts: str, body: str, told: list[str]) -> Callable[[str], str]:
    """Return the script of an answer; its thoughts are put into `told` if the prompt leaves the model any."""
    known = format_named(name)
    opened, closed = known.reasoning_open, known.reasoning_close

    def script(prompt: str) -> str:
        told[:] = [thoughts]
        if not thoughts or not known.knows_reasoning or (opened != "<think>" and prompt.rstrip().endswith(closed)):
            told[:] = [""]
            is_open = known.knows_reasoning and prompt.rstrip().endswith(opened.strip()) and name != "gpt_oss"
            return f"\n{closed}\n\n{body}" if is_open else body
        if name == "gpt_oss":
            return f"{opened}{thoughts}{closed}<|start|>assistant{body}"
        space = "\n" if opened == "<think>" else ""
        if prompt.rstrip().endswith(closed):
            told[:] = [""]
            return body
        first = "" if prompt.rstrip().endswith(opened.strip()) else f"{opened}{space}"
        return f"{first}{thoughts}{space}{closed}{space * 2}{body}"

    return script


class Talk:
    """One conversation.

    Attributes:
        turns: what the client sends at present.
        owed: ids of the calls of the last answer, by interface, that have no result yet.
    """

    def __init__(self, server: ScriptedServer, name: str, seed: int) -> None:
        self.server, self.name, self.random = server, name, random.Random(f"{name} {seed}")
        self.known = format_named(name)
        self.turns: list[Turn] = []
        self.calls: list[dict[str, str]] = []
        self.numbers = count()
        self.joins = self.random.random() < 0.5
        self.is_comparable = True  # whether all interfaces have the same prompt

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def mark(self, kind: str) -> str:
        return f"q{kind}{next(self.numbers)}q"

    def speak(self, role: str) -> None:
        mark = self.mark("S" if role == "system" else "U")
        self.turns.append(spoken(role, mark + self.random.choice(["", " Go on.", "\nPlease <b>"]), mark))

    def answer_calls(self) -> bool:
        """Send results, in some order, or not all of them; return whether there are any."""
        found, marks = [], []
        has_images = self.chance(0.2)
        self.is_comparable = self.is_comparable and not has_images
        for ids in self.random.sample(self.calls, len(self.calls)) if self.chance(0.3) else self.calls:
            marks.append(self.mark("R"))
            found.append((ids, marks[-1] + self.random.choice(DETAILS), has_images))
        kept = len(found) - self.chance(0.1)
        if kept:
            self.turns.append(results(found[:kept], marks[:kept]))
        return kept > 0

    def compact(self) -> None:
        """Replace the conversation by a summary, and perhaps the last answer with its results."""
        kept = self.turns[-2:] if self.calls and self.chance(0.5) and len(self.turns) > 1 and self.turns[-1].marks else []
        kept = kept if kept and kept[-1].entries[CHAT][0]["role"] == "tool" else []
        self.turns = []
        if self.chance(0.5):
            self.speak("system")
        self.speak("user")
        self.turns[-1].entries[RESPONSES].insert(0, {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"})
        self.turns += kept

    def arguments(self, is_bound: bool) -> dict[str, Any]:
        letters = [one for one in (PLAIN if is_bound else HARD) if self.name != "lfm2" or one not in "'\\"]
        text = lambda: "".join(self.random.choices(letters, k=self.random.randrange(6)))  # noqa: E731
        found = {
            "city": text(),
            "count": self.random.randrange(-(10**9), 10**9),
            "exact": self.chance(0.5),
            "items": [text(), {"k": [None, 1.5]}, 7],
            "limits": {"k": text(), "z": {}},
            "none": None,
            "share": self.random.choice([0.25, -1.5e-07, 3.0]),
        }
        return {key: found[key] for key in PARAMETERS["properties"] if key == "city" or self.chance(0.5)}

    def wish(self) -> Wish:
        tools = [] if self.chance(0.1) else [SEARCH, CLOCK] if self.chance(0.6) else [strict(SEARCH), strict(CLOCK)]
        choices = ["auto", "auto", "auto", "none", "required", "search_2", "clock.now-utc"]
        schema = PERSON if self.chance(0.25) else None
        effort = self.random.choice([None, None, "none", "low"])
        return Wish(tools, self.random.choice(choices) if tools else "auto", self.chance(0.8), schema, effort)

    def answer(self, wish: Wish) -> tuple[list[tuple[str, Any]], str]:
        """Return the calls and the text of an answer that the model may give."""
        must_call = wish.choice not in ("auto", "none")
        if not (wish.tools and wish.choice != "none" and (must_call or self.chance(0.7))):
            if wish.schema is not None:
                return [], json.dumps({"name": self.random.choice(["Ada", "\u00e9"])}, ensure_ascii=False)
            is_free = not (wish.tools and wish.choice == "auto" and "strict" in wish.tools[0]["function"])
            return [], self.random.choice(TEXTS if is_free else TEXTS[:4])
        is_bound = must_call or wish.schema is not None or "strict" in wish.tools[0]["function"]
        most = 3 if wish.is_parallel and self.name in PARALLEL else 1
        made = []
        for _ in range(self.random.randint(1, most)):
            name = wish.choice if wish.choice in ("search_2", "clock.now-utc") else self.random.choice(["search_2", "clock.now-utc"])
            made.append((name, self.arguments(is_bound) if name == "search_2" else {}))
        has_text = not must_call and not (is_bound and self.name == "gemma4") and wish.schema is None and self.name not in SILENT and self.chance(0.4)
        return made, "Let me look:\n\n- one" if has_text else ""

    async def round(self, number: int) -> None:
        has_results = bool(self.calls) and self.chance(0.9) and self.answer_calls()
        if not has_results or self.chance(0.2):
            self.speak("user")
        if number and self.chance(0.15):
            self.speak("system")
        if number > 1 and self.chance(0.2):
            self.compact()
        if not self.turns:
            self.speak("user")
        wish = self.wish()
        calls, text = self.answer(wish)
        made = turn(*calls, content=text)
        if not calls:
            del made["tool_calls"]
        is_bound = wish.schema is not None or (wish.tools and wish.choice != "none" and "strict" in wish.tools[0]["function"]) or wish.choice not in ("auto", "none")
        body = written("lfm2_first" if self.name == "lfm2" and is_bound else self.name, json.dumps(made))
        thoughts = self.random.choice(THOUGHTS) if self.chance(0.6) else ""
        told: list[str] = []
        self.server.engine.script = script_of(self.name, thoughts, body, told)
        cut = self.random.randrange(1, 120) if self.chance(0.25) else 0
        if cut:
            wish = Wish(**{**vars(wish), "max_tokens": cut})
        answers = await self.asked(number, wish)
        first = answers[CHAT][0]
        self.check(first, told[0], text, calls, body)
        self.turns.append(self.taken(answers, first))

    async def asked(self, number: int, wish: Wish) -> dict[str, list[Said]]:
        """Ask in each interface, whole and streamed, and check that all answers are the same."""
        engine, answers = self.server.engine, dict[str, list[Said]]()
        engine.num_tokens, engine.prompts_seen = self.random.choice([1, 2, 5, 1000]), []
        for interface in INTERFACES:
            body = body_of(interface, self.turns, wish, self.joins)
            answers[interface] = []
            for streams in (False, True):
                self.ids = count()
                self.prefix = f"{number:012x}"
                answer = await self.server.post(interface, {**body, "stream": streams, "model": "tiny"})
                answers[interface].append(said(interface, answer))
        assert not engine.refusal, engine.refusal
        prompts = [" ".join(prompt.split()) for prompt in engine.prompts_seen]
        self.check_prompts(prompts)
        first = answers[CHAT][0]
        for interface, both in answers.items():
            for found in both:
                whole = [(at, name, json.loads(text)) for at, name, text in first.calls if is_whole(text)]
                same = [(at, name, json.loads(text)) for at, name, text in found.calls if is_whole(text)][: len(whole)]
                parts = found.thoughts, found.content, found.reason
                assert (parts, same) == ((first.thoughts, first.content, first.reason), whole), interface
            assert interface == MESSAGES or [one.calls for one in both] == [first.calls] * 2
        return answers

    def check_prompts(self, prompts: Sequence[str]) -> None:
        for prompt in prompts:
            for mark in (mark for turn in self.turns for mark in turn.marks):
                assert prompt.count(mark) == 1, (mark, prompt)
        if self.is_comparable:
            assert len(set(prompts)) == 1, prompts

    def check(self, found: Said, thoughts: str, text: str, calls: Sequence[tuple[str, Any]], body: str) -> None:
        """Check an answer against what the model has written."""
        if found.reason != "length":
            values = [(name, json.loads(arguments)) for _, name, arguments in found.calls]
            expected = thoughts, text, list(calls)
            assert (found.thoughts, found.content, values) == expected, (found, expected, body)
            assert found.reason == ("tool_calls" if calls else "stop")
            return
        assert thoughts.startswith(found.thoughts), (found, thoughts)
        rest = found.content.removeprefix(text).strip()
        assert text.startswith(found.content) or (calls and rest in f"<|start|>assistant{body}"), (found, text)
        for (name, arguments), (_, other, got) in zip(calls, found.calls, strict=False):
            assert name == other
            assert not is_whole(got) or json.loads(got) == arguments, (got, arguments)
        assert len(found.calls) <= len(calls)

    def taken(self, answers: dict[str, list[Said]], first: Said) -> Turn:
        """Return the turn that a client makes of an answer: whole or streamed, and sometimes with broken arguments."""
        entries = {one: deepcopy(both[self.chance(0.5)].entries) for one, both in answers.items()}
        self.calls = [{one: answers[one][0].calls[at][0] for one in INTERFACES} for at in range(len(first.calls))]
        if self.calls and self.chance(0.15):
            text, value = self.random.choice(BROKEN)
            entries[CHAT][0]["tool_calls"][-1]["function"]["arguments"] = text
            entries[RESPONSES][-1]["arguments"] = text
            entries[MESSAGES][0]["content"][-1]["input"] = value
        return Turn(entries)


async def converse(name: str, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedServer(name, format_named(name).controls) as server:
        for seed in seeds:
            talk = Talk(server, name, seed)
            monkeypatch.setattr(secrets, "token_hex", lambda size: talk.prefix + f"{next(talk.ids):012x}")
            for number in range(ROUNDS):
                try:
                    await talk.round(number)
                except BaseException as error:
                    error.add_note(f"family {name}, seed {seed}, round {number}")
                    raise


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.thorough
def test_conversations_of_agents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(converse(name, range(SEEDS), monkeypatch))


def test_two_conversations_of_each_family(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SOURCES:
        asyncio.run(converse(name, range(2), monkeypatch))
