"""What the official OpenAI client's own retries meet: the place that they left, and the end of a call under one key."""

import itertools
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.processes import HANG_SECONDS, QUICK_STORE, GatewayProcess, wait_until, world

MESSAGES = [{"role": "user", "content": "hi"}]
BLOCKS = 63
ALL = BLOCKS * 16 - 100
"""Output tokens for which a call needs nearly all blocks, so that one runs at a time."""


@pytest.fixture(scope="module")
def gateways() -> Iterator[list[GatewayProcess]]:
    """Two before one engine."""
    with world() as here:
        mock = here.mock("--blocks", str(BLOCKS + 1), "--max-model-len", "1024", "--step-base-ms", "50")
        config, (key,) = here.config([{"name": "short", "replicas": [mock.url]}], store=QUICK_STORE)
        yield [here.gateway(config, key) for _ in range(2)]


class InTurns(httpx.HTTPTransport):
    """Each request goes to the next gateway, as a load balancer sends it."""

    def __init__(self, gateways: list[GatewayProcess]) -> None:
        super().__init__()
        self._ports = itertools.cycle([gateway.port for gateway in gateways])

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(port=next(self._ports))
        return super().handle_request(request)


class HastyOnce(InTurns):
    """The first request has the time-out of its client.  The next one waits until it may be made, and then is patient:
    whatever the machine does meanwhile, it stays in the queue."""

    def __init__(self, gateways: list[GatewayProcess]) -> None:
        super().__init__(gateways)
        self.may_return = threading.Event()
        self._left = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self._left:
            assert self.may_return.wait(HANG_SECONDS)
            request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), HANG_SECONDS)
        self._left = True
        return super().handle_request(request)


def client(
    gateways: list[GatewayProcess], transport: httpx.HTTPTransport | None = None, **options: object
) -> openai.OpenAI:
    """Its own time-out and retries are all that it has."""
    return openai.OpenAI(
        base_url=f"{gateways[0].url}/v1",
        api_key=gateways[0].key,
        http_client=httpx.Client(transport=transport or InTurns(gateways)),
        **options,  # type: ignore[arg-type]
    )


def test_a_retry_takes_the_place_that_its_first_attempt_left(gateways: list[GatewayProcess]) -> None:
    """It times out while it waits, asks another gateway, and is served before who came between."""
    served: list[str] = []
    once = HastyOnce(gateways)
    patient, hasty = (
        client(gateways, max_retries=0),
        client(gateways, once, max_retries=9, timeout=httpx.Timeout(5.0)),
    )

    def ask(name: str, sdk: openai.OpenAI) -> None:
        sdk.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=ALL, stream=True, user=name
        ).close()
        served.append(name)

    def begin(name: str, sdk: openai.OpenAI, queue: int) -> threading.Thread:
        thread = threading.Thread(target=ask, args=(name, sdk))
        thread.start()
        wait_until(lambda: gateways[0].state()["queue"] == queue, f"{name} waits")
        return thread

    running = patient.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=ALL, stream=True)
    threads = [begin("gave up", hasty, 1), begin("came between", patient, 2)]
    wait_until(lambda: gateways[0].state()["queue"] == 1, "the first one has given up")
    once.may_return.set()
    wait_until(lambda: gateways[0].state()["queue"] == 2, "it has come again")
    running.close()
    for thread in threads:
        thread.join()
    assert served == ["gave up", "came between"]
    wait_until(gateways[0].is_quiet, "nothing is held")


def test_a_second_call_under_an_idempotency_key_comes_when_the_first_is_over(
    gateways: list[GatewayProcess],
) -> None:
    """The client repeats a 409 by itself, and a 422 not at all."""
    sdk = client(gateways, max_retries=9)
    named = {"extra_headers": {"Idempotency-Key": "order 66"}}
    first = sdk.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=ALL,
        stream=True,
        **named,  # type: ignore[call-overload]
    )
    with pytest.raises(openai.ConflictError) as conflict:
        sdk.with_options(max_retries=0).chat.completions.create(
            model="demo",
            messages=MESSAGES,
            max_tokens=ALL,
            stream=True,
            **named,  # type: ignore[call-overload]
        )
    assert conflict.value.code == "duplicate_in_progress"
    with pytest.raises(openai.UnprocessableEntityError) as reused:
        sdk.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=1, **named)  # type: ignore[call-overload]
    assert reused.value.code == "idempotency_key_reused"
    threading.Timer(0.3, first.close).start()
    again = sdk.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=ALL,
        stream=True,
        **named,  # type: ignore[call-overload]
    )
    again.close()
    wait_until(gateways[0].is_quiet, "nothing is held")
