"""llm-comply's tests of chats, responses and messages, all that need no image, and its schemas of every answer.

The model has random weights and no script. The server's own sampling parameters make it end its answers after a few
words, as the tests expect of a model, and `tool_choice=required` makes it call. The tests of thinking, which llm-comply
runs for names of models that think, are run on a model whose template begins with thoughts.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import llm_comply
import pytest
from llm_comply.config import ComplianceConfig
from llm_comply.runner import TestRunner as ComplianceRunner
from llm_comply.schema import SpecLoader
from llm_comply.test_case import TestCase as ComplianceCase
from llm_comply.test_case import TestCategory as ComplianceCategory
from llm_comply.tests import get_tests
from support.chat_folders import BRIEF, TOKEN_IDS, save_calling_folder
from support.serving import SECONDS, Running, running_server

from graphcore import Engine
from graphcore.sampling_params import SamplingParams

pytestmark = pytest.mark.thorough

SPECS = {"openai-chat": "openai_chat.json", "open-responses": "openresponses.json", "anthropic": "anthropic.json"}
THINKING_NAMES = {"openai-chat": "gpt-5", "open-responses": "gpt-5", "anthropic": "claude-opus"}
CASES = [
    pytest.param(kind, case, id=case.id)
    for kind in SPECS
    for case in get_tests(kind)
    if case.category is not ComplianceCategory.MULTIMODAL
]
NEED_A_MODEL = ("chat-error-handling", "error-handling")  # a request without one is only an error with task.strict
NOT_SERVED = "compact-response"  # /v1/responses/compact, for which the test expects 404 and warns of it
WORDS = SamplingParams(logit_bias={**BRIEF, TOKEN_IDS["<|im_end|>"]: 3.0}, min_tokens=6)
THOUGHTS = SamplingParams(  # the likeliest tokens, and each less likely the more often it was there
    logit_bias={TOKEN_IDS["<|im_end|>"]: 0.5, TOKEN_IDS["</think>"]: 1.0}, top_k=1, frequency_penalty=2.0
)
SIZES = ["batching.max_sequences=2", "context_length=4096"]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Engine]:
    def load(thinks: bool) -> Engine:
        folder = save_calling_folder(tmp_path_factory.mktemp("comply") / "model", thinks)
        return Engine.load(folder, dtype="fp32", device="cpu", overrides=SIZES)

    return load


@pytest.fixture(scope="module")
def engine(load: Callable[[bool], Engine]) -> Iterator[Engine]:
    with load(False) as engine:
        yield engine


@pytest.fixture(scope="module")
def running(engine: Engine) -> Iterator[Running]:
    with running_server(lambda: engine, sampling=WORDS) as running:
        yield running


@pytest.fixture(scope="module")
def thinking(load: Callable[[bool], Engine]) -> Iterator[Running]:
    with load(True) as engine, running_server(lambda: engine, sampling=THOUGHTS) as running:
        yield running


@pytest.fixture(scope="module")
def specs() -> dict[str, SpecLoader]:
    folder = Path(llm_comply.__file__).parent / "specs"
    return {kind: SpecLoader(str(folder / name)) for kind, name in SPECS.items()}


def problems(running: Running, kind: str, case: ComplianceCase, specs: dict[str, SpecLoader], model: str) -> list[str]:
    """Return the errors and warnings of a test of llm-comply, which must not be skipped."""
    header = {"auth_header": "x-api-key", "use_bearer_prefix": False} if kind == "anthropic" else {}
    config = ComplianceConfig(f"{running.url}/v1", "none", model, timeout=SECONDS, **header)
    result = ComplianceRunner(config, [case], specs[kind]).run_one(case)
    assert result.status.value != "skipped", result.errors
    return result.errors + result.warnings


def is_about_thinking(case: ComplianceCase) -> bool:
    return case.skip_reason is not None


@pytest.mark.parametrize(("kind", "case"), [one for one in CASES if not is_about_thinking(one.values[1])])
def test_answers_comply(
    running: Running, engine: Engine, specs: dict[str, SpecLoader], kind: str, case: ComplianceCase
) -> None:
    if case.id in NEED_A_MODEL:
        assert problems(running, kind, case, specs, "tiny") == ["HTTP 200 (expected [400, 422])"]
        with running_server(lambda: engine, strict=True) as strict:
            assert problems(strict, kind, case, specs, "tiny") == []
        return
    found = problems(running, kind, case, specs, "tiny")
    if case.id == NOT_SERVED:
        found = [problem for problem in found if "compact" not in problem and "response.output" not in problem]
    assert found == []


@pytest.mark.parametrize(("kind", "case"), [one for one in CASES if is_about_thinking(one.values[1])])
def test_answers_with_thoughts_comply(
    thinking: Running, specs: dict[str, SpecLoader], kind: str, case: ComplianceCase
) -> None:
    assert problems(thinking, kind, case, specs, THINKING_NAMES[kind]) == []
