"""`kvgate mock`: mock engines on consecutive ports of one process, with uvicorn.

SIGTERM and SIGINT end it as they end vLLM: by default streams get finish_reason "abort" and [DONE] at once; with a
shutdown timeout what is in flight finishes first, while new calls are turned away.  The second signal ends at once.
"""

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
import uvloop

from gateway.mock.arguments import Opened, add_arguments, engine_config, opened, server_options
from gateway.mock.exchange import BreakableProtocol
from gateway.mock.server import MockServer, create_app

__all__ = ["EngineServer", "add_arguments", "run"]

SHUTDOWN_SECONDS = 5
"""Connections still open this long after the end of the last call are dropped."""
BACKLOG = 2048
PARENT_POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; the exit status, 1 after a crash that was asked for."""
    parent = os.getppid()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    options = opened(args)
    try:
        listeners = _listen(options.host, options.port, options.engines)
    except (OSError, OverflowError) as error:  # the latter: a port beyond 65535
        print(f"cannot listen on {options.host}:{options.port}: {error}", file=sys.stderr)
        return 1
    if not listeners:
        print(f"engines must be at least 1, got {options.engines}", file=sys.stderr)
        return 2
    try:
        servers = _servers(args, options, listeners)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(servers, options, parent))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        for listener in listeners:
            listener.close()
    return int(any(server.crashed for server in servers))


class EngineServer(uvicorn.Server):
    """One engine's server: it leaves signals to `_serve` and tells when it is ready."""

    def __init__(self, app: MockServer, listener: socket.socket, shutdown_seconds: float = 0.0) -> None:
        config = uvicorn.Config(
            app,
            http=BreakableProtocol,
            lifespan="on",
            backlog=BACKLOG,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        super().__init__(config)
        self._app = app
        self._shutdown_seconds = shutdown_seconds
        self._draining: asyncio.Task[None] | None = None
        self.listener = listener
        self.crashed = False
        app.control.on_exit = self._crash

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.listener.getsockname()[:2]
        print(f"mock engine ready on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    def terminate(self) -> None:
        """A signal: the first one drains when there is time for it, the second one ends."""
        if self._draining is not None or not self._shutdown_seconds:
            self.stop()
            return
        self._app.driver.drain()
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    def stop(self) -> None:
        """Cut what is in flight, as vLLM does without a shutdown timeout, and close the port."""
        self._app.driver.stop()
        self.should_exit = True
        for server in self.servers:
            server.close()

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._shutdown_seconds):
                await self._app.driver.drained()
        self.stop()

    def _crash(self) -> None:
        self.crashed = True
        self.stop()


def _servers(args: argparse.Namespace, options: Opened, listeners: list[socket.socket]) -> list[EngineServer]:
    """Raises ValueError for options that make no engine."""
    config, server = engine_config(args), server_options(args)
    return [
        EngineServer(create_app(config, server, speed=options.speed), listener, options.shutdown_seconds)
        for listener in listeners
    ]


async def _serve(servers: list[EngineServer], options: Opened, parent: int) -> None:
    loop = asyncio.get_running_loop()

    def terminate() -> None:
        for server in servers:
            server.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, terminate)
    watch = loop.create_task(_stop_with_parent(parent)) if options.die_with_parent else None
    await asyncio.gather(*(server.serve([server.listener]) for server in servers))
    if watch is not None:
        watch.cancel()


def _listen(host: str, port: int, engines: int) -> list[socket.socket]:
    """One listening socket per engine.  Raises OSError when a port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listeners: list[socket.socket] = []
    try:
        for number in range(engines):
            address = (host, port + number if port else 0)
            listeners.append(_listener(address, family))
    except (OSError, OverflowError):
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listener(address: tuple[str, int], family: socket.AddressFamily) -> socket.socket:
    """Names its protocol: asyncio sets TCP_NODELAY only on connections of a socket that does.

    Without it an answer's first event waits 40 ms behind its headers for the client's delayed ACK.
    """
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener


async def _stop_with_parent(parent: int) -> None:
    """Send this process SIGTERM when its parent is gone: by the kernel on Linux, elsewhere by looking."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    while os.getppid() == parent:  # noqa: ASYNC110 (elsewhere nothing tells)
        await asyncio.sleep(PARENT_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gateway.mock.serve", description=__doc__.splitlines()[0])
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
