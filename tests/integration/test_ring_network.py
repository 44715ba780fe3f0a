"""Ranks in networks of their own, joined by a slow cable or WireGuard: what several machines see of each other."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from ring_ranks import Case, answers_of, ended, load, start_ranks
from support.tiny_models import BUILDERS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from slow_network import DEVICE, address_of, slow_network

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parents[1] / "ring_ranks.py")
GIGABIT, LATENCY = 125e6, 0.0002
WIREGUARD_PORT = 51820
SOCKETS = "/var/run/wireguard"  # of wireguard-go


class Network(NamedTuple):
    """What two ranks talk through: beginnings of commands that run there, their interfaces, and rank 0's address."""

    prefixes: list[list[str]]
    interfaces: list[str]
    lead: str


def run(*command: str) -> str:
    """Run a command and return what it prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def wireguard(cable: list[list[str]], folder: Path) -> Iterator[Network]:
    """Join two networks by WireGuard in user space, through the cable that joins them already."""
    keys = [run("wg", "genkey") for _ in cable]
    public = [
        subprocess.run(["wg", "pubkey"], input=key, capture_output=True, text=True).stdout.strip() for key in keys
    ]
    tunnels = [f"wg{os.getpid()}-{rank}" for rank in range(2)]  # their control sockets are in one folder
    inside = [f"10.78.0.{rank + 1}" for rank in range(2)]
    with ExitStack() as undo:
        for rank, (prefix, tunnel) in enumerate(zip(cable, tunnels, strict=True)):
            process = subprocess.Popen([*prefix, "wireguard-go", "-f", tunnel], stderr=subprocess.DEVNULL)
            undo.callback(process.wait)
            undo.callback(process.terminate)
            while tunnel not in run(*prefix, "ip", "-brief", "link") or not Path(SOCKETS, f"{tunnel}.sock").exists():
                assert process.poll() is None, "wireguard-go has ended"
                time.sleep(0.05)
            file = folder / f"key{rank}"
            file.write_text(keys[rank])
            peer = "peer", public[1 - rank], "endpoint", f"{address_of(1 - rank)}:{WIREGUARD_PORT}"
            own = "listen-port", str(WIREGUARD_PORT), "private-key", str(file)
            run(*prefix, "wg", "set", tunnel, *own, *peer, "allowed-ips", f"{inside[1 - rank]}/32")
            run(*prefix, "ip", "address", "add", f"{inside[rank]}/24", "dev", tunnel)
            run(*prefix, "ip", "link", "set", tunnel, "up")
        yield Network(cable, tunnels, inside[0])


@pytest.fixture(params=["cable", "wireguard"])
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Network]:
    """Two network namespaces at the ends of a cable of 1 Gbit/s and 0.2 ms, or of a tunnel through it."""
    if request.param == "wireguard" and not (shutil.which("wireguard-go") and shutil.which("wg")):
        pytest.skip("WireGuard in user space is not installed (apt install wireguard-go wireguard-tools)")
    with ExitStack() as undo:
        try:
            cable = undo.enter_context(slow_network(2, GIGABIT, LATENCY))
        except OSError as error:
            pytest.skip(f"this user may not make network namespaces: {error}")
        plain = Network(cable, [DEVICE] * 2, address_of(0))
        yield undo.enter_context(wireguard(cable, tmp_path)) if request.param == "wireguard" else plain


def test_two_networks_answer_as_one_process_to_the_bit(network: Network, tmp_path: Path) -> None:
    torch.manual_seed(0)
    BUILDERS["llama3"](num_hidden_layers=6).save_pretrained(tmp_path / "model")
    case = Case(str(tmp_path / "model"), ("streaming=on", "dtype=fp32"))
    cases, answers = tmp_path / "cases.json", tmp_path / "answers.pt"
    own = [f"rank{rank} parallel.interface={interface}" for rank, interface in enumerate(network.interfaces)]
    overrides = [*case.overrides, *own, "parallel.open=true"]
    cases.write_text(json.dumps([["ring", case.folder, overrides, 29511]]))
    arguments = [[str(cases), str(answers)]] * 2
    machine = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": network.lead}
    ranks = ended(start_ranks(SCRIPT, arguments, prefixes=network.prefixes, variables=machine))
    assert [rank.status for rank in ranks] == [0, 0], "\n".join(rank.errors for rank in ranks)
    found = torch.load(answers)["ring"]
    assert sent_packets(network) > 1000, "the ranks talked through something else"
    assert round_trip(network) > 2 * LATENCY
    threads = torch.get_num_threads()
    try:
        alone = answers_of(load(case, []), {})
    finally:
        torch.set_num_threads(threads)
    for name, value in alone.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


def round_trip(network: Network) -> float:
    """Return the seconds until the other rank's machine refuses a connection."""
    code = "import socket, sys, time; t = time.time(); socket.socket().connect_ex((sys.argv[1], 9))"
    return float(run(*network.prefixes[1], sys.executable, "-c", f"{code}; print(time.time() - t)", network.lead))


def sent_packets(network: Network) -> int:
    """Return how many packets rank 0 has sent through the interface."""
    shown = run(*network.prefixes[0], "cat", f"/sys/class/net/{network.interfaces[0]}/statistics/tx_packets")
    return int(shown)
