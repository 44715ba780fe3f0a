"""What an answer in several channels says to the user: gpt-oss thinks in one and answers in another.

    <|channel|>analysis<|message|>The user asks ...<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>

Source: OpenAI harmony response format, "Message format" and "Receiving messages".
"""

from collections.abc import Sequence
from itertools import pairwise

from graphcore.tokenizer.tokenizer import Tokenizer

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
MARKS = (START, CHANNEL, MESSAGE, "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
SAID = "final"


def final_message(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str | None:
    """Return the text of the final channel, empty if it was not reached; None for an answer without channels.

    A chat template writes earlier answers into the final channel itself, so only this text goes back to it.
    """
    marks = [(at, piece) for at, piece in enumerate(map(tokenizer.id_to_piece, token_ids)) if piece in MARKS]
    if CHANNEL not in {piece for _, piece in marks}:
        return None
    channel, said = "", []
    for (at, piece), (end, _) in pairwise([*marks, (len(token_ids), "")]):
        text = tokenizer.decode(token_ids[at + 1 : end])
        if piece == START:
            channel = ""
        elif piece == CHANNEL:
            channel = text.strip()
        elif piece == MESSAGE and channel == SAID:
            said.append(text)
    return "".join(said)
