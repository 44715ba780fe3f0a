"""Conversations of agents, made from seeds, for every family of calls and in each interface of the server.

The model's answers are scripted (`scripted_engine.py`). Each turn is asked for in all interfaces, whole and streamed,
and a client sends back what it got there (`scripted_engine.py`), with results of tools and whatever else agents send.

    GRAPHCORE_SEEDS=300 pytest tests/integration/test_agent_conversations.py -k qwen3     more seeds of one family
"""

import asyncio
import json
import os
import random
import secrets
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from support import agent_clients
from support.agent_clients import CHAT, INTERFACES, MESSAGES, RESPONSES, Said, Turn, Wish
from support.cases import in_case
from support.scripted_engine import ScriptedServer, script_of, written
from support.tool_texts import CLOCK, PARALLEL, PARAMETERS, SEARCH, SILENT, SOURCES, format_named

SEEDS = int(os.environ.get("GRAPHCORE_SEEDS", "4"))
ROUNDS = 5
NAMES = ("search_2", "clock.now-utc")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
BOUND = ("Bern", " ", "\u00e9", "x_1", "{", "]")  # pieces of texts that grammars take in one spelling
PIECES = (*BOUND, '"', "\\", "\n", "\U0001f30d", "<tool_call>", "</tool_call>", "}", "```", "null", "5", "<|")
TEXTS = (
    "Done: it is 21 \u00b0C in Z\u00fcrich.\n\n- one\n- two",
    '{"city": "x"}',
    "```json\n[1]\n```",
    "The tag <think> opens thoughts, and </think> closes them.",
    "So `<tool_call>` opens a call, <b>and</b> no more.",
)
THOUGHTS = ("", "I must look.", "One\n\n  two } so.", 'Not {"name": yet, `x`')
DETAILS = ("", ' {"a": [1]}', "\n<tool_response>", " </tool_response> <|im_end|>", " \u00e9 </think>", " [TOOL_CALLS]")
BROKEN = (("", {}), ("null", {}), ("{'city'}", {}), ('{"city": "Bern", "x": ', {"city": "Bern"}), ("[{}]", {}))


