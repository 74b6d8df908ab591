"""Running the gateway: one process, several that share a port, or the demo with everything it needs."""

import asyncio
import gc
import json
import logging
import secrets as random_secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop
from msgspec.structs import replace

from gateway.app import Gateway, Source
from gateway.config import EMBEDDED, Secrets, Settings, load, load_secrets
from gateway.core.outcomes import OperatorError
from gateway.http.auth import new_key
from gateway.http.protocol import ProxyProtocol
from gateway.ledger.embedded import EmbeddedStore, die_with_parent
from gateway.telemetry.logs import Logs
from gateway.telemetry.workers import Place, workers_folder

log = logging.getLogger("kvgate.serve")

BACKLOG = 4096
LINGER_SECONDS = 1
"""For the last bytes of answers, after the last call has ended: then connections are closed."""
COLLECTOR_THRESHOLDS = (10_000, 20, 50)
"""For `gc.set_threshold`; Python's own are 700, 10, 10."""
RESTART_SECONDS = 1.0
"""Before a worker that ended is started again."""
DEMO_ENGINES = (("short", 2, ("--blocks", "2048", "--max-model-len", "8192")),
                ("long", 1, ("--blocks", "8192", "--max-model-len", "65536")))  # fmt: skip
"""Pool, engines, options of `kvgate mock`."""
DEMO_MODEL = "demo"
DEMO_SHORT_PROMPT_TOKENS = 4096
DEMO_OUTPUT_TOKENS = 64
"""Half a second of the mock engines' time."""
DEMO_READY_SECONDS = 30.0


class DemoError(OperatorError):
    """The demo could not be set up; one line for whoever started it."""


def _quiet_collector() -> None:
    """Take what exists now out of the collector's sight: looking through all of it stops every stream for 40 to 100 ms.

    What calls leave behind goes by reference counts; cycles are looked for less often, among what came since.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


class GatewayServer(uvicorn.Server):
    """uvicorn with our way to stop: the first signal drains, the second ends the grace period.

    The port stays open until the last call has ended, so that probes and new calls hear 503 and no connection is
    refused while a load balancer still sends some.
    """

    def __init__(self, gateway: Gateway, config: uvicorn.Config, ready_line: str = "") -> None:
        super().__init__(config)
        self._gateway = gateway
        self._ready_line = ready_line
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exit: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _quiet_collector()
        self._loop = asyncio.get_running_loop()
        for listener in sockets or ():
            log.info("listening on %s port %s", *listener.getsockname()[:2])
        if self._ready_line and not self.should_exit:
            await self._announce()

    async def _announce(self) -> None:
        deadline = time.monotonic() + DEMO_READY_SECONDS
        while problem := self._gateway.problem():
            if time.monotonic() > deadline:
                raise DemoError(f"the demo is not ready: {problem}")
            await asyncio.sleep(0.05)
        print(self._ready_line, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._gateway.drain()
        if self._exit is None:
            self._exit = asyncio.create_task(self._exit_when_drained())

    async def _exit_when_drained(self) -> None:
        await self._gateway.drained()
        self.should_exit = True


def serve(
    config: Path,
    settings: Settings,
    secrets: Secrets,
    host: str,
    port: int,
    workers: int,
    environ: Mapping[str, str],
) -> int:
    """Serve until SIGTERM or SIGINT.  Raises OSError where the port is taken, and what a wrong start raises."""
    with _listen(host, port) as listener, _store(settings) as store:
        if workers == 1:
            url = store.url if store else None
            source = _source(config, environ, url)
            return _run_worker(settings, secrets, listener, store, url, source)
        with workers_folder() as folder, asyncio.Runner() as runner:
            places = [Place(Path(folder), number, workers) for number in range(workers)]
            return runner.run(_supervise(config, store, listener, places, environ))


def serve_inherited(
    config: Path,
    settings: Settings,
    secrets: Secrets,
    descriptor: int,
    place: Place,
    store_url: str | None,
    environ: Mapping[str, str],
) -> int:
    """One of several workers: the listening socket, the folder of its place and the embedded store are its parent's."""
    listener = socket.socket(fileno=descriptor)
    source = _source(config, environ, store_url)
    return _run_worker(settings, secrets, listener, None, store_url, source, place=place)


