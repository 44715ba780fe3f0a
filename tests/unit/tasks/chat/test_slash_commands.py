"""Commands of a chat, its long lines and its full context, over a pipe; answers against an engine without a chat."""

import io
import json
import re
from pathlib import Path

import pytest
from support.task_runs import NEW, RunTask

from graphcore import Engine
from graphcore.engine.loading.load_model import LoadedModel
from graphcore.errors import TokenizerError
from graphcore.tasks.chat.conversation import Conversation
from graphcore.tasks.chat.typed_lines import ChatLines, Entry
from graphcore.tasks.commands.chat import typed_mark

ASSISTANT = len("assistant:")


def tokens_of(*turns: str) -> int:
    """Return the tokens of "role:content" turns in the test template, one a character, and of what opens an answer."""
    return sum(len(turn) + 2 for turn in turns) + ASSISTANT


def texts(run) -> list[str]:
    return [turn["text"] for turn in run.record["turns"]]


def alone(folder: Path, messages: list[dict[str, str]], most: int = NEW, **params: float) -> str:
    with Engine.load(folder, graph="eager", device="cpu") as engine:
        return engine.generate([engine.chat_ids(messages)], max_new_tokens=most, **params)[0].text


def test_help_names_every_command(say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("/help\n").status == 0
    shown = capsys.readouterr().err
    names = re.findall(r"^/(\w+)", shown, re.MULTILINE)
    assert " ".join(names) == "help system set retry continue undo save load model show stats clear exit"
    documented = (Path(__file__).parents[4] / "docs" / "prompts.md").read_text(encoding="utf-8")
    assert [name for name in (*names, "?", "bye", "quit") if f"`/{name}" not in documented] == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/contnue", r"unknown command /contnue \(did you mean '/continue'\?\); /help lists them"),
        ("/etc/passwd is what?", r"unknown command /etc/passwd; .*a space before it makes it a text"),
        ("/Help", "unknown command /Help .*'/help'"),
        ("/HELP", "unknown command /HELP .*'/help'"),
        ("/ help", "unknown command /;"),
        ("/set\ttop_k=1.5", "top_k=1.5 must be a whole number"),
        ("/clear now", "/clear takes nothing, found 'now'"),
        ("/save", "/save needs FILE"),
        ("/model smolm2", r"/model knows no 'smolm2' \(did you mean 'smollm2'\?\); graphcore list has the names"),
        ("/load /nowhere/chat.json", r"/nowhere/chat.json cannot be read \(No such file"),
        ("/retry", "/retry needs an answer, and there is none yet"),
        ("/continue", "/continue needs an answer"),
        ("/set temprature=1", r"/set knows no 'temprature' \(did you mean 'temperature'\?\)"),
        ("/set temperature", "/set needs a value for temperature"),
        ("/set temperature=hot", "temperature=hot must be a number"),
        ("/set top_k=1.5", "top_k=1.5 must be a whole number"),
        ("/set temperature=-1", r"sampling.temperature=-1.0 must be 0 \(greedy\)"),
        ("/set temperature=nan", "sampling.temperature=nan must be 0"),
        ("/set top_p=0.9", "sampling.top_p=0.9 has no effect with sampling.temperature=0"),
        ("/set seed=18446744073709551616", "seed=18446744073709551616 must be a number of 64 bits"),
        ("/set max_new_tokens=0", "max_new_tokens=0 must be at least 1"),
        ('a\n"""never ended', "standard input, line 2: the input ends within the text"),
        ("a \\\\", "line 1: the input ends within the text"),
    ],
)
def test_what_is_wrong_in_a_pipe_ends_it_and_names_the_line(say, line: str, said: str) -> None:
    run = say(line.replace("\\\\", "\\") + "\n")
    assert run.status == 1
    assert re.search(said, str(run.error))
    assert str(run.error).startswith("standard input, line ")


def test_a_space_before_a_slash_makes_it_a_text(say) -> None:
    turns = say(" /exit\n").record["turns"]
    assert [turn["user"] for turn in turns] == ["/exit"]


def test_a_text_may_have_several_lines(say) -> None:
    said_by_typed = {
        "one \\\ntwo\\\n/exit\n": "one \ntwo\n/exit",
        '"""\n  one\n\n/exit\n"""\n': "  one\n\n/exit",
        '"""one\ntwo"""\n': "one\ntwo",
        '"""one"""\n': "one",
        '""" "a" """ \n': ' "a" ',
        "carriage\r\n": "carriage",
        "last line has no break": "last line has no break",
    }
    assert [turn["user"] for turn in say("".join(said_by_typed)).record["turns"]] == [*said_by_typed.values()]