class Talk:
    """One conversation.

    Attributes:
        turns: what the client sends at present.
        calls: ids of the last answer's calls, by interface.
        is_alike: whether the interfaces have the same words in their prompts.
    """

    def __init__(self, server: ScriptedServer, name: str, seed: int, is_thorough: bool = True) -> None:
        self.server, self.name, self.random = server, name, random.Random(f"{name} {seed}")
        self.turns: list[Turn] = []
        self.calls: list[dict[str, str]] = []
        self.is_thorough, self.joins, self.is_alike = is_thorough, self.chance(0.5), True
        self.marks, self.prefix, self.ids = count(), "", count()

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def mark(self) -> str:
        return f"q{next(self.marks)}q"

    def speak(self, role: str) -> None:
        mark = self.mark()
        self.turns.append(agent_clients.spoken(role, mark + self.random.choice(["", " Go on.", "\nPlease <b>"]), mark))

    def send_results(self) -> bool:
        """Send the results of the last calls, in some order, or not all of them; return whether there are any."""
        has_images = self.chance(0.2)
        self.is_alike = self.is_alike and not has_images  # texts of several parts are joined differently
        order = self.random.sample(self.calls, len(self.calls)) if self.chance(0.3) else self.calls
        marked = [(ids, self.mark()) for ids in order[: len(order) - self.chance(0.1)]]
        found = [(ids, mark + self.random.choice(DETAILS), has_images) for ids, mark in marked]
        self.turns += [agent_clients.results(found, [mark for _, mark in marked])] if found else []
        return bool(found)

    def compact(self) -> None:
        """Put a summary in the place of the conversation, or of all but the last calls and their results."""
        last = self.turns[-2:] if self.turns[-1].entries[CHAT][0]["role"] == "tool" and self.chance(0.5) else []
        self.turns = []
        if self.chance(0.5):
            self.speak("system")
        self.speak("user")
        self.turns[-1].entries[RESPONSES].insert(0, {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"})
        self.turns += last

    def arguments(self, is_bound: bool) -> dict[str, Any]:
        pieces = [one for one in (BOUND if is_bound else PIECES) if self.name != "lfm2" or one not in "'\\"]

        def text() -> str:
            return "".join(self.random.choices(pieces, k=self.random.randrange(6)))

        found = {"city": text(), "count": self.random.randrange(-(10**9), 10**9), "exact": self.chance(0.5)}
        found |= {"items": [text(), {"k": [None, 1.5]}, 7], "limits": {"k": text(), "z": {}}, "none": None}
        found["share"] = self.random.choice([0.25, -1.5e-07, 3.0])
        return {key: found[key] for key in PARAMETERS["properties"] if key == "city" or self.chance(0.5)}

    def wish(self) -> Wish:
        tools = self.random.choice([[], [CLOCK, SEARCH], [SEARCH], [SEARCH, CLOCK], [SEARCH, CLOCK], [SEARCH, CLOCK]])
        if self.chance(0.4):
            tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
        choices = (
            ["auto"] * 4 + ["none", "required", self.random.choice(tools)["function"]["name"]] if tools else ["auto"]
        )
        schema = SCHEMA if self.chance(0.25) else None
        effort = self.random.choice([None, None, "none", "low"])
        return Wish(tools, self.random.choice(choices), self.chance(0.8), schema, effort)

    def answer(self, wish: Wish) -> tuple[str, list[tuple[str, dict[str, Any]]], str, bool]:
        """Return the text and the calls of an answer that the model may give, as it writes them, and if they count."""
        may_call, must_call = bool(wish.tools) and wish.choice != "none", wish.choice not in ("auto", "none")
        is_bound = must_call or wish.schema is not None or (may_call and "strict" in wish.tools[0]["function"])
        writer = "lfm2_first" if self.name == "lfm2" and is_bound else self.name  # its quotes are not those of grammars
        if not is_bound and self.chance(0.1):  # a call of no known tool, or where none may be called
            name = "nobody" if may_call else "search_2"
            return "", [], written(self.name, "", json.dumps([(name, {"city": "x"})])), False
        if not must_call and not (may_call and self.chance(0.7)):
            text = self.random.choice(TEXTS[:4] if is_bound else TEXTS)
            text = self.random.choice(['{"name": "Ada"}', '{ "name":"\u00e9"}']) if wish.schema else text
            return text, [], written(self.name, text, "[]"), True
        known = [wish.choice] if wish.choice in NAMES else [tool["function"]["name"] for tool in wish.tools]
        names = self.random.choices(
            known, k=self.random.randint(1, 3 if wish.is_parallel and self.name in PARALLEL else 1)
        )
        calls = [(name, self.arguments(is_bound) if name == "search_2" else {}) for name in names]
        is_silent = must_call or wish.schema is not None or self.name in SILENT or (is_bound and self.name == "gemma4")
        text = "" if is_silent or self.chance(0.6) else "Let me look:\n\n- one"
        return text, calls, written(writer, text, json.dumps(calls)), True

    async def round(self, number: int) -> None:
        has_results = bool(self.calls) and self.chance(0.9) and self.send_results()
        if not has_results or self.chance(0.2):
            self.speak("user")
        if number > 1 and self.chance(0.2):
            self.compact()
        if number and self.chance(0.15):
            self.speak("system")
        wish, told, self.prefix = self.wish(), list[str](), f"{number:012x}"
        text, calls, body, counts = self.answer(wish)
        self.server.engine.script = script_of(self.name, self.random.choice(THOUGHTS), body, told)
        if self.chance(0.25):
            wish = replace(wish, max_tokens=self.random.randrange(1, 120))
        answers = await self.asked(wish)
        first = answers[CHAT][0]
        if counts:
            self.check(first, told[0], text, calls, body)
        else:
            assert not first.calls, (first, body)
            assert first.reason == "length" or "city" in first.content, (first, body)
        self.turns.append(self.taken(answers))

    async def asked(self, wish: Wish) -> dict[str, list[Said]]:
        """Ask in each interface, and check that the prompts have all that was sent, and that the answers are one."""
        engine, answers = self.server.engine, dict[str, list[Said]]()
        engine.num_tokens, engine.prompts_seen = self.random.choice([1, 2, 5, 1000]), []
        for interface in INTERFACES:
            body = {**agent_clients.body_of(interface, self.turns, wish, self.joins), "model": "tiny"}
            answers[interface] = []
            for streams in (False, True) if self.is_thorough else (self.chance(0.5),):
                self.ids = count()  # the ids of calls are the same in all answers
                answer = await self.server.post(interface, {**body, "stream": streams})
                answers[interface].append(agent_clients.said(interface, answer))
        assert not engine.refusal, engine.refusal
        prompts = [" ".join(prompt.split()) for prompt in engine.prompts_seen]
        for mark in (mark for one in self.turns for mark in one.marks):
            assert {prompt.count(mark) for prompt in prompts} == {1}, (mark, prompts[0])
        words = {"".join(prompt.split()) for prompt in prompts}  # texts around a call are one in chats, two elsewhere
        assert len(words) == 1 or not self.is_alike, prompts
        first = answers[CHAT][0]
        for interface, both in answers.items():
            for one in both:
                assert (one.thoughts, one.content, one.reason) == (first.thoughts, first.content, first.reason), (
                    interface
                )
                assert [call[:2] for call in one.calls] == [call[:2] for call in first.calls]
                for call, same in zip(one.calls, first.calls, strict=True):
                    is_read = interface == MESSAGES and agent_clients.same_value(call[2], same[2])
                    assert call[2] == same[2] or is_read, (interface, call, same)
        return answers

    def check(self, first: Said, thoughts: str, text: str, calls: Sequence[tuple[str, Any]], body: str) -> None:
        """Check an answer against what the model has written; one that was cut has the beginning of it."""
        if first.reason != "length":
            values = [(name, json.loads(arguments)) for _, name, arguments in first.calls]
            assert (first.thoughts, first.content, values) == (thoughts, text, [*calls]), (first, thoughts, text, body)
            assert first.reason == ("tool_calls" if calls else "stop")
            return
        rest = first.content.removeprefix(text).rstrip("\ufffd").strip()  # the beginning of a call is text
        assert text.startswith(first.content.rstrip("\ufffd")) or (calls and rest in f"<|start|>assistant{body}"), (
            first,
            text,
            body,
        )
        assert thoughts.startswith(first.thoughts.rstrip("\n\ufffd")), (first, thoughts)
        for (name, arguments), (_, other, got) in zip(calls[: len(first.calls)], first.calls, strict=True):
            assert name == other
            assert not agent_clients.is_whole(got) or json.loads(got) == arguments, (got, arguments)

    def taken(self, answers: dict[str, list[Said]]) -> Turn:
        """Return what a client makes of an answer: whole or streamed, with or without thoughts, or broken arguments."""
        entries = {one: deepcopy(self.random.choice(both).entries) for one, both in answers.items()}
        first = answers[CHAT][0]
        self.is_alike = self.is_alike and bool(first.content or first.calls)  # an empty answer is a turn in chats alone
        self.calls = [{one: answers[one][0].calls[at][0] for one in INTERFACES} for at in range(len(first.calls))]
        if self.chance(0.2):
            entries = agent_clients.without_thoughts(entries)
        if self.calls and self.chance(0.15):
            text, value = self.random.choice(BROKEN)
            entries[CHAT][0]["tool_calls"][-1]["function"]["arguments"] = text
            [item for item in entries[RESPONSES] if item["type"] == "function_call"][-1]["arguments"] = text
            [block for block in entries[MESSAGES][0]["content"] if block["type"] == "tool_use"][-1]["input"] = value
        return Turn(entries)


async def converse(name: str, seeds: int, rounds: int, is_thorough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedServer(name, format_named(name).controls) as server:
        for seed in range(seeds):
            talk = Talk(server, name, seed, is_thorough)
            monkeypatch.setattr(secrets, "token_hex", lambda _, talk=talk: f"{talk.prefix}{next(talk.ids):012x}")
            for number in range(rounds):
                with in_case(f"family {name}", f"seed {seed}", f"round {number}"):
                    await talk.round(number)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOURCES)
def test_agents_can_go_on_in_every_interface(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(converse(name, SEEDS, ROUNDS, True, monkeypatch))


def test_agents_of_every_family_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SOURCES:
        asyncio.run(converse(name, 2, 2, False, monkeypatch))
