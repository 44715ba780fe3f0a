"""Requests that schemathesis makes from OpenAI's specification, valid ones and broken ones: none is a server error."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llm_comply
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from support.chat_folders import BRIEF, save_calling_folder
from support.serving import SECONDS, Running, running_server

from graphcore import Engine
from graphcore.sampling_params import SamplingParams

pytestmark = pytest.mark.thorough

POSTS = ("/chat/completions", "/completions", "/embeddings", "/responses")
OPERATIONS = [*(("POST", path) for path in POSTS), ("GET", "/models"), ("GET", "/models/{model}")]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
FEW, MANY = 8, 250  # cases of an operation and a mode that have a body; MANY are 2,000 in all
SIZES = ["batching.max_sequences=4", "context_length=1024"]


@pytest.fixture(scope="module")
def specification() -> Any:
    """The specification that llm-comply carries, cut to the server's paths."""
    text = (Path(llm_comply.__file__).parent / "specs" / "openai_chat.json").read_text("utf-8")
    whole = json.loads(text)
    paths = {path: {method.lower(): whole["paths"][path][method.lower()]} for method, path in OPERATIONS}
    return schemathesis.openapi.from_dict({**whole, "paths": paths})


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = save_calling_folder(tmp_path_factory.mktemp("schemas") / "model")
    with (
        Engine.load(folder, dtype="fp32", device="cpu", overrides=SIZES) as engine,
        running_server(lambda: engine, max_new_tokens=4, sampling=SamplingParams(logit_bias=BRIEF)) as running,
    ):
        yield running


def statuses(running: Running, specification: Any, method: str, path: str, mode: GenerationMode, most: int) -> Counter:
    """Send requests of an operation, check the answers, and return how many have each status."""
    found: Counter[int] = Counter()
    with running.client() as http:

        @settings(
            max_examples=most,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=specification[path][method].as_strategy(generation_mode=mode))
        def send(case: Case) -> None:
            made = case.as_transport_kwargs(base_url=f"{running.url}/v1")
            content = json.dumps(made["json"]).encode() if "json" in made else made.get("data") or b""
            body = content if isinstance(content, bytes) else str(content).encode()
            headers = {"content-type": "application/json"} if method == "POST" else {}
            response = http.request(method, made["url"], content=body, headers=headers, timeout=SECONDS)
            found[response.status_code] += 1
            assert response.status_code < 500, (made["url"], body, response.text)
            if response.status_code >= 400:
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert isinstance(error["message"], str)

        send()
    return found


@pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])
@pytest.mark.parametrize("path", POSTS)
def test_no_request_is_a_server_error(running: Running, specification: Any, path: str, mode: GenerationMode) -> None:
    assert set(statuses(running, specification, "POST", path, mode, FEW)) <= {200, 400}


def test_a_name_of_a_model_is_any_text(running: Running, specification: Any) -> None:
    assert set(statuses(running, specification, "GET", "/models/{model}", GenerationMode.POSITIVE, FEW)) == {404}
    assert set(statuses(running, specification, "GET", "/models", GenerationMode.POSITIVE, 1)) == {200}


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])
@pytest.mark.parametrize("path", POSTS)
def test_no_request_of_two_thousand_is_a_server_error(
    running: Running, specification: Any, path: str, mode: GenerationMode
) -> None:
    found = statuses(running, specification, "POST", path, mode, MANY)
    assert sum(found.values()) >= MANY
    assert set(found) <= {200, 400}
    assert found[200] >= 5 or path in ("/completions", "/embeddings"), "some reach the model"
    with running.client() as http:
        assert http.get("/health").status_code == 200
