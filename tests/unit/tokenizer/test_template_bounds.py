"""Chat templates are strangers' code: each gets 2 s, 1 MB of text and 256 MB, whatever thread it is asked in."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graphcore.errors import TemplateError, TokenizerError
from graphcore.tokenizer.bounded_process import Bounds
from graphcore.tokenizer.chat_template import ChatTemplate

CHAT = [{"role": "user", "content": "Hi"}]
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWING = "{% set x = namespace(t='a') %}{% for i in range(60) %}{% set x.t = x.t * 2 %}{% endfor %}"
DEEP = 5000
HOSTILE = {
    "loops": (LOOPS, r"takes more than 0\.3 s"),
    "words": ("{{ lipsum(n=10**7) }}", r"takes more than 0\.3 s|more memory"),
    "power": ("{{ (10**10**7) % 7 }}{{ 7 ** (7 ** 9) }}", r"takes more than 0\.3 s"),
    "text": ("{{ 'a' * 10**11 }}", "more memory"),
    "text of a variable": ("{{ messages[0].content * 10**10 }}", "more memory"),
    "text that grows": (GROWING, "more memory"),
    "lists": ("{{ ([1] * 10**8) | length }}", "more memory"),
    "width": ("{{ '%99999999999d' % 1 }}", "more memory"),
    "centre": ("{{ 'a' | center(10**10) }}", "more memory"),
    "digits": ("{{ 10**5000 }}", "Exceeds the limit"),
    "output": ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", r"writes more than \d+ characters"),
    "parentheses": ("{{ " + "(" * DEEP + "1" + ")" * DEEP + " }}", "nested too deep"),
    "lists in lists": ("{{ " + "[" * DEEP + "]" * DEEP + " }}", "nested too deep"),
    "blocks": ("{% if 1 %}" * DEEP + "{% endif %}" * DEEP, "nested too deep"),
    "loops in loops": ("{% for i in messages %}" * 50 + "{% endfor %}" * 50, "nested"),
    "signs": ("{{ " + "-" * DEEP + "1 }}", "nested too deep"),
    "attributes": ("{{ x" + ".x" * DEEP + " }}", "nested too deep"),
    "filters": ("{{ x" + "|upper" * DEEP + " }}", "nested too deep"),
    "endless macro": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "nested too deep"),
    "escapes": ("{{ raise_exception('\x1b[31m\n' * 999) }}", r"refuses these messages: \\x1b\[31m \\x1b"),
    "surrogates": ("{{ raise_exception('\ud800') }}", r"refuses these messages: \\ud800"),
    "no template": ("{% if %}", "line 1: "),
    "unfinished": ("{{ '" * 999, "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("thread", ["main", pytest.param("other", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_line(name: str, thread: str) -> None:
    text, expected = HOSTILE[name]
    waits = "takes more than" in expected  # what is to end at another bound gets its time on a slow machine
    template = ChatTemplate(text, "m", Bounds(seconds=0.3) if waits else Bounds())
    caught: list[BaseException] = []

    def render() -> None:
        try:
            template.render(CHAT, {})
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is looked at below
            caught.append(error)

    if thread == "main":
        render()
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(render).result()
    (error,) = caught
    assert type(error) is TemplateError
    message = str(error)
    assert message.startswith("m: the chat template ")
    assert message.isprintable()
    assert len(message) < 500
    with pytest.raises(TemplateError, match=expected):
        raise error


def test_the_bounds_are_what_is_promised() -> None:
    assert Bounds() == Bounds(seconds=2, nbytes=256 * 2**20, room=2**20)


@pytest.mark.thorough
def test_two_seconds_are_the_bound_and_the_next_chat_is_answered() -> None:
    template = ChatTemplate("{% if messages[0].content == 'slow' %}" + LOOPS + "{% endif %}" + PLAIN, "m")
    assert template.render(CHAT, {}) == "user: Hi"
    began, used = time.monotonic(), children_seconds()
    with pytest.raises(TemplateError, match=r"^m: the chat template takes more than 2 s; change"):
        template.render([{"role": "user", "content": "slow"}], {})
    assert time.monotonic() - began >= 1.9
    assert template.render(CHAT, {}) == "user: Hi"
    del template
    assert 1.5 <= children_seconds() - used <= 3.5  # processor time, which a busy machine counts in coarse ticks


def children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize(("megabytes", "fits"), [(100, True), (300, False)])
def test_256_megabytes_are_the_bound(megabytes: int, fits: bool) -> None:
    template = ChatTemplate(f"{{{{ (messages[0].content * {megabytes * 500_000}) | length }}}}", "m")
    if fits:
        assert template.render(CHAT, {}) == str(megabytes * 1_000_000)
    else:
        with pytest.raises(TemplateError, match="more memory"):
            template.render(CHAT, {})


def test_a_megabyte_of_text_is_the_bound_beside_what_messages_hold() -> None:
    assert ChatTemplate("{{ 'x' * 2**20 }}", "m").render(CHAT, {}) == "x" * 2**20
    with pytest.raises(TemplateError, match="writes more than"):
        ChatTemplate("{{ 'x' * (2**20 + 1000) }}", "m").render(CHAT, {})
    long = "\u00fc" * 3_000_000
    assert ChatTemplate(PLAIN, "m").render([{"role": "user", "content": long}], {}) == f"user: {long}"


def test_a_template_longer_than_a_socket_holds_is_read() -> None:
    template = ChatTemplate("{# " + "x" * 3_000_000 + " #}" + PLAIN, "m")
    template.start()
    assert template.render(CHAT, {}) == "user: Hi"


def test_every_character_survives() -> None:
    content = "".join(map(chr, range(0x300))) + "\ud800\udfff \U0001f600 \ue000\U000f0000"
    assert ChatTemplate("{{ messages[0].content }}", "m").render([{"role": "u", "content": content}], {}) == content


def test_many_threads_get_their_own_answers() -> None:
    template = ChatTemplate(PLAIN, "m")

    def ask(number: int) -> str:
        return template.render([{"role": "user", "content": str(number)}], {})

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(200))) == [f"user: {number}" for number in range(200)]


def test_an_interrupt_ends_the_process_and_the_next_chat_is_answered() -> None:
    template = ChatTemplate("{% if messages[0].content == 'slow' %}" + LOOPS + "{% endif %}" + PLAIN, "m", Bounds(9))
    before = children()
    assert template.render(CHAT, {}) == "user: Hi"
    (pid,) = children() - before
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        template.render([{"role": "user", "content": "slow"}], {})
    assert time.monotonic() - began < 5
    assert pid not in children()
    assert template.render(CHAT, {}) == "user: Hi"
    del template
    assert children() <= before


def children() -> set[int]:
    """Return the processes that this one started for templates, ended ones that nobody has waited for included."""
    listed = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text("ascii").split()
    return {int(pid) for pid in listed}


def test_the_process_gets_no_secrets_and_no_signals_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    template = ChatTemplate(PLAIN, "m")
    before = children()
    assert template.render(CHAT, {}) == "user: Hi"
    (pid,) = children() - before
    names = {entry.partition("=")[0] for entry in Path(f"/proc/{pid}/environ").read_text("ascii").split("\0") if entry}
    assert names <= {"TZ", "TZDIR", "LD_LIBRARY_PATH"}
    assert os.getsid(pid) != os.getsid(0)
    opened = {path.readlink().name.partition(":")[0] for path in Path(f"/proc/{pid}/fd").iterdir()}
    assert opened <= {"socket", "null"}


@pytest.mark.thorough
def test_the_process_ends_with_its_owner_in_the_middle_of_a_loop() -> None:
    program = (
        "import sys, threading; from graphcore.tokenizer.chat_template import ChatTemplate\n"
        f"template = ChatTemplate('{{% if messages[0].content == 1 %}}' + {LOOPS!r} + '{{% endif %}}', 'm')\n"
        "template.render([{'role': 'user', 'content': 0}], {})\n"
        "print(template._process._process.pid, flush=True)\n"
        "template.render([{'role': 'user', 'content': 1}], {})\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.communicate()
    until = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < until, f"process {pid} is still there"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # whoever adopts orphans may be slow to wait for them


def test_a_forked_process_has_a_process_of_its_own() -> None:
    template = ChatTemplate(PLAIN, "m")
    assert template.render(CHAT, {}) == "user: Hi"
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, template.render([{"role": "child", "content": "Hi"}], {}).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 100) == b"child: Hi"
    os.close(reading)
    os.close(writing)
    assert template.render(CHAT, {}) == "user: Hi"


def test_without_processes_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    template = ChatTemplate(PLAIN, "m")
    template.start()  # says nothing: the chat may never come
    with pytest.raises(
        TemplateError, match=r"^m: the chat template could not be started in a process of its own \(No such file"
    ):
        template.render(CHAT, {})


@pytest.mark.parametrize("content", [object(), {1, 2}, b"bytes"])
def test_messages_that_are_no_plain_data_are_refused(content: object) -> None:
    with pytest.raises(TokenizerError, match=r"^m: messages must be plain data, as JSON has it"):
        ChatTemplate(PLAIN, "m").render([{"role": "user", "content": content}], {})


def test_the_owner_does_not_import_jinja() -> None:
    """Its import takes longer than starting a process beside the load."""
    program = (
        "import sys; from graphcore.tokenizer.chat_template import ChatTemplate; "
        f"print(ChatTemplate({PLAIN!r}, 'm').render({CHAT!r}, {{}}), 'jinja2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "user: Hi False\n"
