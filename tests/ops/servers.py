"""Real stores in sets: a primary with a replica and sentinels, and a cluster, on loopback ports of their own."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from gateway.ledger.embedded import EmbeddedStore, EmbeddedStoreError, find_server
from tests.processes import free_port, wait_until

NAME = "main"
"""What sentinels call the primary."""
DOWN_AFTER_MS = 600
QUORUM = 2
SETUP_SECONDS = 30.0


class Node:
    """A Valkey on a TCP port; `client` looks into it past every fault, on its unix socket."""

    def __init__(self, *options: str, port: int = 0) -> None:
        self.port = port or free_port()
        self.store = EmbeddedStore("--port", str(self.port), *options)
        try:
            self.store.start()
        except EmbeddedStoreError:
            self.store.stop()
            raise
        self.client = redis.Redis(unix_socket_path=str(self.store.socket), protocol=2)

    @property
    def host_and_port(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        assert self.store.process
        self.store.process.kill()
        self.store.process.wait()

    def stop(self) -> None:
        self.client.close()
        self.store.stop()


class Sentinel:
    """One sentinel process that watches `primary` as NAME."""

    def __init__(self, folder: Path, primary: str, login: str, *settings: str) -> None:
        self.port = free_port()
        host, port = primary.split(":")
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            "sentinel announce-ip 127.0.0.1",
            f"sentinel monitor {NAME} {host} {port} {QUORUM}",
            f"sentinel down-after-milliseconds {NAME} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {NAME} 5000",
            *settings,
        ]
        file = folder / f"sentinel-{self.port}.conf"  # it writes there what it learns
        file.write_text("\n".join(lines) + "\n")
        self._log = (folder / f"sentinel-{self.port}.log").open("wb")
        command = [str(find_server()), str(file), "--sentinel"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        user, _, password = login.partition(":")
        self.client = redis.Redis(
            port=self.port, username=user or None, password=password or None, protocol=2
        )

    @property
    def host_and_port(self) -> str:
        return f"127.0.0.1:{self.port}"

    def record(self) -> dict[str, Any]:
        """What it knows of the primary; nothing while it does not answer."""
        with contextlib.suppress(redis.ConnectionError, redis.ResponseError):
            raw = self.client.execute_command("SENTINEL", "MASTER", NAME)
            if isinstance(raw, dict):
                return raw
            return dict(zip(map(bytes.decode, raw[::2]), map(bytes.decode, raw[1::2]), strict=True))
        return {}

    def names(self, server: str) -> bool:
        found = self.record()
        return f"{found.get('ip')}:{found.get('port')}" == server

    def stop(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()
        self._log.close()


class Watched:
    """A primary, its replicas, and three sentinels that agree on them."""

    def __init__(self, nodes: Sequence[Node], sentinels: Sequence[Sentinel], folder: Path) -> None:
        self.primary, *self.replicas = nodes
        self.sentinels = sentinels
        self._folder = folder

    @property
    def url(self) -> str:
        return sentinel_url(*(s.host_and_port for s in self.sentinels))

    @contextlib.contextmanager
    def uninformed(self) -> Iterator[Sentinel]:
        """One more, that knows nothing but where the primary was at the start."""
        sentinel = Sentinel(self._folder, self.primary.host_and_port, "")
        try:
            wait_until(sentinel.record, "a sentinel that answers", SETUP_SECONDS)
            yield sentinel
        finally:
            sentinel.stop()

    def any_moved(self) -> bool:
        """A sentinel names another primary than at the start."""
        return any(
            sentinel.names(node.host_and_port) for sentinel in self.sentinels for node in self.replicas
        )

    def new_primary(self) -> Node | None:
        """The replica that every sentinel names as the primary, once there is one."""
        for node in self.replicas:
            if all(sentinel.names(node.host_and_port) for sentinel in self.sentinels):
                return node
        return None


def sentinel_url(*servers: str) -> str:
    return f"redis+sentinel://{','.join(servers)}/{NAME}"


@contextlib.contextmanager
def sentinels(
    *,
    replicas: int = 1,
    port: int = 0,
    announced: str = "",
    store: Sequence[str] = (),
    settings: Sequence[str] = (),
    login: str = "",
) -> Iterator[Watched]:
    """The primary has that port; `announced` is where everybody reaches it, when that is somewhere else.

    `store` are options of the servers, `settings` lines of the sentinels' files, `login` is for the sentinels.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-test-")))
        quick = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1", *store)
        nodes = [Node(*quick, port=port)]
        stack.callback(nodes[0].stop)
        where = announced or nodes[0].host_and_port
        for _ in range(replicas):
            nodes.append(Node("--replicaof", where.replace(":", " "), *quick))
            stack.callback(nodes[-1].stop)
        wait_until(lambda: all(_in_step(node) for node in nodes[1:]), "replicas in step", SETUP_SECONDS)
        watching = [Sentinel(folder, where, login, *settings) for _ in range(3)]
        for sentinel in watching:
            stack.callback(sentinel.stop)
        wait_until(
            lambda: all(_knows_all(s, replicas) for s in watching), "three sentinels agree", SETUP_SECONDS
        )
        yield Watched(nodes, watching, folder)


