"""`kvgate mock`: mock engines on consecutive ports of one process, with uvicorn.

SIGTERM and SIGINT end it as vLLM ends by default: streams get finish_reason "abort" and [DONE] at once.
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
from contextlib import contextmanager

import uvicorn

from gateway.mock.engine import EngineConfig
from gateway.mock.exchange import BreakableProtocol
from gateway.mock.server import MockServer, create_app

SHUTDOWN_SECONDS = 5
"""Connections still open this long after SIGTERM are dropped."""
BACKLOG = 2048
PARENT_POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvgate mock`."""
    default = EngineConfig()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9001, help="0 takes a free port (default 9001)")
    parser.add_argument("--engines", type=int, default=1, help="engines, on consecutive ports (default 1)")
    parser.add_argument("--model", default=default.model)
    parser.add_argument(
        "--blocks", type=int, default=default.blocks, help="num_gpu_blocks, null block included"
    )
    parser.add_argument("--block-size", type=int, default=default.block_size, help="tokens per block")
    parser.add_argument("--max-model-len", type=int, default=default.max_model_len)
    parser.add_argument("--max-num-seqs", type=int, default=default.max_num_seqs)
    parser.add_argument("--max-num-batched-tokens", type=int, default=default.max_num_batched_tokens)
    parser.add_argument("--step-base-ms", type=float, default=default.step_base_ms)
    parser.add_argument(
        "--step-prefill-us", type=float, default=default.step_prefill_us, help="per prefill token"
    )
    parser.add_argument("--step-running-us", type=float, default=default.step_running_us, help="per sequence")
    parser.add_argument(
        "--speed", type=float, default=1.0, help="divides step times; inf = no time (default 1)"
    )
    parser.add_argument("--tokens", type=int, help="output tokens of an answer (default: run to the limit)")
    parser.add_argument("--api-key", help="asked for under /v1 only")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the parent process ends")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    parent = os.getppid()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    try:
        listeners = _listen(args.host, args.port, args.engines)
    except OSError as error:
        print(f"cannot listen on {args.host}:{args.port}: {error}", file=sys.stderr)
        return 1
    try:
        asyncio.run(_serve(args, listeners, parent))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        for listener in listeners:
            listener.close()
    return 0


class EngineServer(uvicorn.Server):
    """One engine's server: it leaves signals to `_serve` and tells when it is ready."""

    def __init__(self, app: MockServer, listener: socket.socket) -> None:
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
        self.listener = listener

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.listener.getsockname()[:2]
        print(f"mock engine ready on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    def stop(self) -> None:
        self._app.driver.stop()
        self.should_exit = True


async def _serve(args: argparse.Namespace, listeners: list[socket.socket], parent: int) -> None:
    config = EngineConfig(
        model=args.model,
        blocks=args.blocks,
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        step_base_ms=args.step_base_ms,
        step_prefill_us=args.step_prefill_us,
        step_running_us=args.step_running_us,
    )
    servers = [
        EngineServer(
            create_app(config, speed=args.speed, api_key=args.api_key, output_tokens=args.tokens), listener
        )
        for listener in listeners
    ]
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for server in servers:
            server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    watch = loop.create_task(_stop_with_parent(parent)) if args.die_with_parent else None
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
    except OSError:
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
    except OSError:
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
