"""ORCA: the load of an engine in a header of its answers, for clients that ask for it.

Source: recorded from vLLM 0.32.0, where answers that do not stream carry it.
"""

import json

from gateway.mock.driver import Driver

HEADER = b"endpoint-load-metrics"


def load_header(wanted: str, driver: Driver) -> list[tuple[bytes, bytes]]:
    """The header in the format that the request asked for; none for another format than TEXT and JSON."""
    waiting = sum(len(engine.waiting) for engine in driver.engines)
    usage = sum(engine.kv_usage for engine in driver.engines) / driver.ranks
    figures = {"num_requests_waiting": float(waiting), "kv_cache_usage_perc": usage}
    if wanted.upper() == "TEXT":
        text = ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())
        return [(HEADER, f"TEXT {text}".encode())]
    if wanted.upper() == "JSON":
        return [(HEADER, f"JSON {json.dumps({'named_metrics': figures})}".encode())]
    return []
