"""What the pages of engines and gateways say."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from gateway.loadtest import observe
from gateway.loadtest.observe import (
    AdminError,
    Observer,
    Page,
    read_engine,
    read_predictions,
    read_refusals,
    read_state,
)

VLLM = """# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="tiny"} 39.0
vllm:num_preemptions_total{engine="1",model_name="tiny"} 2.0
vllm:num_requests_running{engine="0",model_name="a \\"b\\" c"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 3.3412e+04
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="256",sliding_window="None"} 1.0
vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="256",sliding_window="None"} 1.0
process_start_time_seconds 1.79597e+09
"""
STATE = {
    "fleets": {
        "demo": {
            "pools": {
                "short": {"replicas": {"a": {"limit": 100, "reserved": 90}, "b": {"limit": 100, "reserved": 80}}},
                "long": {"replicas": {"c": {"limit": 50, "reserved": 5}}},
            },
            "queued": {"short": {"normal": 4}, "long": {}},
        }
    },
    "reserved": 175, "leases": 9, "queue": 4, "inflight": 13,
}  # fmt: skip
QUIET = STATE | {"reserved": 0, "leases": 0, "queue": 0, "inflight": 0}


def test_ranks_of_an_engine_are_added_and_their_use_is_averaged() -> None:
    sample = read_engine(1.5, VLLM)

    assert (sample.preemptions, sample.running, sample.waiting) == (41, 3, None)
    assert (sample.kv_use, sample.blocks) == (0.75, 510)
    assert (sample.prompt_tokens, sample.started) == (33_412, 1_795_970_000)
    assert sample.recomputed_tokens is None


def test_older_names_are_known() -> None:
    assert read_engine(0, 'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\n').kv_use == 0.25


def test_a_page_without_a_name_has_no_number() -> None:
    assert Page("other 1\n").sum("vllm:num_preemptions_total") is None


def test_a_state_has_its_shares_only_where_calls_wait() -> None:
    sample = read_state(2.0, STATE)

    assert sample is not None
    assert (sample.reserved, sample.limit, sample.queue) == (175, 250, 4)
    assert sample.shares_while_queued == {"demo/short": 0.85}


def test_a_gateway_without_its_store_has_no_sample() -> None:
    assert read_state(2.0, STATE | {"reserved": None}) is None


def test_predictions_are_read_over_all_lanes() -> None:
    text = "".join(
        f'kvgate_queue_wait_prediction_ratio_bucket{{fleet="a",lane="{lane}",class="normal",le="{le}"}} {count}\n'
        for lane in ("short", "long")
        for le, count in (("0.8", 3), ("+Inf", 4))
    )

    assert read_predictions(text) == {0.8: 6.0, float("inf"): 8.0}


def test_refusals_are_read_by_reason() -> None:
    text = "".join(
        f'kvgate_refusal_seconds_bucket{{fleet="{fleet}",le="{le}",reason="queue_full"}} {count}\n'
        for fleet in ("x", "y")
        for le, count in (("0.001", 3.0), ("+Inf", 4.0))
    )

    assert read_refusals(text) == {"queue_full": {0.001: 6.0, float("inf"): 8.0}}


@asynccontextmanager
async def pages(answer: Callable[[str], str | None]) -> AsyncIterator[str]:
    """A server that answers each path with what `answer` gives, or with 503."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = answer(head.split(b" ")[1].decode())
        status = "200 OK" if body is not None else "503 Service Unavailable"
        raw = (body or "").encode()
        writer.write(
            f"HTTP/1.1 {status}\r\ncontent-length: {len(raw)}\r\nconnection: close\r\n\r\n".encode() + raw
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_what_is_left_over_is_asked_for_until_it_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "QUIET_POLL_SECONDS", 0.0)
    asked: list[str] = []

    def answer(path: str) -> str:
        asked.append(path)
        late = asked.count("/admin/v1/state") >= 3
        return json.dumps(QUIET if late else STATE) if path.startswith("/admin") else VLLM

    async with pages(answer) as url:
        observer = Observer([url], url, "token")
        await observer.finish(0.0)
        await observer.close()

    assert observer.observations.left_over == dict.fromkeys(observe.STATE_COUNTS, 0)
    assert asked.count("/admin/v1/state") in (3, 4)  # then it is not asked again but for the last sample
    assert observer.observations.engines[url][-1].preemptions == 41


async def test_what_stays_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "QUIET_SECONDS", 0.0)
    async with pages(lambda path: json.dumps(STATE) if path.startswith("/admin") else VLLM) as url:
        observer = Observer([], url, "token")
        await observer.finish(0.0)
        await observer.close()

    assert observer.observations.left_over == {"reserved": 175, "leases": 9, "queue": 4, "inflight": 13}


async def test_a_gateway_that_does_not_answer_is_not_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "QUIET_SECONDS", 0.0)
    async with pages(lambda path: None) as url:
        observer = Observer([url], url, "token")
        with pytest.raises(AdminError, match="answers 503 to /admin/v1/state"):
            await observer.begin()
        await observer.finish(0.0)
        await observer.close()

    assert observer.observations.left_over == dict.fromkeys(observe.STATE_COUNTS, -1)
    assert observer.observations.missed == 3
    assert not observer.observations.engines[url][0].up


async def test_a_wrong_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    observer = Observer([], "http://gateway", "wrong")
    monkeypatch.setattr(
        observer, "_client", httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(401)))
    )

    with pytest.raises(AdminError, match="at http://gateway answers 401: is KVGATE_ADMIN_TOKEN right"):
        await observer.begin()
    await observer.close()


async def test_a_page_that_is_no_state_is_told() -> None:
    async with pages(lambda path: "<html>") as url:
        observer = Observer([], url, "token")
        with pytest.raises(AdminError, match="is it a kvgate"):
            await observer.begin()
        await observer.close()