def test_a_blank_line_and_a_blank_block_say_nothing(say) -> None:
    assert say('\n  \n"""\n \n"""\n').record["turns"] == []


def test_a_system_message_is_set_shown_and_taken_away(say, capsys: pytest.CaptureFixture[str]) -> None:
    run = say("/set system be brief\n/system\none\n/clear\n/system -\none\n")  # the first as ollama has it
    first, second = run.record["turns"]
    assert first["prompt_tokens"] == tokens_of("system:be brief", "user:one")
    assert second["prompt_tokens"] == tokens_of("user:one")
    shown = capsys.readouterr().err
    assert shown.count("[system message: be brief]") == 2
    assert "[there is no system message]" in shown


def test_a_preset_is_a_system_message_by_name(
    say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    presets = tmp_path / "own" / "graphcore" / "presets"
    error = say("/system @brief\n").error
    assert f"/system @brief: unknown preset; there are none; write one into {presets}/NAME.txt" in str(error)
    presets.mkdir(parents=True)
    (presets / "brief.txt").write_text("be brief\n", encoding="utf-8")
    (presets / "blank.txt").write_text(" \n", encoding="utf-8")
    turns = say("one\n/clear\n/system @brief\none\n").record["turns"]
    assert [turn["prompt_tokens"] for turn in turns] == [
        tokens_of("user:one"),
        tokens_of("system:be brief", "user:one"),
    ]
    assert "[system message: be brief]" in capsys.readouterr().err
    (turn,) = say("one\n", "system=@brief").record["turns"]
    assert turn["prompt_tokens"] == tokens_of("system:be brief", "user:one")
    for name, said in (
        ("brie", "system=@brie: unknown preset (did you mean 'brief'?); known: blank, brief"),
        ("../presets/brief", "unknown preset"),
        ("blank", "blank.txt is empty"),
    ):
        assert said in str(say("one\n", f"system=@{name}").error)


def test_the_model_is_said_and_how_to_chat_with_another(
    say, chat_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say("/model\n/model smollm3\n/model 'my models/a.gguf'\n").status == 0
    shown = capsys.readouterr().err
    name = chat_folder.name
    assert f"[{name} is loaded, from {chat_folder}]" in shown
    assert f"[{name} stays loaded until the chat ends; for smollm3 type /exit, then graphcore chat smollm3; " in shown


def test_the_line_that_is_typed_begins_with_the_model_and_the_context_s_fill(chat_folder: Path) -> None:
    with Engine.load(chat_folder, graph="eager", device="cpu", overrides="context_length=200") as engine:
        conversation = Conversation(engine, "s" * 12, True)
        name = chat_folder.name
        assert typed_mark(conversation) == f"{name} 0%> "
        conversation.add("u" * 10, "a" * 20, [5] * 20)
        taken = tokens_of("system:" + "s" * 12, "user:" + "u" * 10) + 20
        assert typed_mark(conversation) == f"{name} {100 * taken / 200:.0f}%> "


def test_sampling_is_set_for_the_answers_that_follow(say, chat_folder: Path) -> None:
    run = say(
        "one\n/clear\n/set temperature=1.5 top_k=40 seed=7 max_new_tokens=4\none\n/clear\n"
        "/set parameter temperature 0\none\n"  # as ollama has it
    )
    question = [{"role": "user", "content": "one"}]
    warm = alone(chat_folder, question, 4, temperature=1.5, top_k=40, seed=8)  # the chat's second answer
    assert texts(run) == [alone(chat_folder, question), warm, alone(chat_folder, question, 4)]


def test_undo_takes_a_turn_back(say, chat_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = say("one\ntwo\n/undo\nthree\n")
    first, _, third = run.record["turns"]
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "three"},
    ]
    assert third["text"] == alone(chat_folder, messages)
    assert third["prompt_tokens"] == tokens_of("user:one", f"assistant:{first['text']}", "user:three")
    assert "[taken back: two]" in capsys.readouterr().err


def test_the_context_s_fill_and_the_last_answer_are_shown(say, capsys: pytest.CaptureFixture[str]) -> None:
    run = say("/stats\none\n/stats\n/undo\n/stats\n/show\n/bye\ntwo\n")
    (turn,) = run.record["turns"]
    shown = capsys.readouterr().err
    context = int(re.findall(r"for (\d+) tokens", shown)[0])
    taken = turn["prompt_tokens"] + turn["new_tokens"]
    said = re.findall(r"\[(\d+) of (\d+) tokens of the context in (\d+) turns?\]", shown)
    assert said == [("0", str(context), "0"), (str(taken), str(context), "1"), ("0", str(context), "0")]
    assert shown.count(f"last answer: {turn['new_tokens']} tokens at ") == 2
    assert f"; 0 of {turn['prompt_tokens']} prompt tokens were in the cache" in shown
    model = re.findall(r"\[[^\]]*layers\);[^\]]*\]", shown)
    assert len(model) == 2
    assert model[0].startswith(model[1].removesuffix("]"))


def test_other_names_of_commands_are_known(say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("/?\n/quit\none\n").record["turns"] == []
    assert "/help" in capsys.readouterr().err


def test_retry_draws_another_answer_in_the_place_of_the_last(say, chat_folder: Path) -> None:
    run = say("one\n/retry\ntwo\n", "sampling.temperature=1.5", "seed=3")
    first, second, third = run.record["turns"]
    question = {"role": "user", "content": "one"}
    assert second["text"] == alone(chat_folder, [question], temperature=1.5, seed=4)
    assert first["text"] != second["text"]
    answered = {"role": "assistant", "content": second["text"]}
    again = [question, answered, {"role": "user", "content": "two"}]
    assert third["text"] == alone(chat_folder, again, temperature=1.5, seed=5)
    assert [turn["command"] for turn in run.record["turns"]] == [None, "retry", None]
    assert second["user"] == "one"


def test_a_greedy_retry_says_that_it_gives_the_same(say, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = texts(say("one\n/retry\n"))
    assert first == second
    assert "[greedy sampling takes the likeliest answer each time" in capsys.readouterr().err


def test_continue_goes_on_where_the_answer_was_cut(say, capsys: pytest.CaptureFixture[str]) -> None:
    run = say("one\n/continue\n/continue\ntwo\n")
    whole = say("one\n/set max_new_tokens=10\ntwo\n", f"max_new_tokens={3 * NEW}")
    assert "".join(texts(run)[:3]) == texts(whole)[0]
    assert texts(run)[3] == texts(whole)[1]
    assert "[cut: max_new_tokens=10 allows no more; /continue goes on]" in capsys.readouterr().err
    second = run.record["turns"][1]
    assert second["reused_tokens"] == tokens_of("user:one") + NEW - 1  # nothing is run again but its last token
    assert (second["user"], second["command"]) == ("one", "continue")


def test_without_a_template_continue_and_retry_work_too(say, base_folder: Path) -> None:
    run = say("once\n/continue\n/retry\nthen\n", "chat=off", checkpoint=base_folder)
    whole = say("once\n", "chat=off", f"max_new_tokens={2 * NEW}", checkpoint=base_folder)
    first, second, third, fourth = run.record["turns"]
    assert first["text"] + second["text"] == texts(whole)[0]
    assert third["text"] == first["text"]
    assert fourth["prompt_tokens"] == len("once") + NEW + len("\nthen")
    run = say("once\n/system x\n", "chat=off", checkpoint=base_folder)
    assert "/system needs a chat template" in str(run.error)


def test_a_chat_is_saved_and_goes_on_later(say, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my chat.json"
    whole = say("one\ntwo\nthree\n", "system=be brief")
    first = say(f"one\ntwo\n/save {file}\n", "system=be brief")
    second = say(f"nothing\n/load {file}\nthree\n/save {file}\n")
    assert [*texts(first), texts(second)[1]] == texts(whole)
    assert second.record["turns"][1]["prompt_tokens"] == whole.record["turns"][2]["prompt_tokens"]
    saved = json.loads(file.read_text(encoding="utf-8"))["messages"]
    assert [message["role"] for message in saved] == ["system", *["user", "assistant"] * 3]
    assert [message["content"] for message in saved[2::2]] == texts(whole)
    shown = capsys.readouterr().err
    assert f"[2 turns saved to {file}]" in shown
    assert f"[2 turns loaded from {file}]" in shown


@pytest.mark.thorough
@pytest.mark.parametrize(
    "content",
    [
        "my notes",
        "[]",
        '{"messages": 3}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": "unanswered"}]}',
        '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}',
    ],
)
def test_a_file_that_is_no_chat_is_neither_loaded_nor_written_over(say, tmp_path: Path, content: str) -> None:
    file = tmp_path / "notes"
    file.write_text(content)
    for command in ("load", "save"):
        run = say(f"one\n/{command} {file}\n")
        assert f"standard input, line 2: {file} " in str(run.error)
        assert "no saved chat" in str(run.error)
    assert file.read_text() == content


def test_a_chat_that_cannot_be_written_says_why(say, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = say(f"one\n/save {tmp_path / 'file' / 'chat.json'}\n")
    assert re.search(r"chat.json cannot be written \(.*(Not a directory|File exists)", str(run.error))


CONTEXT = 96


def test_the_oldest_turns_go_when_the_context_is_full(
    say, chat_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["first question", "second question", "third one", "and a fourth"]
    run = say("\n".join(asked), f"context_length={CONTEXT}")
    said = texts(run)
    turns = [(f"user:{question}", f"assistant:{answer}") for question, answer in zip(asked, said, strict=True)]

    def needed(first: int, last: int) -> int:
        return tokens_of(*(text for turn in turns[first:last] for text in turn), turns[last][0])

    first, lengths = 0, []
    for last in range(4):
        while needed(first, last) + NEW > CONTEXT:
            first += 1
        lengths.append(needed(first, last))
    assert first > 0
    assert [turn["prompt_tokens"] for turn in run.record["turns"]] == lengths
    kept = [{"role": role, "content": text} for question, answer in zip(asked[first:3], said[first:3], strict=True)
            for role, text in (("user", question), ("assistant", answer))]  # fmt: skip
    assert said[3] == alone(chat_folder, [*kept, {"role": "user", "content": asked[3]}])
    notes = re.findall(r"\[the context of 96 tokens is full: the oldest .*\]", capsys.readouterr().err)
    assert notes
    assert len(notes) <= first


@pytest.mark.parametrize(("most", "is_kept"), [("5", True), ("null", False)])
def test_a_quarter_of_the_context_is_left_to_an_answer_that_may_be_long(say, most: str, is_kept: bool) -> None:
    question = "a question of more than forty characters"
    run = say(f"hi\n/set max_new_tokens={most}\n{question}\n", f"context_length={CONTEXT}")
    first, second = run.record["turns"]
    whole = tokens_of("user:hi", f"assistant:{first['text']}", f"user:{question}")
    assert CONTEXT * 3 // 4 < whole <= CONTEXT - 5
    assert second["prompt_tokens"] == (whole if is_kept else tokens_of(f"user:{question}"))


def test_what_was_left_out_is_saved(say, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    run = say(f"first question\nsecond question\nthird one\nand a fourth\n/save {file}\n", f"context_length={CONTEXT}")
    saved = json.loads(file.read_text())["messages"]
    assert [message["content"] for message in saved[1::2]] == texts(run)


def test_an_answer_is_as_long_as_the_context_allows_and_continue_makes_room(
    say, chat_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = say("hi\n/set max_new_tokens=null\nok\n/continue\n", f"context_length={CONTEXT}")
    first, second, third = run.record["turns"]
    assert (first["new_tokens"], second["finish_reason"], third["finish_reason"]) == (NEW, "context", "context")
    assert second["prompt_tokens"] + second["new_tokens"] == CONTEXT + 1
    assert third["prompt_tokens"] == tokens_of("user:ok") + second["new_tokens"]  # the first turn has gone
    with Engine.load(chat_folder, graph="eager", device="cpu") as engine:
        ids = engine.chat_ids([{"role": "user", "content": "ok"}]) + engine.prompts.text_ids(second["text"], False)
        assert third["text"] == engine.generate([ids], max_new_tokens=third["new_tokens"])[0].text
    shown = capsys.readouterr().err
    assert "[the context of 96 tokens is full: the oldest turn is left out]" in shown
    assert "[cut: the context of 96 tokens is full; /continue leaves out the oldest turns and goes on]" in shown
    assert "[cut: the context of 96 tokens is full of this turn; /clear forgets it" in shown


def test_continue_says_when_one_turn_fills_the_context(say) -> None:
    run = say("hi\n/continue\n", "max_new_tokens=null", f"context_length={CONTEXT}")
    assert "line 2: this turn fills the context of 96 tokens; /clear forgets it" in str(run.error)


def test_a_text_that_the_context_does_not_hold_says_what_can_be_done_in_a_chat(say) -> None:
    run = say("hi\n" + "x" * CONTEXT + "\n", f"context_length={CONTEXT}")
    takes = tokens_of("user:" + "x" * CONTEXT)
    assert f"line 2: the text takes {takes} tokens with what stands around it, and the context has 96" in str(run.error)


def test_continue_says_that_an_answer_had_ended(say, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(LoadedModel, "end_ids", frozenset(range(200)))  # whatever comes is an end
    run = say("hi\n/continue\n")
    out, err = capsys.readouterr()
    assert [turn["finish_reason"] for turn in run.record["turns"]] == ["end", "end"]
    assert out == "\n"  # of the first answer
    assert err.count("[the model had ended the answer; type a message]") == 1


def chat_file(folder: Path, *contents: str) -> Path:
    """Write a saved chat: what was asked, answered, asked, answered and so on."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    file = folder / "chat.json"
    file.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    return file


@pytest.mark.parametrize(("tokens", "shorter"), [("auto", 0), ("parse", 1)])
def test_a_loaded_answer_is_text_whatever_it_spells(say, tmp_path: Path, tokens: str, shorter: int) -> None:
    file = chat_file(tmp_path, "hi", "a<|end|>b")
    (turn,) = say(f"/load {file}\n/continue\n", f"special_tokens={tokens}").record["turns"]
    assert turn["prompt_tokens"] == tokens_of("user:hi") + len("a<|end|>b") - shorter * (len("<|end|>") - 1)


def test_a_chat_that_cannot_be_loaded_leaves_the_one_there_is(chat_folder: Path, tmp_path: Path) -> None:
    file = chat_file(tmp_path, "x", "y", "z", "\ud800")
    with Engine.load(chat_folder, graph="eager", device="cpu") as engine:
        conversation = Conversation(engine, "be brief", has_template=True)
        conversation.add("hi", "a", [0])
        with pytest.raises(TokenizerError, match="not valid Unicode"):
            conversation.load(file)
        assert conversation.system == "be brief"
        assert [exchange.user for exchange in conversation.exchanges] == ["hi"]


def test_a_user_who_spells_the_end_of_a_turn_does_not_end_it(say) -> None:
    (turn,) = say("a<|end|>b\n").record["turns"]
    assert turn["prompt_tokens"] == tokens_of("user:a<|end|>b")
    (parsed,) = say("a<|end|>b\n", "special_tokens=parse").record["turns"]
    assert parsed["prompt_tokens"] == turn["prompt_tokens"] - len("<|end|>") + 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["~nosuchuser/x", "x" * 300, "a\0b", "-", "/dev/zero"])
@pytest.mark.parametrize("command", ["save", "load"])
def test_a_path_that_can_be_none_is_said_in_one_line(
    say, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    monkeypatch.setattr("graphcore.tasks.chat.conversation.LONGEST_PROMPT", 1024)
    assert say(f"/{command} {name}\n").error is not None


def test_a_command_that_was_pasted_with_its_line_break_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    lines = ChatLines(lambda: "> ")
    monkeypatch.setattr(lines, "_line", lambda mark: "/exit\n")
    assert next(iter(lines)) == Entry("/exit", True, "standard input, line 0")
    monkeypatch.setattr(lines, "_line", lambda mark: "/exit\nis a line")
    assert not next(iter(lines)).is_command


def test_what_is_no_text_is_named_by_message_and_place(say) -> None:
    run = say("fine\ncaf\udce9\n")
    assert "line 2: message 2 (role 'user') is not valid Unicode at character 3; give it as UTF-8" in str(run.error)


def test_a_model_without_a_template_is_called_by_its_group(run_task: RunTask, base_folder: Path) -> None:
    model = (
        f"model.checkpoint={base_folder}",
        f"model.published.checkpoint={base_folder}",
        "model.published.sha256=null",
    )
    for task in ("chat", "generate"):
        said = str(run_task(f"task={task}", "chat=on", "prompt=hi", *model).error)
        assert said.startswith("chat=on, but smollm2 has no chat template")


@pytest.mark.parametrize("lines", ["x" * 101, '"""' + "x\n" * 100, "x\\\n" * 60])
def test_a_text_without_an_end_is_refused(say, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    monkeypatch.setattr("graphcore.tasks.chat.typed_lines.LONGEST_PROMPT", 100)
    run = say(f"hi\n{lines}\n")
    assert "standard input, line 2: the text that begins here has more than 100 characters; end it" in str(run.error)
