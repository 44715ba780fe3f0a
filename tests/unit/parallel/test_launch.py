"""What torchrun says, and which network interfaces are refused."""

import ipaddress
from collections.abc import Mapping

import pytest

from graphcore.config.settings import ParallelSettings
from graphcore.errors import ConfigError
from graphcore.parallel import launch as launched
from graphcore.parallel.launch import Launch, address_of, interface_of

VARIABLES = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
HERE = Launch(0, 2, 2, "127.0.0.1")
HOSTS = Launch.of(VARIABLES)


def settings(interface: str | None = None, is_open: bool = False) -> ParallelSettings:
    """Return settings of a ring."""
    return ParallelSettings("ring", interface, is_open, 600.0, transport="auto")


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """Interfaces of a machine that has a private network."""
    found = {"lo": "127.0.0.1", "wg0": "10.8.0.2"}
    monkeypatch.setattr(launched, "address_of", lambda name: ipaddress.IPv4Address(found[name]))
    return found


def test_a_launch_is_what_torchrun_says() -> None:
    assert Launch(1, 4, 2, "10.0.0.1", 1) == HOSTS
    assert Launch.of({**VARIABLES, "LOCAL_RANK": "0"}).local_rank == 0
    assert not HOSTS.is_one_machine
    assert HERE.is_one_machine


@pytest.mark.parametrize("missing", VARIABLES)
def test_a_process_that_torchrun_has_not_started_is_refused(missing: str) -> None:
    others = {name: value for name, value in VARIABLES.items() if name != missing}
    with pytest.raises(ConfigError, match=f"{missing} is not set, so torchrun has not started this process; start"):
        Launch.of(others)


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", "x", "WORLD_SIZE=x is no number"),
        ("RANK", "-1", "RANK=-1 is no number"),
        ("MASTER_PORT", "", "MASTER_PORT= is no number"),
        ("LOCAL_RANK", "first", "LOCAL_RANK=first is no number"),
        ("RANK", "4", "RANK=4 is none of WORLD_SIZE=4 ranks"),
    ],
)
def test_a_variable_that_is_wrong_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"parallel=ring: {said}"):
        Launch.of({**VARIABLES, name: value})


def test_one_machine_s_ranks_talk_over_the_loopback_interface() -> None:
    assert interface_of(settings(), HERE) == "lo"


@pytest.mark.usefixtures("interfaces")
def test_several_machines_need_an_interface_and_leave_to_use_it() -> None:
    with pytest.raises(ConfigError, match=r"4 ranks on several machines need a network interface; name that of"):
        interface_of(settings(), HOSTS)
    with pytest.raises(ConfigError, match=r"wg0 has the address 10.8.0.2, which other machines reach.*parallel.open=t"):
        interface_of(settings("wg0"), HOSTS)
    assert interface_of(settings("wg0", is_open=True), HOSTS) == "wg0"


def test_the_loopback_interface_has_its_address_and_others_are_named() -> None:
    assert address_of("lo").is_loopback
    with pytest.raises(ConfigError, match=r"parallel.interface=nosuch is no network interface; this machine has lo"):
        address_of("nosuch")