def serve_demo(host: str, port: int, environ: Mapping[str, str]) -> int:
    """A gateway with an embedded store and mock engines of its own, and a key that is new at each start."""
    with (
        _listen(host, port) as listener,
        tempfile.TemporaryDirectory(prefix="kvgate-demo-") as folder,
        _demo_engines() as engines,
    ):
        key, digest = new_key()
        token = random_secrets.token_urlsafe(24)
        Path(folder, "keys.yaml").write_text(f"- {{name: demo, sha256: {digest}}}\n")
        config = Path(folder, "kvgate.yaml")
        config.write_text(_demo_config(engines))
        own = {name: value for name, value in environ.items() if not name.startswith("KVGATE_")}
        settings = load(config, own)
        secrets = load_secrets(settings, {**own, settings.admin.token_env: token})
        with _store(settings) as store:
            ready_line = _demo_ready_line(listener, key, token)
            url = store.url if store else None
            source = _source(config, own, url)
            return _run_worker(settings, secrets, listener, store, url, source, ready_line)


def _run_worker(
    settings: Settings,
    secrets: Secrets,
    listener: socket.socket,
    store: EmbeddedStore | None,
    store_url: str | None,
    source: Source,
    ready_line: str = "",
    place: Place | None = None,
) -> int:
    """`store` where this process minds the embedded store; `store_url` wherever that is the store."""
    logs = Logs(settings.log.level, settings.log.format)
    try:
        gateway = Gateway(_with_store(settings, store_url), secrets, source, place)
        if store_url is not None:
            log.info("for `kvgate verify --store` the embedded store is %s", store_url)
        server = GatewayServer(gateway, _server_config(gateway, settings), ready_line)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_until_told(server, listener, store))
    finally:
        logs.close()
    return 0


def _server_config(gateway: Gateway, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        gateway,
        http=ProxyProtocol,
        interface="asgi3",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LINGER_SECONDS,
    )


async def _serve_until_told(
    server: GatewayServer, listener: socket.socket, store: EmbeddedStore | None
) -> None:
    supervisor = asyncio.create_task(store.supervise()) if store else None
    try:
        await server.serve(sockets=[listener])
    finally:
        if supervisor:
            supervisor.cancel()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    listener.set_inheritable(True)
    return listener


@contextmanager
def _store(settings: Settings) -> Iterator[EmbeddedStore | None]:
    """The embedded store while it is needed; None where the settings name another one."""
    if settings.store.url != EMBEDDED:
        yield None
        return
    store = EmbeddedStore()
    try:
        store.start()
        yield store
    finally:
        store.stop()


def _source(config: Path, environ: Mapping[str, str], store_url: str | None) -> Source:
    return Source(config, lambda: _with_store(load(config, environ), store_url))


def _with_store(settings: Settings, store_url: str | None) -> Settings:
    """`store_url` is the running embedded store's; another one that the settings name by now is a change of theirs."""
    if store_url is None or settings.store.url != EMBEDDED:
        return settings
    return replace(settings, store=replace(settings.store, url=store_url))


# -- several workers ---------------------------------------------------------------------------------------------


async def _supervise(
    config: Path,
    store: EmbeddedStore | None,
    listener: socket.socket,
    places: Sequence[Place],
    environ: Mapping[str, str],
) -> int:
    """Keep workers running until told to stop; they share the socket, and the store through its URL."""
    loop, told, told_again = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def tell() -> None:
        (told_again if told.is_set() else told).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell)
    store_url = store.url if store else None
    commands = [_worker_command(config, listener.fileno(), place, store_url) for place in places]
    tasks = [
        loop.create_task(_keep_worker(command, listener, environ, told, told_again)) for command in commands
    ]
    supervisor = loop.create_task(store.supervise()) if store else None
    await asyncio.gather(*tasks)
    if supervisor:
        supervisor.cancel()
    return 0


