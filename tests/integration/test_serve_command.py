"""task=serve as people start it: addresses, keys, signals, and what a run leaves behind."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.chat_folders import TINY
from support.processes import ROOT, Piped, environment, graphcore

from graphcore.serving.serve_settings import KEY_VARIABLE, ServeSettings, check_serving
from graphcore.tasks.report.secret_keys import HIDDEN, hide_secrets, secrets_in, without_secrets

pytestmark = pytest.mark.thorough

LLAMA = ("graph=eager", "device=cpu", f"model.checkpoint={TINY / 'llama3'}", "task=serve", "task.port=0")
SECONDS = 60


def address_of(process: Piped) -> str:
    """Return the address that a server says it listens on, when it is ready."""
    for line in process.stderr:
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        if found:
            break
    else:
        raise AssertionError("the server has said no address")
    with httpx.Client(base_url=found[0], timeout=SECONDS) as http:
        while http.get("/health").status_code != 200:
            pass
    return found[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_with_status_0_and_no_key_is_left_behind(number: int, tmp_path: Path) -> None:
    process = Piped(*LLAMA, "task.api_key=open-sesame", "hydra.run.dir=run", cwd=tmp_path)
    url = address_of(process)
    headers = {"x-api-key": "open-sesame"}
    body = {"prompt": [1, 2, 3], "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=SECONDS)
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS).status_code == 401
    process.send_signal(number)
    said = process.read_errors()
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (process.returncode, record["status"], record["num_requests"]) == (0, "ok", 1)
    assert "path=/v1/completions status=200" in said
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) >= 4
    assert not [file for file in files if b"sesame" in file.read_bytes()]
    assert "sesame" not in said


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    process = Piped(*LLAMA, "outputs=false", cwd=tmp_path)
    url = address_of(process)
    body = {"messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=SECONDS)
    assert (answer.status_code, "tokenizer" in answer.json()["error"]["message"]) == (400, True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0


HOLD_TORCH = """
import importlib.util, os, sys, time

class Holding:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def hold(module):
            for _ in range(6000):
                if os.path.exists("go"):
                    return load(module)
                time.sleep(0.01)
            raise ImportError("nobody has let torch in")

        spec.loader.exec_module = hold
        return spec

sys.meta_path.insert(0, Holding())
"""
"""A sitecustomize.py with which the import of torch waits until a file is there."""


def test_a_server_answers_before_torch_is_imported(tmp_path: Path) -> None:
    """The import of torch waits for a file: what is answered before needs none, in each interface's form."""
    (tmp_path / "sitecustomize.py").write_text(HOLD_TORCH)
    path = {"PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"}
    command, said = [sys.executable, "-m", "graphcore", *LLAMA, "outputs=false"], tmp_path / "said.txt"
    with (
        said.open("w") as errors,
        subprocess.Popen(command, cwd=tmp_path, env={**environment(), **path}, stderr=errors) as process,
    ):
        try:
            while not (found := re.search(r"http://127\.0\.0\.1:\d+", said.read_text("utf-8"))):
                assert process.poll() is None
            with httpx.Client(base_url=found[0], timeout=SECONDS) as http:
                first = http.get("/health")
                assert (first.status_code, first.headers["retry-after"]) == (503, "1")
                assert first.json() == {"status": "loading"}
                body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
                for asked in ("/v1/chat/completions", "/v1/responses", "/tokenize"):
                    refused = http.post(asked, json=body)
                    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                    assert refused.json()["error"]["code"] == "not_ready"
                assert http.post("/v1/messages", json=body).json()["error"]["type"] == "overloaded_error"
                assert http.get("/plan").status_code == 503
                assert http.get("/status").json()["state"] == "loading"
                assert "graphcore_ready 0.0" in http.get("/metrics").text
                assert http.get("/").headers["content-type"] == "text/html; charset=utf-8"
                (tmp_path / "go").touch()
                while http.get("/health").status_code != 200:
                    assert process.poll() is None
                answer = http.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 3})
                assert answer.json()["usage"]["completion_tokens"] == 3
                assert "graphcore_ready 1.0" in http.get("/metrics").text
        finally:
            (tmp_path / "go").touch()
            process.send_signal(signal.SIGTERM)
    assert (process.returncode, "Traceback" in said.read_text("utf-8")) == (0, False)


