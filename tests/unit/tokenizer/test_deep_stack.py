"""Grammars whose rules refer to each other in long chains: llguidance follows them by recursion."""

import subprocess
import sys
import threading

import pytest

from graphcore.errors import ConfigError
from graphcore.tokenizer.deep_stack import run_in_deep_stack


def test_a_result_and_an_error_come_back() -> None:
    assert run_in_deep_stack(lambda: 5, 10) == 5
    with pytest.raises(ZeroDivisionError):
        run_in_deep_stack(lambda: 1 // 0, 10)


def test_other_threads_keep_their_stacks() -> None:
    before = threading.stack_size()
    run_in_deep_stack(lambda: 5, 10)
    assert threading.stack_size() == before


def test_a_text_for_which_there_is_no_room_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no room"):
        run_in_deep_stack(lambda: 5, 1 << 50)


CHAIN = """
import sys
from graphcore.tokenizer.grammar import GrammarMask, GrammarTokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

class Letters:
    tag_ids = ()

    def serialized(self):
        letters = pre_tokenizers.ByteLevel.alphabet()
        vocab = {letter: at for at, letter in enumerate(sorted(letters))}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|end|>"])
        return tokenizer.to_str()

count = int(sys.argv[2])
if sys.argv[1] == "lark":
    rules = [f"r{at}: r{at + 1}" for at in range(count)]
    form, grammar = "lark", "\\n".join(["start: r0", *rules, f'r{count}: "a"'])
elif sys.argv[1] == "gbnf":
    rules = [f"r{at} ::= r{at + 1}" for at in range(count)]
    form, grammar = "gbnf", "\\n".join(["root ::= r0", *rules, f'r{count} ::= "a"'])
else:
    inner = lambda at: {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{at}"}}}
    defs = {f"d{at}": inner(at + 1) for at in range(count)} | {f"d{count}": {"type": "null"}}
    form, grammar = "json_schema", {"$defs": defs, "$ref": "#/$defs/d0"}
mask = GrammarMask(GrammarTokens(Letters(), 257, [256]), form, grammar)
mask.prepare()
mask.copy().take()
print("compiled")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["lark", "gbnf", "json_schema"])
def test_chains_of_rules_do_not_end_the_process(form: str) -> None:
    """A process of its own, because one that fails ends by a signal."""
    ran = subprocess.run([sys.executable, "-c", CHAIN, form, "4000"], capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout.split()) == (0, ["compiled"]), ran.stderr
