"""Ranks in networks of their own, joined by a cable of 1 Gbit/s: what several machines see of each other."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ring_ranks import Case, answers_of, ended, load, start_ranks
from tiny_models import BUILDERS

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parents[1] / "ring_ranks.py")
CABLE = ("tbf", "rate", "1gbit", "burst", "64kb", "latency", "50ms")


def run(*command: str) -> bool:
    """Run a command; return whether it worked."""
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, whose devices `cable` are the ends of one cable."""
    names = [f"graphcore-{os.getpid()}-{rank}" for rank in range(2)]
    made = [name for name in names if run("ip", "netns", "add", name)]
    try:
        ends = [["name", "cable", "netns", name] for name in names]
        if len(made) < 2 or not run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]):
            pytest.skip("this user may not make network namespaces")
        for rank, name in enumerate(names):
            inside = "ip", "netns", "exec", name
            assert run(*inside, "ip", "address", "add", f"10.77.0.{rank + 1}/24", "dev", "cable")
            assert run(*inside, "ip", "link", "set", "cable", "up")
            assert run(*inside, "ip", "link", "set", "lo", "up")
            assert run(*inside, "tc", "qdisc", "add", "dev", "cable", "root", *CABLE)
        yield names
    finally:
        for name in made:
            run("ip", "netns", "del", name)


def test_two_networks_answer_as_one_process_to_the_bit(networks: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    BUILDERS["llama3"](num_hidden_layers=6).save_pretrained(tmp_path / "model")
    case = Case(str(tmp_path / "model"), ("streaming=on", "dtype=fp32"))
    cases, answers = tmp_path / "cases.json", tmp_path / "answers.pt"
    overrides = [*case.overrides, "parallel.interface=cable", "parallel.open=true"]
    cases.write_text(f'[["cable", "{case.folder}", {str(overrides).replace(chr(39), chr(34))}, 29511]]')
    arguments = [[str(cases), str(answers)]] * 2
    prefixes = [["ip", "netns", "exec", name] for name in networks]
    machine = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1"}
    ranks = ended(start_ranks(SCRIPT, arguments, prefixes=prefixes, variables=machine))
    assert [rank.status for rank in ranks] == [0, 0], "\n".join(rank.errors for rank in ranks)
    found = torch.load(answers)["cable"]
    threads = torch.get_num_threads()
    try:
        alone = answers_of(load(case, []))
    finally:
        torch.set_num_threads(threads)
    for name, value in alone.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name