def test_a_server_is_listed_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):  # where other servers of this user may be listed
        monkeypatch.setenv(variable, str(tmp_path))
    process = Piped(*LLAMA, "outputs=false", "context_length=64", cwd=tmp_path)
    url = address_of(process)
    header, row = graphcore("task=ps", cwd=tmp_path).stdout.splitlines()
    assert header.split() == ["MODEL", "ADDRESS", "PID", "SINCE", "MEMORY", "CONTEXT"]
    assert (row.split()[:2], row.split()[-1]) == (["llama3", url], "64")
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0
    assert "no server of yours runs" in graphcore("task=ps", cwd=tmp_path).stdout


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    process = Piped(*LLAMA, "outputs=false", cwd=tmp_path)
    port = address_of(process).rpartition(":")[2]
    second = graphcore(*LLAMA, f"task.port={port}", "outputs=false", cwd=tmp_path)
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
    assert "Traceback" not in second.stderr
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("task.host=0.0.0.0", "lets other machines in"),
        ("task.log=xml", "text, json"),
        ("task.port=70000", "at most 65535"),
        ("task.max_sequences=0", "max_sequences=0"),
        ("task.grace=-1", "at least 0"),
        ("system=Hi", "no effect"),
        ("batch_size=3", "contradict"),
        ("task.metric_aliases=sglang", "vllm"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(setting: str, message: str, tmp_path: Path) -> None:
    found = graphcore(*LLAMA, setting, "outputs=false", cwd=tmp_path)
    assert found.returncode in (1, 2)
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def test_a_key_opens_another_address(serve_keys: ServeSettings) -> None:
    serve_keys.host, serve_keys.api_key = "0.0.0.0", "key"
    assert check_serving(serve_keys) is serve_keys
    assert KEY_VARIABLE == "GRAPHCORE_API_KEY"


@pytest.fixture
def serve_keys() -> ServeSettings:
    from support.serving import serve_settings

    return serve_settings()


def test_secrets_are_found_and_hidden_at_any_depth(tmp_path: Path) -> None:
    settings = {"task": {"api_key": "s3cret", "port": 1, "other": {"api_key": None}}, "seed": 0}
    assert secrets_in(settings) == ["s3cret"]
    hidden = without_secrets(settings)
    assert hidden == {"task": {"api_key": HIDDEN, "port": 1, "other": {"api_key": None}}, "seed": 0}
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- task.api_key=s3cret\n- seed=0\n")
    hide_secrets(tmp_path, settings)
    assert (tmp_path / ".hydra" / "overrides.yaml").read_text() == f"- task.api_key={HIDDEN}\n- seed=0\n"


def test_a_signal_while_the_model_is_loaded_ends_the_server_with_status_0(tmp_path: Path) -> None:
    """A program of its own, whose interpreter ends as it does for users, while threads of native code compute."""
    settings = ("device=cpu", "model.checkpoint=random:", "task=serve", "task.port=0", "outputs=false")
    command = [sys.executable, str(ROOT / "run.py"), *settings]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "http://" not in process.stderr.readline():
            assert process.poll() is None, "the server has said no address"
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 0, said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("task.replicas=0",), "task.replicas=0 must be at least 1"),
        (("task.replicas=3", "task.max_replicas=2"), "task.max_replicas=2 is less than task.replicas=3"),
    ],
)
def test_replicas_that_cannot_be_are_refused(settings: tuple[str, ...], message: str, tmp_path: Path) -> None:
    found = graphcore(*LLAMA, *settings, "outputs=false", cwd=tmp_path)
    assert (found.returncode, message in found.stderr, "Traceback" in found.stderr) == (1, True, False)


def test_replicas_without_ray_say_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError('No module named ray', name='ray')\n")
    command = [sys.executable, str(ROOT / "run.py"), *LLAMA, "task.replicas=2", "outputs=false"]
    variables = {**environment(), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    found = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=SECONDS)
    assert found.returncode == 1
    assert "pip install 'graphcore[ray]'" in found.stderr
    assert "Traceback" not in found.stderr
