"""A real vLLM as a child process, and the settings that it shares with the mock."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import httpx

from tests.processes import free_port, sum_of, wait_until

MODEL = "tiny"
BLOCKS = 256
BLOCK_SIZE = 32
"""The smallest that attention on CPUs allows."""
USABLE_BLOCKS = BLOCKS - 1
CONTEXT_TOKENS = 4096
START_SECONDS = 600.0
"""30 on two idle cores; several times that while other engines and their clients have them."""
TEST_SECONDS = START_SECONDS + 240.0
"""The limit of one test, with the start of the engine that it is the first to need."""
STOP_SECONDS = 15.0
SLOW_MACHINE = {
    "upstream": {
        "connect_seconds": 60,
        "headers_seconds": 600,
        "first_event_seconds": 600,
        "idle_seconds": 600,
    },
    "store": {"hold_seconds": 60, "lease_seconds": 60},
}
"""Settings of a gateway that shares two cores with two engines and their clients: each of them may stand still."""

_SHARED_OPTIONS = (
    *(
        "--served-model-name",
        MODEL,
        "--num-gpu-blocks-override",
        str(BLOCKS),
        "--block-size",
        str(BLOCK_SIZE),
    ),
    *(
        "--max-model-len",
        str(CONTEXT_TOKENS),
        "--enable-request-id-headers",
        "--enable-prompt-tokens-details",
    ),
)
MOCK_OPTIONS = (*_SHARED_OPTIONS, "--max-num-batched-tokens", "2048", "--dev-mode", "--responses-store")
POOLING_OPTIONS = ("--runner", "pooling", "--convert", "embed", "--max-num-seqs", "8")
"""Of both engines, where the model embeds."""
_VLLM_OPTIONS = (*_SHARED_OPTIONS, "--enforce-eager", "--dtype", "bfloat16")
_VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""No network, one thread of arithmetic: the engine shares its machine with the gateway and the clients."""


class Vllm:
    """`vllm serve` with the tiny model, on a free port of loopback."""

    def __init__(self, venv: Path, log: Path, *options: str, port: int = 0) -> None:
        """`port`: that of one that has ended; 0 takes a free one."""
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [str(venv / "bin/vllm"), "serve", str(venv / "model"), "--host", "127.0.0.1"]
        env = {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "HOME": str(log.parent), **_VLLM_ENVIRONMENT}
        with log.open("wb") as output:
            # A process group of its own: the engine core is a child that has to go with it.
            self.process = subprocess.Popen(
                [*command, "--port", str(port), *_VLLM_OPTIONS, *options],
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )
        self._client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def is_healthy(self) -> bool:
        """False also when nothing listens."""
        with contextlib.suppress(httpx.TransportError):
            return self._client.get("/health").status_code == 200
        return False

    def wait_ready(self) -> None:
        try:
            wait_until(self._is_ready, "vLLM is ready", START_SECONDS)
        except AssertionError as late:
            late.add_note(self.log.read_text()[-4000:])
            raise

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        return sum_of(name, self._client.get("/metrics").text)

    def stop(self) -> None:
        self._client.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.terminate()
            self.process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, "vLLM ended while it started"
        return self.is_healthy()
