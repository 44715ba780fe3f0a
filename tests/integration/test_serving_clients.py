"""The Python packages of OpenAI and Anthropic as clients: synchronous and asynchronous, streams, parsed answers.

What they give is compared with the engine's own answers, and their helpers with the plain call of the same seed.
"""

import asyncio
import secrets
from collections.abc import Iterator
from itertools import count
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel, Field
from support.chat_folders import BRIEF, CONTROLS, save_calling_folder
from support.serving import SECONDS, Running, running_server

from graphcore import Engine
from graphcore.sampling_params import SamplingParams

pytestmark = pytest.mark.thorough

ASKED: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Gr\u00fc\u00df Gott?"}]
MOST = 40
SIZES = ["batching.max_sequences=8", "context_length=2048"]


class Person(BaseModel):
    """What a parsed answer is."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)
    mood: Literal["glad", "sad"]


class Mood(BaseModel):
    """What a parsed answer is to Anthropic's client, which asks for no bounds of lengths and numbers."""

    mood: Literal["glad", "sad"]
    is_sure: bool


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = save_calling_folder(tmp_path_factory.mktemp("clients") / "model")
    with Engine.load(folder, dtype="fp32", device="cpu", overrides=SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def running(engine: Engine) -> Iterator[Running]:
    with running_server(lambda: engine, stream_interval=0, sampling=SamplingParams(logit_bias=BRIEF)) as running:
        yield running


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give requests without a seed the seeds 1, 2, ...: Anthropic's interface has none."""
    numbers = count(1)
    monkeypatch.setattr(secrets, "randbelow", lambda _: next(numbers))


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)


@pytest.fixture(scope="module")
def claude(running: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, timeout=SECONDS)


def chat_fields(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": ASKED, "max_tokens": MOST, "seed": 1, **fields}


def own_text(engine: Engine, messages: Any = ASKED, continues: bool = False, **settings: Any) -> str:
    """Return the engine's own answer to a chat, without the control tokens that a random model writes anywhere."""
    asked = {"temperature": 1.0, "logit_bias": BRIEF, "seed": 1, **settings}
    ids = engine.chat_ids(messages, continue_final_message=continues)
    text = engine.submit(ids, MOST, skip_special_tokens=False, **asked).result(SECONDS).text
    for control in CONTROLS:
        text = text.replace(control, "")
    return text


def test_asynchronous_clients_get_the_engines_answers_side_by_side(running: Running, engine: Engine) -> None:
    async def ask() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=SECONDS) as client:
            calls = [client.chat.completions.create(**chat_fields(seed=seed)) for seed in range(6)]
            whole = [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

            async def streamed(seed: int) -> str:
                chunks = await client.chat.completions.create(**chat_fields(seed=seed), stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            return whole, await asyncio.gather(*map(streamed, range(6)))

    whole, streamed = asyncio.run(ask())
    expected = [own_text(engine, seed=seed) for seed in range(6)]
    assert whole == expected
    assert streamed == expected
    assert len(set(whole)) > 3


def test_the_stream_helper_of_chats_ends_with_the_whole_answer(client: openai.OpenAI, engine: Engine) -> None:
    with client.chat.completions.stream(**chat_fields(), stream_options={"include_usage": True}) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == own_text(engine)
    assert len(deltas) > 1
    assert final.usage == client.chat.completions.create(**chat_fields()).usage.model_copy(
        update={"prompt_tokens_details": final.usage.prompt_tokens_details}
    )


def test_log_probabilities_of_streams_are_those_of_whole_answers(client: openai.OpenAI) -> None:
    asked = chat_fields(logprobs=True, top_logprobs=2)
    with client.chat.completions.stream(**asked) as stream:
        done = [event for event in stream if event.type == "logprobs.content.done"]
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert [one.token for one in done[0].content] == [one.token for one in whole]
    assert [one.logprob for one in done[0].content] == pytest.approx([one.logprob for one in whole], abs=1e-4)


def test_parsed_chats_are_of_the_class_whole_and_streamed(client: openai.OpenAI) -> None:
    people = set()
    for seed in range(4):
        asked = chat_fields(seed=seed, response_format=Person, max_tokens=200)
        found = client.chat.completions.parse(**asked).choices[0].message.parsed
        with client.chat.completions.stream(**asked) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == found
        assert isinstance(found, Person)
        people.add(found.model_dump_json())
    assert len(people) > 1


def test_a_parsed_chat_that_is_cut_short_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**chat_fields(response_format=Person, max_tokens=5))


def response_fields(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": ASKED, "max_output_tokens": MOST, "extra_body": {"seed": 1}, **fields}


def test_responses_are_the_engines_whole_streamed_and_asynchronous(
    running: Running, client: openai.OpenAI, engine: Engine
) -> None:
    expected = own_text(engine)
    whole = client.responses.create(**response_fields())
    assert whole.output_text == expected
    assert whole.id.startswith("resp_")
    with client.responses.stream(**response_fields()) as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == expected
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert [event.sequence_number for event in events] == list(range(len(events)))

    async def ask() -> str:
        other = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=SECONDS)
        async with other, other.responses.stream(**response_fields()) as stream:
            async for _ in stream:
                pass
            return (await stream.get_final_response()).output_text

    assert asyncio.run(ask()) == expected


def test_instructions_are_the_system_message(client: openai.OpenAI, engine: Engine) -> None:
    found = client.responses.create(**response_fields(input="Gr\u00fc\u00df Gott?", instructions="Be brief."))
    assert found.output_text == own_text(engine)


def test_parsed_responses_are_of_the_class(client: openai.OpenAI) -> None:
    asked = response_fields(text_format=Person, max_output_tokens=200)
    found = client.responses.parse(**asked).output_parsed
    assert isinstance(found, Person)
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == found


def test_the_output_of_a_response_is_the_input_of_the_next(client: openai.OpenAI, engine: Engine) -> None:
    first = client.responses.create(**response_fields())
    asked = [*ASKED, *first.output, {"role": "user", "content": "And then?"}]
    second = client.responses.create(**response_fields(input=asked))
    turns = [*ASKED, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And then?"}]
    assert second.usage.input_tokens == len(engine.chat_ids(turns))
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_asynchronous_embeddings_and_completions_are_the_engines(running: Running, engine: Engine) -> None:
    async def ask() -> tuple[Any, str]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=SECONDS) as client:
            vectors = await client.embeddings.create(model="tiny", input=["one", "zwei f\u00fcnf"])
            chunks = await client.completions.create(
                model="tiny", prompt="Once", max_tokens=12, seed=5, stream=True, stream_options={"include_usage": True}
            )
            return vectors, "".join([choice.text async for chunk in chunks for choice in chunk.choices])

    vectors, text = asyncio.run(ask())
    expected = engine.embed(["one", "zwei f\u00fcnf"]).numpy()
    assert [one.embedding for one in vectors.data] == [pytest.approx(row, abs=1e-6) for row in expected]
    settings = {"temperature": 1.0, "logit_bias": BRIEF, "seed": 5}
    assert text == engine.submit(engine.prompts.prompt_ids("Once"), 12, **settings).result(SECONDS).text


def test_the_models_list_names_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_errors_are_of_the_clients_classes(
    client: openai.OpenAI, claude: anthropic.Anthropic, running: Running
) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**chat_fields(temperature=-1))
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**response_fields(previous_response_id="resp_1"))
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(**message_fields(extra_body={"temperature": 3}))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    with httpx.Client(base_url=running.url) as http:
        assert http.post("/v1/messages", json=message_fields()).json()["id"].startswith("msg_")


