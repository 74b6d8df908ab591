"""The states of a whole engine, and the routes that change them: vLLM's own of its dev mode, and `/mock/state`.

`POST /mock/state` takes one of

    {"state": "drain"}                      SIGTERM with a shutdown timeout, without the end of the process
    {"state": "sleep", "level": 1, "mode": "keep"}, {"state": "wake"}
    {"state": "pause", "mode": "keep"}, {"state": "resume"}     mode: abort | wait | keep
    {"state": "crash"}                      the EngineCore is killed; the port closes `EXIT_SECONDS` later
    {"state": "slow", "factor": 3}          steps take so many times as long from now on; 1 ends it

and answers, as `GET /mock/state` does, what the engine is in.
"""

import asyncio
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from gateway.mock.bodies import Refusal, parse_object, read_integer, validation_error
from gateway.mock.driver import PAUSE_MODES, Driver
from gateway.mock.exchange import Exchange
from gateway.mock.faults import Fault, Kind
from gateway.mock.fields import read_boolean

EXIT_SECONDS = 0.04
"""Recorded from vLLM: so long after /health said 503 its server was gone."""
SLEEP_LEVELS = (0, 1, 2)


class Change(StrEnum):
    DRAIN = "drain"
    SLEEP = "sleep"
    WAKE = "wake"
    PAUSE = "pause"
    RESUME = "resume"
    CRASH = "crash"
    SLOW = "slow"


class Control:
    """Changes and tells the state of one engine."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._factor = 1.0
        self.on_exit: Callable[[], None] = lambda: None
        """What a server does when its engine has crashed: it ends."""

    def strike(self, fault: Fault) -> None:
        """An engine-wide fault of a call."""
        if fault.kind is Kind.CRASH:
            self.crash()
        elif fault.kind is Kind.DRAIN:
            self._driver.drain()
        elif fault.kind is Kind.SLEEP:
            self._driver.sleep(1, "keep")
        elif fault.kind is Kind.SLOW:
            self.slow(float(fault.number or 1))

    def crash(self) -> None:
        """Kill the EngineCore; the server's own end follows."""
        if self._driver.dead:
            return
        self._driver.crash()
        asyncio.get_running_loop().call_later(EXIT_SECONDS, self.on_exit)

    def slow(self, factor: float) -> None:
        self._factor = factor
        self._driver.slow(factor)

    def told(self) -> dict[str, Any]:
        return {
            "draining": self._driver.draining,
            "paused": self._driver.paused,
            "sleeping_level": self._driver.sleeping_level,
            "dead": self._driver.dead,
            "slow": self._factor,
        }

    # `/mock/state`

    async def tell(self, exchange: Exchange) -> None:
        await exchange.json(200, self.told())

    async def change(self, exchange: Exchange) -> None:
        self._change(parse_object(await exchange.body()))
        await self.tell(exchange)

    def _change(self, body: Mapping[str, Any]) -> None:
        wanted = body.get("state")
        if wanted == Change.DRAIN:
            self._driver.drain()
        elif wanted == Change.SLEEP:
            self._driver.sleep(_level(body.get("level", 1)), _mode(body.get("mode", "keep")))
        elif wanted == Change.WAKE:
            self._driver.wake_up()
        elif wanted == Change.PAUSE:
            self._driver.pause(_mode(body.get("mode", "keep")))
        elif wanted == Change.RESUME:
            self._driver.resume()
        elif wanted == Change.CRASH:
            self.crash()
        elif wanted == Change.SLOW:
            self.slow(_factor(body.get("factor")))
        else:
            raise Refusal(400, f"state must be one of {', '.join(Change)}, got {wanted!r}", param="state")

    # vLLM's dev mode

    async def pause(self, exchange: Exchange) -> None:
        self._driver.pause(_asked_mode(exchange))
        await exchange.json(200, {"status": "paused"})

    async def resume(self, exchange: Exchange) -> None:
        self._driver.resume()
        await exchange.json(200, {"status": "resumed"})

    async def is_paused(self, exchange: Exchange) -> None:
        await exchange.json(200, {"is_paused": self._driver.paused})

    async def go_to_sleep(self, exchange: Exchange) -> None:
        level = _asked_level(exchange)
        self._driver.sleep(level, _asked_mode(exchange))
        await exchange.json(200, {"status": "sleeping", "level": level})

    async def wake_up(self, exchange: Exchange) -> None:
        self._driver.wake_up()
        await exchange.json(200, {"status": "awake", "tags": exchange.query("tags") or None})

    async def is_sleeping(self, exchange: Exchange) -> None:
        await exchange.json(200, {"is_sleeping": self._driver.sleeping})

    async def world_size(self, exchange: Exchange) -> None:
        await exchange.json(200, {"world_size": self._driver.ranks})

    async def reset_prefix_cache(self, exchange: Exchange) -> None:
        running = _asked_bool(exchange, "reset_running_requests")
        success = self._driver.reset_prefix_cache(reset_running_requests=running)
        await exchange.json(200, {"success": success})


def _first(values: list[str], default: str) -> str:
    return values[0] if values else default


def _asked_bool(exchange: Exchange, name: str) -> bool:
    value, error = read_boolean(_first(exchange.query(name), "false"), f"query.{name}")
    if error is not None:
        raise validation_error([error])
    return bool(value)


def _asked_mode(exchange: Exchange) -> str:
    mode = _first(exchange.query("mode"), "abort")
    if mode not in PAUSE_MODES:
        expected = "'abort', 'wait' or 'keep'"
        text = f"Input should be {expected}"
        raise validation_error([("literal_error", "query.mode", text, mode, {"expected": expected})])
    return mode


def _asked_level(exchange: Exchange) -> int:
    level, error = read_integer(_first(exchange.query("level"), "1"), "query.level")
    if level is not None and level > SLEEP_LEVELS[-1]:
        text = "Input should be less than or equal to 2"
        error = ("less_than_equal", "query.level", text, str(level), {"le": 2})
    elif level is not None and level < SLEEP_LEVELS[0]:
        text = "Input should be greater than or equal to 0"
        error = ("greater_than_equal", "query.level", text, str(level), {"ge": 0})
    if level is None or error is not None:
        raise validation_error([error] if error is not None else [])
    return level


def _mode(value: object) -> str:
    if value in PAUSE_MODES:
        return str(value)
    raise Refusal(400, f"mode must be one of {', '.join(PAUSE_MODES)}, got {value!r}", param="mode")


def _level(value: object) -> int:
    if str(value) in map(str, SLEEP_LEVELS):
        return int(str(value))
    raise Refusal(400, f"level must be 0, 1 or 2, got {value!r}", param="level")


def _factor(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    raise Refusal(400, f"factor must be a number above 0, got {value!r}", param="factor")
