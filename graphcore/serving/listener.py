"""The socket that a server listens on; a port that is taken is found out before torch is imported."""

import socket

from graphcore.errors import ConfigError


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket with an address, on which a server can listen.

    Raises:
        ConfigError: the address is none of this machine's, or another program has the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # of others, asyncio delays small pieces
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; set task.host or task.port") from None
    return listener
