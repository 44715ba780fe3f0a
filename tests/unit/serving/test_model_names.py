"""A server whose model is loading answers 503 and says so; a name of no model it has is another error."""

import asyncio
from typing import NoReturn

import httpx
from support.serving import serve_settings

from graphcore.serving.app import new_app
from graphcore.serving.guard import Guard
from graphcore.serving.metrics import ServingMetrics
from graphcore.serving.served_model import ServedModel


def load() -> NoReturn:
    raise AssertionError("nothing is loaded")


async def answers(**keys: bool) -> dict[str, httpx.Response]:
    """Return the answers to a chat for each name, and to GET requests, of a server that is loading."""
    settings = serve_settings(**keys)
    served = ServedModel("mine", settings, load, ("smollm2", "my.gguf"))
    app = new_app(served, Guard.of(settings), ServingMetrics(served, ()))
    found = {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        for name in ("mine", "smollm2", "my.gguf", "gpt-x"):
            body = {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
            found[name] = await client.post("/v1/chat/completions", json=body)
        for path in ("/health", "/v1/models", "/v1/models/my.gguf", "/v1/models/gpt-x"):
            found[path] = await client.get(path)
    return found


def test_requests_name_the_model_by_any_of_its_names() -> None:
    strict = asyncio.run(answers(strict=True))
    assert [strict[name].status_code for name in ("mine", "smollm2", "my.gguf", "gpt-x")] == [503, 503, 503, 404]
    assert strict["gpt-x"].json()["error"]["code"] == "model_not_found"
    assert [model["id"] for model in strict["/v1/models"].json()["data"]] == ["mine"]
    assert strict["/v1/models/my.gguf"].json()["id"] == "mine"
    assert strict["/v1/models/gpt-x"].status_code == 404


def test_a_server_that_loads_its_model_says_so_and_when_to_ask_again() -> None:
    loading = asyncio.run(answers())
    for name in ("mine", "gpt-x", "/health"):
        assert (loading[name].status_code, int(loading[name].headers["Retry-After"]) > 0) == (503, True), name
    assert loading["mine"].json()["error"]["message"] == "the model is loading; ask again later"
    assert loading["/health"].json() == {"status": "loading"}
