"""`kvgate status | gate | drain | undrain`: what operators ask and tell a gateway through its admin API.

What is told holds for all gateways of the store.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.adminclient import AdminClient, field
from gateway.table import table

LENGTHS_HEAD = ("TOKENS", "REACHED", "ENDED", "SURVIVAL")
HEAD = ("FLEET", "POOL", "REPLICA", "STATE", "WHY", "MODE", "LIMIT", "RESERVED", "SOFT", "SEQUENCES")


def add_replica_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("replica", metavar="REPLICA", help="its name, as `kvgate status` shows it")
    parser.add_argument("--fleet", metavar="NAME", help="needed where several fleets have one of that name")


def drain(parsed: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """No new calls go there; what runs finishes."""
    told = AdminClient(environ).post("/drain", _replica_fields(parsed))
    place = f"replica {field(told, 'replica')} of fleet {field(told, 'fleet')}"
    print(f"{place} gets no new calls; `kvgate status` shows what still runs there")
    return 0


def undrain(parsed: argparse.Namespace, environ: Mapping[str, str]) -> int:
    told = AdminClient(environ).post("/undrain", _replica_fields(parsed))
    print(f"replica {field(told, 'replica')} of fleet {field(told, 'fleet')} may get calls again")
    return 0


def add_gate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("close", "open"), help="to new calls; who waits or runs goes on")
    parser.add_argument("fleet", metavar="FLEET", help="its name, as `kvgate status` shows it")


def gate(parsed: argparse.Namespace, environ: Mapping[str, str]) -> int:
    fields = {"fleet": parsed.fleet, "closed": parsed.what == "close"}
    told = AdminClient(environ).post("/gate", fields)
    does = "takes no new calls" if field(told, "closed") else "takes calls"
    print(f"fleet {field(told, 'fleet')} {does}")
    return 0


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", action="store_true", help="how much calls write, as the gateways have learned it"
    )


def status(parsed: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """0: the gateway gets traffic; 1: it does not."""
    if parsed.lengths:
        return _lengths(environ)
    told = AdminClient(environ).get("/state")
    fleets, ready = field(told, "fleets"), field(told, "ready")
    rows = [row for name, fleet in fleets.items() for row in _replica_rows(name, fleet)]
    print("\n".join(table(HEAD, rows)))
    for name, fleet in fleets.items():
        print(_fleet_line(name, fleet))
    print("ready" if ready else "not ready")
    return 0 if ready else 1


def _lengths(environ: Mapping[str, str]) -> int:
    told = AdminClient(environ).get("/lengths")
    found = False
    for name, kinds in field(told, "fleets").items():
        for kind in kinds:
            found = True
            print(
                f"fleet {name}, class {kind['class']}, {kind['model'] or 'other models'}: {kind['calls']} calls"
            )
            print("\n".join(table(LENGTHS_HEAD, [_age_row(age) for age in kind["ages"]])))
    if not found:
        print("nothing was learned yet: no elastic call has written anything")
    return 0


def _age_row(age: Mapping[str, Any]) -> list[str]:
    return [f"{age['tokens']}", f"{age['entered']:g}", f"{age['ended']:g}", f"{age['survival']:.3f}"]


def _replica_fields(parsed: argparse.Namespace) -> dict[str, str]:
    return {"replica": parsed.replica} | ({} if parsed.fleet is None else {"fleet": parsed.fleet})


def _replica_rows(fleet: str, state: Mapping[str, Any]) -> Iterator[list[str]]:
    for pool, inside in field(state, "pools").items():
        for name, replica in inside["replicas"].items():
            why = ",".join(field(replica, "rests")) or "-"
            mode = field(replica, "mode")
            figures = ("limit", "reserved", "soft_blocks", "sequences")
            numbers = [str(field(replica, figure)) for figure in figures]
            yield [fleet, pool, name, replica["state"], why, mode, *numbers]


def _fleet_line(name: str, state: Mapping[str, Any]) -> str:
    """A store that does not answer leaves the numbers out."""
    if state["leases"] is None:
        return f"fleet {name}: the store does not answer; {state['inflight']} requests are here"
    gate = "closed to new calls, " if field(state, "gate") == "closed" else ""
    counts = f"{state['leases']} run, {state['queue']} wait, {state['reserved']} blocks are reserved"
    return f"fleet {name}: {gate}{counts}"