def _in_step(replica: Node) -> bool:
    return bool(replica.client.info("replication")["master_link_status"] == "up")


def _knows_all(sentinel: Sentinel, replicas: int) -> bool:
    found = sentinel.record()
    return found.get("num-slaves") == str(replicas) and found.get("num-other-sentinels") == "2"


class Nodes:
    """A cluster of three, the slots shared evenly."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.ids = [node.client.execute_command("CLUSTER", "MYID").decode() for node in nodes]

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(node.host_and_port for node in self.nodes)}"

    def owner_of(self, key: str) -> int:
        """Its index, as the first node sees it."""
        slot, ports = key_slot(key.encode()), [node.port for node in self.nodes]
        ranges = self.nodes[0].client.execute_command("CLUSTER", "SLOTS")
        (port,) = [owner[1] for first, last, owner, *_ in _plain(ranges) if first <= slot <= last]
        return ports.index(port)

    def begin_move(self, key: str, to: int) -> int:
        """From now on the slot is on its way; returns the index of the node that still has it."""
        slot, source = key_slot(key.encode()), self.owner_of(key)
        self.nodes[to].client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source])
        self.nodes[source].client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[to])
        return source

    def move_keys(self, key: str, source: int, to: int, count: int) -> int:
        """So many of the slot's keys at most; returns how many there were."""
        client, slot = self.nodes[source].client, key_slot(key.encode())
        found = client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, count)
        if found:
            target = self.nodes[to]
            client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *found)
        return len(found)

    def end_move(self, key: str, to: int) -> None:
        slot = key_slot(key.encode())
        for node in (self.nodes[to], *self.nodes):
            node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", self.ids[to])


def _plain(ranges: Any) -> list[Any]:
    """redis-py makes a dict of CLUSTER SLOTS."""
    if isinstance(ranges, dict):
        return [(first, last, value["primary"]) for (first, last), value in ranges.items()]
    return list(ranges)


@contextlib.contextmanager
def cluster() -> Iterator[Nodes]:
    with contextlib.ExitStack() as stack:
        buses = [free_port() for _ in range(3)]
        nodes = []
        for bus in buses:
            settings = ("--cluster-node-timeout", "1000", "--cluster-port", str(bus))
            nodes.append(Node("--cluster-enabled", "yes", *settings))
            stack.callback(nodes[-1].stop)
        share = 16384 // 3 + 1
        for i, node in enumerate(nodes):
            last = min((i + 1) * share, 16384) - 1
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", i * share, last)
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for node, bus in zip(nodes[1:], buses[1:], strict=True):
            nodes[0].client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        wait_until(lambda: all(_is_whole(node) for node in nodes), "a cluster of three", SETUP_SECONDS)
        yield Nodes(nodes)


def _is_whole(node: Node) -> bool:
    told = node.client.execute_command("CLUSTER", "INFO")
    if isinstance(told, bytes):
        told = dict(line.split(":", 1) for line in told.decode().splitlines() if ":" in line)
    return told["cluster_state"] == "ok" and told["cluster_known_nodes"] == "3"