def message_fields(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": MOST, "system": "Be brief.", "messages": ASKED[1:], **fields}


def test_messages_are_the_engines_whole_streamed_and_asynchronous(
    running: Running, claude: anthropic.Anthropic, engine: Engine
) -> None:
    greedy = message_fields(extra_body={"top_k": 1})  # messages have no seed
    expected = own_text(engine, top_k=1)
    whole = claude.messages.create(**greedy)
    assert whole.content[0].text == expected
    with claude.messages.stream(**greedy) as stream:
        assert "".join(stream.text_stream) == expected
        final = stream.get_final_message()
    assert final.content[0].text == expected
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)

    async def ask() -> str:
        client = anthropic.AsyncAnthropic(base_url=running.url, api_key="none", timeout=SECONDS)
        async with client, client.messages.stream(**greedy) as stream:
            return await stream.get_final_text()

    assert asyncio.run(ask()) == expected


def test_counted_tokens_are_those_of_the_prompt(claude: anthropic.Anthropic, engine: Engine) -> None:
    fields = {name: value for name, value in message_fields().items() if name != "max_tokens"}
    expected = len(engine.chat_ids(ASKED))
    assert claude.messages.count_tokens(**fields).input_tokens == expected
    usage = claude.messages.create(**message_fields(max_tokens=1)).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected


def test_a_stop_sequence_is_named_and_left_out(claude: anthropic.Anthropic, engine: Engine) -> None:
    whole = own_text(engine, top_k=1)
    stop = whole[3:5]
    assert stop.strip()
    found = claude.messages.create(**message_fields(stop_sequences=[stop], extra_body={"top_k": 1}))
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == whole[: whole.index(stop)]


def test_parsed_messages_are_of_the_class(claude: anthropic.Anthropic) -> None:
    found = claude.messages.parse(**message_fields(max_tokens=200), output_format=Mood)
    assert isinstance(found.parsed_output, Mood)


def test_the_beginning_of_an_answer_is_continued(claude: anthropic.Anthropic, engine: Engine) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "Well, "}]
    found = claude.messages.create(**message_fields(messages=begun[1:], extra_body={"top_k": 1}))
    assert found.content[0].text == own_text(engine, begun, continues=True, top_k=1)
