"""Thoughts in answers: opened by the prompt or by the model, cut anywhere; control tokens are no text."""

from itertools import product

from support.cases import in_case
from support.tool_texts import SOURCES, THINK, TOOLS, format_named, parsed, pieces

from graphcore.serving.chat_call import Content, Reasoning
from graphcore.serving.tool_formats.answer_parser import AnswerParser
from graphcore.serving.tool_formats.families import GPT_OSS, HERMES, LLAMA3, PLAIN, tool_format_of
from graphcore.tokenizer.chat_template import ChatTemplate

SIZES = [1, 2, 5, 10_000]
THINKING = tool_format_of(THINK, "qwen2")
CHATML_TURN = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
HEADERS = "<|start_header_id|>assistant<|end_header_id|>\n\n"
CASES = [
    (
        THINKING,
        CHATML_TURN + "<think>\n",
        "Hm.\n\nSo.\n</think>\n\nHi\n there.\n<|im_end|>",
        "Hm.\n\nSo.",
        "Hi\n there.\n",
    ),
    (THINKING, CHATML_TURN + "<think>\nI begin", " and end.</think>Hi", " and end.", "Hi"),
    (THINKING, CHATML_TURN, "<think>\nHm.\n</think>\n\nHi", "Hm.", "Hi"),
    (THINKING, CHATML_TURN, "\n <think>Hm.</think>Hi", "Hm.", "Hi"),
    (THINKING, CHATML_TURN + "<think>\n\n</think>\n\n", "Hi </think>", "", "Hi </think>"),
    (THINKING, CHATML_TURN, "The tag <think> opens thoughts.</think>", "", "The tag <think> opens thoughts.</think>"),
    (THINKING, CHATML_TURN + "<think>\n", "Cut off <", "Cut off <", ""),
    (THINKING, CHATML_TURN, "<think>\n\n</think>\n\nHi", "", "Hi"),
    (THINKING, f"{CHATML_TURN}<think></think>{HEADERS}", "<think>Hm.</think>Hi", "Hm.", "Hi"),
    (THINKING, f"{HEADERS}<think>\n{CHATML_TURN}", "Hi", "", "Hi"),
    (THINKING, f"{HEADERS}{CHATML_TURN}<think>\nI", "Hm.</think>Hi", "Hm.", "Hi"),
    (THINKING, "User: <think>\nModel:", "Hi", "", "Hi"),
    (THINKING, "User: x\nModel: <think>\n", "Hm.</think>Hi", "Hm.", "Hi"),
    (PLAIN, CHATML_TURN, "<think>Hm.</think>Hi<|im_end|><|endoftext|>", "", "<think>Hm.</think>Hi"),
    (PLAIN, "", "  indented\n<end_of_turn>", "", "  indented\n"),
    (HERMES, CHATML_TURN, "a <|im_end|>", "", "a "),
    (LLAMA3, "", "\n\n Hi<|eot_id|>", "", "\n\n Hi"),
    (format_named("gemma4"), "<|turn>model\n", "<|channel>thought\nHm.\n<channel|>Hi<turn|>", "Hm.", "Hi"),
    (format_named("gemma4"), "<|turn>model\n<|channel>thought\n", "Hm.\n<channel|>Hi", "Hm.", "Hi"),
    (format_named("gemma4"), "<|turn>model\n<|channel>thought\n<channel|>", "Hi", "", "Hi"),
    (format_named("gemma4"), "", "Hi<|channel>thought\nHm.<channel|> there", "Hm.", "Hi there"),
    (format_named("gemma4"), "<|turn>model\n", "<|channel>", "", ""),
    (format_named("gemma4"), "<|turn>model\n", "Hi<|channel>thou", "", "Hi"),
    (format_named("gemma4"), "<|turn>model\n", "a <|chan", "", "a <|chan"),
    (
        GPT_OSS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
        "Hm.",
        "Hi",
    ),
    (
        GPT_OSS,
        "<|start|>assistant<|channel|>analysis<|message|>Hm",
        ".<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        ".",
        "Hi",
    ),
    (GPT_OSS, "<|start|>assistant<|channel|>final<|message|>So", " Hi<|return|>", "", " Hi"),
    (
        GPT_OSS,
        "<|start|>assistant",
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        "",
        "First.\nHi",
    ),
    (GPT_OSS, "<|start|>assistant", "Hello, <b>", "", "Hello, <b>"),
    (GPT_OSS, "", "<|channel|>final<|message|>Hi", "", "Hi"),
]


def test_thoughts_and_content_are_told_apart() -> None:
    for case, size in product(CASES, SIZES):
        known, prompt, text, thoughts, content = case
        with in_case(known.name, text, size):
            found = parsed(known, pieces(text, size), prompt)
            assert (found.reasoning, found.content, found.calls) == (thoughts, content, [])


def test_a_prompt_that_opens_thoughts_is_rendered_by_its_template() -> None:
    prompt = ChatTemplate(THINK, "t").render([{"role": "user", "content": "x"}], {})
    assert parsed(THINKING, ["Hm.</think>\n\nHi"], prompt).reasoning == "Hm."
    assert THINKING.knows_reasoning
    assert not THINKING.knows_tools


def test_text_comes_with_the_piece_that_holds_it() -> None:
    parser = AnswerParser(THINKING, TOOLS, CHATML_TURN + "<think>\n", choice=3)
    assert parser.push("Hm, x") == [Reasoning("Hm, x", 3)]
    assert parser.push(".</thi") == [Reasoning(".", 3)]
    assert parser.push("nk>\n\nHi") == [Content("Hi", 3)]
    assert parser.push(" <") == []
    assert parser.finish() == [Content(" <", 3)]


def test_control_tokens_are_no_content() -> None:
    for name in SOURCES:
        with in_case(name):
            known = format_named(name)
            start = "<|channel|>final<|message|>" if name == "gpt_oss" else ""
            for control in known.controls:
                for size in SIZES:
                    assert parsed(known, pieces(f"{start}Hi{control}", size)).content == "Hi"


def test_a_calls_header_that_is_cut_is_content_and_not_the_end_of_the_thoughts() -> None:
    for channel, size in product(["analysis", "commentary"], [1, 3, 10_000]):
        with in_case(size, channel):
            header = "assistant to=functions.search_2<|channel|>commentary js"
            text = f"<|channel|>{channel}<|message|>Hm.<|end|><|start|>{header}"
            found = parsed(format_named("gpt_oss"), pieces(text, size), "<|start|>assistant")
            thoughts, content = ("Hm.", header) if channel == "analysis" else ("", f"Hm.\n{header}")
            assert (found.reasoning, found.content, found.calls) == (thoughts, content, [])
