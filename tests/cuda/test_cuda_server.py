"""The server with an engine on a GPU: answers beside others are those alone, and what clients leave is free again."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.serving import Running, running_server
from support.tiny_models import add_tokenizer

PROMPTS = [list(range(first, first + 7 + 5 * first)) for first in range(1, 9)]


@pytest.fixture
def folder(tiny_model, tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer and an end token."""
    path = Path(shutil.copytree(tiny_model("llama3").folder, tmp_path / "llama3"))
    add_tokenizer(path)
    (path / "generation_config.json").write_text('{"eos_token_id": 0}')
    return path


def completion(server: Running, prompt: list[int], **more: Any) -> str:
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **more}
    with server.client() as client:
        found = client.post("/v1/completions", json=fields)
    assert found.status_code == 200, found.text
    answer: str = found.json()["choices"][0]["text"]
    return answer


@pytest.mark.parametrize("streaming", ["off", "on"])
def test_requests_side_by_side_have_the_answers_that_they_have_alone(streaming: str, folder: Path, load_on) -> None:
    engine = load_on(folder, streaming=streaming)
    with running_server(lambda: engine) as server:
        alone = [completion(server, prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(lambda prompt: completion(server, prompt), PROMPTS))
    assert together == alone
    assert len(set(alone)) > 1


def test_a_client_that_leaves_frees_its_row_and_the_next_is_answered(folder: Path, load_on) -> None:
    engine = load_on(folder)
    with running_server(lambda: engine) as server:
        expected = completion(server, PROMPTS[0])
        fields = {"model": "tiny", "prompt": PROMPTS[1], "max_tokens": 200, "ignore_eos": True, "stream": True}
        for _ in range(6):  # twice as many as the engine has rows
            with server.client() as client, client.stream("POST", "/v1/completions", json=fields) as stream:
                first = next(line for line in stream.iter_lines() if line.startswith("data:"))
                assert json.loads(first[5:])["object"] == "text_completion"
        server.wait_for(lambda: server.num_requests() == 0)
        assert completion(server, PROMPTS[0]) == expected


def test_a_schema_is_kept(folder: Path, load_on) -> None:
    engine = load_on(folder)
    words = ["red", "green", "blue"]
    wanted = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"enum": words}}}
    with running_server(lambda: engine) as server, ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda seed: chosen(server, wanted, seed), range(3)))
    assert {json.loads(answer) for answer in answers} <= set(words)


def chosen(server: Running, wanted: dict[str, Any], seed: int) -> str:
    """Return a drawn answer in a format."""
    return completion(server, PROMPTS[3], response_format=wanted, temperature=1.0, seed=seed, ignore_eos=False)
