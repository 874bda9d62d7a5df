"""The agents of other hosts: their addresses, their certificates, and what they copy."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import _native
from ._hosts import Hosts, gather

_Path = str | os.PathLike[str]


@dataclass(frozen=True)
class Peers:
    """Replicas in the memory of other hosts, for :class:`tensorcask.Engine`.

    ``addresses``: ``name:port`` of the agents of all hosts, in the order of their ranks: a list, a pattern with ``{host}`` for
    the number of the host, or ``file:PATH`` with one address per line. Or a word:

    - ``auto``: ``torch`` if ``torch.distributed`` is initialised, else ``slurm``.
    - ``torch``: the ranks tell each other the addresses of their hosts. All ranks must make their engine.
    - ``slurm``: the nodes of the job step.
    - ``service:NAME``: pods of a Kubernetes StatefulSet or indexed Job behind the headless service ``NAME``. Their names end in
      the number of the host.

    ``port``: port of the agents, for these words. ``listen``: interface and port of this host's agent; by default all interfaces
    with ``tls``, else ``127.0.0.1``. ``tls``: the folder that ``tensorcask agent init-tls`` has made, or files of authority,
    certificate and key; None only if all agents run on one machine.

    ``replicas``: number of hosts that copy each host. ``jump``: host *n* is copied to *n* + ``jump``, and so on. ``keep``: steps to
    keep of each host. ``bandwidth``: bytes per second that this host sends for the run, to other hosts and to the tiers together.

    >>> Peers("node{host}:7411", tls="/etc/tensorcask/run42").replicas
    1
    """

    addresses: str | Sequence[str] = "auto"
    port: int = 7411
    listen: str | None = None
    tls: _Path | tuple[_Path, _Path, _Path] | None = None
    replicas: int = 1
    jump: int = 1
    keep: int = 2
    bandwidth: int | None = None


#: Options of ``peers`` in the native module.
Native = tuple[str, list[str], tuple[str, str, str] | None, int, int, int, int | None]


def resolve(peers: Peers | str | Sequence[str] | None, hosts: Hosts | None, rank: int, world: int) -> Native | None:
    """The options for the native module; None without peers, or on one host, which has no peer."""
    if peers is None or hosts is None:
        return None
    given = peers if isinstance(peers, Peers) else Peers(peers)
    addresses = _addresses(given, hosts, rank, world)
    if len(addresses) != hosts.count(world):
        raise ValueError(f"peers: {len(addresses)} addresses for {hosts.count(world)} hosts; give one per host, in the order of their ranks")
    tls = None if given.tls is None else _certificates(given.tls, hosts.number)
    port = addresses[hosts.number].rsplit(":", 1)[-1]
    listen = given.listen or f"{'127.0.0.1' if tls is None else '0.0.0.0'}:{port}"
    return listen, addresses, tls, given.replicas, given.jump, given.keep, given.bandwidth


def _certificates(tls: _Path | tuple[_Path, _Path, _Path], host: int) -> tuple[str, str, str]:
    if isinstance(tls, tuple):
        ca, certificate, key = tls
        return os.fspath(ca), os.fspath(certificate), os.fspath(key)
    folder = Path(tls)
    return str(folder / "ca.pem"), str(folder / f"host-{host}.pem"), str(folder / f"host-{host}-key.pem")


def _addresses(peers: Peers, hosts: Hosts, rank: int, world: int) -> list[str]:
    given, count = peers.addresses, hosts.count(world)
    if not isinstance(given, str):
        return list(given)
    if given in ("auto", "torch"):
        told = gather((hosts.number, own_address()), rank, world)
        if told is not None:
            return [f"{address}:{peers.port}" for _, address in sorted(dict(told).items())]
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if given in ("auto", "slurm") and nodes:
        return [f"{node}:{peers.port}" for node in expand_nodes(nodes)]
    if given in ("auto", "torch", "slurm"):
        raise ValueError(
            f"peers={given!r}: found no addresses. Initialise torch.distributed before the engine starts, start the job with Slurm, or "
            "pass the addresses of the agents of all hosts"
        )
    if given.startswith("service:"):
        given = _pods_of(given.removeprefix("service:"), hosts.number, peers.port)
    return _native.peer_addresses(given, count)


def own_address() -> str:
    """The address of this host from which it reaches ``MASTER_ADDR``, or its name."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(os.environ["MASTER_ADDR"], 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # Sends nothing.
            probe.connect(target)
            address = str(probe.getsockname()[0])
    except (KeyError, OSError):
        return socket.gethostname()
    if address == "::1" or address.startswith("127."):
        return socket.gethostname()
    return f"[{address}]" if ":" in address else address


def expand_nodes(text: str) -> list[str]:
    """The nodes in a list of Slurm.

    >>> expand_nodes("gpu[01-03,7],login")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']
    """
    nodes: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for plain, inside in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            numbers = [plain] if plain else [number for item in inside.split(",") for number in _range_of(item)]
            names = [name + number for name in names for number in numbers]
        nodes += names
    return nodes


def _range_of(item: str) -> list[str]:
    first, _, last = item.partition("-")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]


def _pods_of(service: str, host: int, port: int) -> str:
    name = socket.gethostname().split(".")[0]
    found = re.fullmatch(r"(.*-)(\d+)", name)
    if found is None or int(found[2]) != host:
        raise ValueError(
            f"peers='service:{service}': the name of this pod, {name!r}, does not end in the number of this host, {host}. Pass the "
            "addresses of all hosts, or 'torch'"
        )
    return f"{found[1]}{{host}}.{service}:{port}"