async def _keep_worker(
    command: Sequence[str],
    listener: socket.socket,
    environ: Mapping[str, str],
    told: asyncio.Event,
    told_again: asyncio.Event,
) -> None:
    """One worker at a time: started again when it ends by itself, told to end when we are, and as often.

    It has a session of its own: a terminal sends its interrupt to us alone, and the worker hears it once.
    """
    descriptor = listener.fileno()
    while not told.is_set():
        worker = await asyncio.create_subprocess_exec(
            *command, env=environ, pass_fds=(descriptor,), preexec_fn=die_with_parent, start_new_session=True
        )
        ended = asyncio.create_task(worker.wait())
        for stop in (told, told_again):
            if await _first(stop, ended):
                worker.send_signal(signal.SIGTERM)
        await ended
        if not told.is_set():
            print(
                f"kvgate: a worker ended with status {worker.returncode}; starting another", file=sys.stderr
            )
            await asyncio.sleep(RESTART_SECONDS)


def _worker_command(config: Path, descriptor: int, place: Place, store_url: str | None) -> list[str]:
    command = [
        sys.executable, "-m", "gateway", "serve", "--config", str(config), "--listen-fd", str(descriptor),
        "--workers", str(place.count), "--worker", str(place.number), "--workers-folder", str(place.folder),
    ]  # fmt: skip
    return [*command, "--embedded-store", store_url] if store_url else command


async def _first(stop: asyncio.Event, ended: asyncio.Task[int]) -> bool:
    """Wait for either; True when we were told to stop first."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return not ended.done()


# -- the demo ----------------------------------------------------------------------------------------------------


@contextmanager
def _demo_engines() -> Iterator[dict[str, list[str]]]:
    """Mock engines as child processes: pool -> URLs."""
    children: list[subprocess.Popen[str]] = []
    try:
        engines: dict[str, list[str]] = {}
        for pool, count, options in DEMO_ENGINES:
            command = [sys.executable, "-m", "gateway", "mock", "--port", "0", "--engines", str(count),
                       "--model", DEMO_MODEL, "--die-with-parent", *options]  # fmt: skip
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
            children.append(child)
            engines[pool] = [_engine_url(child) for _ in range(count)]
        yield engines
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.communicate()


def _engine_url(child: subprocess.Popen[str]) -> str:
    assert child.stdout
    line = child.stdout.readline()
    if "http://" not in line:
        raise DemoError("a mock engine did not start")
    return line[line.index("http://") :].strip()


def _demo_config(engines: Mapping[str, list[str]]) -> str:
    """JSON, which is YAML."""
    short = {"name": "short", "max_prompt_tokens": DEMO_SHORT_PROMPT_TOKENS, "replicas": engines["short"]}
    pools = [short, {"name": "long", "replicas": engines["long"]}]
    fleet = {"model": DEMO_MODEL, "default_output_tokens": DEMO_OUTPUT_TOKENS, "pools": pools}
    return json.dumps({"fleets": [fleet], "log": {"format": "text", "level": "warning"}})


def _demo_ready_line(listener: socket.socket, key: str, token: str) -> str:
    host, port = listener.getsockname()[:2]
    url = f"http://{host}:{port}"
    body = json.dumps(
        {"model": DEMO_MODEL, "messages": [{"role": "user", "content": "hi"}]}, separators=(",", ":")
    )
    return (
        f"state: curl {url}/admin/v1/state -H 'Authorization: Bearer {token}'\n"
        f"kvgate is ready: curl {url}/v1/chat/completions -H 'Authorization: Bearer {key}' "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )
