"""Asks a server of task=serve for answers of a JSON schema with long keys, and for free text, in turns.

python benchmarks/schema_answers.py http://127.0.0.1:8000 --answers 200 --clients 8

Prints how many answers are JSON of the schema, and tokens/s of both kinds. Exit status 1 if an answer is not.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
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


async def measure(client: httpx.AsyncClient, numbers: range, clients: int, tokens: int | None) -> tuple[float, Any]:
    """Return tokens/s of answers of one kind, and texts and tokens of all."""
    slots = asyncio.Semaphore(clients)

    async def one(number: int) -> tuple[str, int]:
        async with slots:
            return await answer(client, number, tokens)

    began = time.perf_counter()
    answers = await asyncio.gather(*map(one, numbers))
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
        await measure(client, range(clients), clients, None)
        for turn in range(ROUNDS):
            numbers = range(turn * each, (turn + 1) * each)
            speed, answers = await measure(client, numbers, clients, None)
            speeds["json"].append(speed)
            valid += sum(is_valid(text) for text, _ in answers)
            tokens = round(statistics.mean(count for _, count in answers))
            speeds["text"].append((await measure(client, numbers, clients, tokens))[0])
    print(f"{valid} of {each * ROUNDS} answers are of the schema; {tokens} tokens each")
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
