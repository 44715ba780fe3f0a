"""Answers under grammars: schemas of llguidance's own tests, checked by another library; forms, errors, and stalls."""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.tiny_models import TinyModel, add_tokenizer

from graphcore import Engine
from graphcore.engine.forward_pass import RowChunk
from graphcore.errors import ConfigError
from graphcore.graph.program import Program
from graphcore.tokenizer.grammar import FORMS

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "json_schemas.json").read_text("utf-8"))
SECONDS = 120.0
END = 0
FORMATS = jsonschema.FormatChecker(formats=("date", "email", "ipv4", "ipv6", "uuid"))  # "time" there has no offset


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine of random weights, which would never write JSON by itself."""
    folder = tmp_path_factory.mktemp("grammars") / "llama3"
    shutil.copytree(tiny_model("llama3").folder, folder)
    add_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END]}))
    sizes = ["batching.max_sequences=8", "context_length=512"]
    with Engine.load(folder, dtype="fp32", device="cpu", overrides=sizes) as engine:
        yield engine


def test_answers_under_schemas_are_valid(engine: Engine) -> None:
    """What a random model writes ends at its limit where a schema has no end; all else is valid JSON of the schema."""
    schemas = GOLDEN["schemas"]
    assert len(schemas) == 100
    handles = [
        engine.submit("x", 300, mask=engine.grammar(json_schema=schema), temperature=1.0, seed=number)
        for number, schema in enumerate(schemas)
    ]
    whole = 0
    for schema, handle in zip(schemas, handles, strict=True):
        answer = handle.result(SECONDS)
        if answer.finish_reason == "length":
            continue
        found = json.loads(answer.text)
        jsonschema.validate(found, schema, format_checker=FORMATS)
        whole += 1
    assert whole >= 80


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ({"regex": "[a-c]{3}[0-9]+x"}, r"[a-c]{3}[0-9]+x"),
        ({"choice": ["yes", "no", 'per"haps']}, r'yes|no|per"haps'),
        ({"lark": 'start: "a" /[bc]{4}/ "d"'}, r"a[bc]{4}d"),
        ({"gbnf": 'root ::= "x" [0-9] [0-9] "y"'}, r"x[0-9][0-9]y"),
        ({"json_schema": {"enum": [1, "b"]}}, r'1|"b"'),
        ({"json_schema": '{"const": "abc"}'}, r'"abc"'),
        ({"json_schema": {"const": "a<|end|>b"}}, r'"a<\|end\|>b"'),  # text, not the control token
    ],
    ids=str,
)
def test_every_form_of_a_grammar_is_kept_to(engine: Engine, grammar: dict[str, Any], pattern: str) -> None:
    handle = engine.submit("x", 100, n=4, mask=engine.grammar(**grammar), temperature=1.0, seed=1)
    for answer in handle.results(SECONDS):
        assert answer.finish_reason == "end"
        assert re.fullmatch(pattern, answer.text), answer.text
    assert set(grammar) <= set(FORMS)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ({"regex": "("}, "regex: "),
        ({"lark": "start: nothing"}, "lark: "),
        ({"lark": "start: start"}, "lark: no text matches it"),
        ({"gbnf": "root ::= ("}, "gbnf: "),
        ({"json_schema": {"type": "nothing"}}, "json_schema: "),
        ({"json_schema": "{"}, "json_schema: |json_schema must be JSON"),
        ({"choice": []}, "must be a list of at least one text"),
        ({"choice": "yes"}, "must be a list of at least one text"),
        ({"regex": 3}, "regex=3 must be a text"),
    ],
    ids=str,
)
def test_an_invalid_grammar_ends_its_request_alone(engine: Engine, grammar: dict[str, Any], said: str) -> None:
    other = engine.submit("y", 20, ignore_eos=True)
    with pytest.raises(ConfigError, match=said):
        engine.submit("x", 5, mask=engine.grammar(**grammar)).result(SECONDS)
    assert len(other.result(SECONDS).token_ids) == 20


def test_json_has_white_space_that_ends(engine: Engine) -> None:
    """A random model that likes spaces most would write nothing else, if as many were allowed as it likes."""
    (space,) = engine.tokenizer.encode(" ", add_special_tokens=False)
    schema = {"properties": {"a": {"const": 1}}, "required": ["a"], "type": "object", "additionalProperties": False}
    answer = engine.submit("x", 400, mask=engine.grammar(json_schema=schema), logit_bias={space: 100.0}).result(SECONDS)
    assert answer.finish_reason == "end"
    assert max(map(len, re.findall(r"\s+", answer.text))) == 40
    assert json.loads(answer.text) == {"a": 1}


def test_forced_tokens_take_the_spare_rows_of_a_step_of_all_sequences(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sequences have sixteen rows, so that forty forced tokens of each need twenty steps and not forty."""
    passes, run = list[int](), engine.runner.forward_pass

    def counted(decodes: Sequence[Program], chunks: Sequence[RowChunk], *given: Any, **named: Any) -> Any:
        passes.append(len(decodes))
        return run(decodes, chunks, *given, **named)

    monkeypatch.setattr(engine.runner, "forward_pass", counted)
    text = "".join(chr(ord("a") + at % 26) for at in range(40))
    with engine.holding_back():
        handles = [engine.submit("x", 100, mask=engine.grammar(regex=text)) for _ in range(8)]
    answers = [handle.result(SECONDS) for handle in handles]
    assert {answer.text for answer in answers} == {text}
    tokens = len(answers[0].token_ids)
    assert sum(map(bool, passes)) < 0.8 * tokens, (sum(map(bool, passes)), tokens)


def test_one_grammar_is_given(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"grammar takes one of json_schema, .*found none"):
        engine.grammar()
    with pytest.raises(ConfigError, match="found regex and choice"):
        engine.grammar(regex="a", choice=["b"])


def test_a_large_grammar_that_compiles_stops_nobody(engine: Engine) -> None:
    """Eight streams run; a grammar of 3,000 alternatives is compiled beside them."""
    running = [engine.submit("a", 400, ignore_eos=True) for _ in range(7)]
    running[0].event(3)
    words = [f"{number:x}-{number * number}" for number in range(3000)]
    mask = engine.grammar(choice=words)
    gaps: list[float] = []

    def watch() -> None:
        before = time.perf_counter()
        for _ in running[0]:
            now = time.perf_counter()
            gaps.append(now - before)
            before = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    answer = engine.submit("x", 60, mask=mask).result(SECONDS)
    watcher.join(SECONDS)
    assert answer.text in words
    assert len(gaps) == 400
    assert max(gaps) < 1.0, "the others keep their pace; how long a gap is depends on what else the machine does"
