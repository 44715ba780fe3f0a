"""Asks a server of task=serve for answers of a JSON schema with long keys, and for free text, in turns.

python benchmarks/schema_answers.py http://127.0.0.1:8000 --answers 200 --clients 8

Prints how many answers are JSON of the schema, and tokens/s of both kinds. A free text has the length of the JSON with
the same number, so that both kinds keep the server equally busy. Exit status 1 if an answer is not JSON of the schema.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import httpx
import jsonschema

ROUNDS = 5  # of both kinds of answers, alternating
PATIENCE = 300.0  # seconds for an answer
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "full_name_of_the_person_who_is_described": {"type": "string", "maxLength": 24},
        "current_city_of_residence_of_the_person": {"type": "string", "maxLength": 24},
        "is_currently_employed_in_a_full_time_position": {"type": "boolean"},
        "years_of_professional_experience_in_total": {"type": "integer", "minimum": 0, "maximum": 60},
        "preferred_programming_languages_in_order": {
            "type": "array",
            "items": {"enum": ["python", "rust", "haskell", "fortran"]},
            "maxItems": 3,
        },
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])


async def answer(client: httpx.AsyncClient, number: int, tokens: int | None) -> tuple[str, int]:
    """Return the text of an answer and the number of its tokens; `tokens` of free text, None for JSON."""
    bound = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}}
    wanted: dict[str, Any] = bound if tokens is None else {"max_tokens": tokens, "ignore_eos": True}
    message = {"role": "user", "content": f"Describe person number {number}."}
    got = await client.post("/v1/chat/completions", json={"messages": [message], "seed": number, **wanted})
    body = got.raise_for_status().json()
    return body["choices"][0]["message"]["content"], body["usage"]["completion_tokens"]


async def measure(
    client: httpx.AsyncClient, lengths: Mapping[int, int | None], clients: int
) -> tuple[float, list[tuple[str, int]]]:
    """Return tokens/s of answers, and texts and tokens of all.

    Args:
        lengths: tokens of each answer's free text by its number; None for JSON.
    """
    slots = asyncio.Semaphore(clients)

    async def one(number: int, tokens: int | None) -> tuple[str, int]:
        async with slots:
            return await answer(client, number, tokens)

    began = time.perf_counter()
    answers = await asyncio.gather(*(one(number, tokens) for number, tokens in lengths.items()))
    return sum(count for _, count in answers) / (time.perf_counter() - began), answers


def is_valid(text: str) -> bool:
    """Return whether a text is JSON of the schema."""
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"not of the schema: {error}: {text}")
        return False
    return True


async def compare(url: str, count: int, clients: int) -> bool:
    """Ask for all answers, print both speeds, and return whether all JSON is of the schema."""
    speeds: dict[str, list[float]] = {"json": [], "text": []}
    valid, each = 0, count // ROUNDS
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        await measure(client, dict.fromkeys(range(clients)), clients)
        for turn in range(ROUNDS):
            numbers = range(turn * each, (turn + 1) * each)
            speed, answers = await measure(client, dict.fromkeys(numbers), clients)
            speeds["json"].append(speed)
            valid += sum(is_valid(text) for text, _ in answers)
            lengths = [tokens for _, tokens in answers]
            text_speed, _ = await measure(client, dict(zip(numbers, lengths, strict=True)), clients)
            speeds["text"].append(text_speed)
    mean = statistics.mean(lengths)
    print(f"{valid} of {each * ROUNDS} answers are of the schema, the last ones with {mean:.0f} tokens each")
    for kind, found in speeds.items():
        print(f"{kind}: {statistics.median(found):.0f} tokens/s ({', '.join(f'{one:.0f}' for one in found)})")
    return valid == each * ROUNDS


def main() -> int:
    """Compare JSON and free text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    given = parser.parse_args()
    return 0 if asyncio.run(compare(given.url, given.answers, given.clients)) else 1


if __name__ == "__main__":
    sys.exit(main())
