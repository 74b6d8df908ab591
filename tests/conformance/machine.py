"""A Hypothesis state machine: each rule is one command to the specification and to the Lua on a real Valkey.

Rules draw whole commands from the state of the specification, so a failure prints a program of literal commands.
"""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import redis
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gateway.ledger.scripts import Library
from tests.conformance import traffic
from tests.conformance.traffic import Op, Start, World
from tests.conformance.twin import Saved, Twin

STEPS = 100
"""Commands of one example."""
PARTS = 8
"""Seeds of the suite: the examples of one seed resemble each other."""
EXAMPLES = int(os.environ.get("KVGATE_CONFORMANCE_EXAMPLES", "112"))
"""Of the whole suite."""
FLOODED = 50
"""With so many calls no more are poured in: the specification's scans take their time."""
SHRINK_SECONDS = 30
"""Hypothesis's own five minutes are more than a test may take."""
CALM = settings(
    stateful_step_count=STEPS,
    database=None,
    deadline=None,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def of_world(strategy: Any) -> st.SearchStrategy[Any]:
    """What a strategy of `traffic` makes of the machine's present state."""
    return st.runner().flatmap(lambda machine: strategy(machine.world))


def sent(strategy: Any) -> st.SearchStrategy[tuple[str, list[Op]]]:
    """One of the present owners, and ops for it to send."""

    def by_owner(machine: "BooksMachine") -> st.SearchStrategy[Any]:
        owners = st.sampled_from(machine.present)
        return owners.flatmap(lambda o: st.tuples(st.just(o), strategy(machine.world, o)))

    return st.runner().flatmap(by_owner)


PAUSES = of_world(traffic.pauses)
OWNER = st.runner().flatmap(lambda machine: st.sampled_from(machine.present))


def sends(name: str, strategy: Any) -> Any:
    """A rule of that name: some owner sends such a batch."""

    def command(self: "BooksMachine", batch: tuple[str, list[Op]], pause: int) -> None:
        self.send(batch, pause)

    command.__name__ = name
    return rule(batch=sent(strategy), pause=PAUSES)(command)


class BooksMachine(RuleBasedStateMachine):
    """One fleet, a few keys, three owners and their successors."""

    twins: type[Twin] = Twin

    def __init__(self, client: "redis.Redis[bytes]", scripts: Library | None = None) -> None:
        super().__init__()
        self._client = client
        self._scripts = scripts
        self._last: dict[str, list[Op]] = {}
        self._saved: Saved | None = None

    @initialize(start=traffic.starts(), opened=st.sampled_from((True,) * 9 + (False,)))
    def start(self, start: Start, opened: bool) -> None:
        self.twin = self.twins(self._client, start.fleet, self._scripts)
        self.world = World(self.twin.books, start)
        for _ in range(3):
            self._hello()
        for replica in start.fleet.replicas if start.caches else ():
            self.twin.seat(self.world.now, traffic.SCRAPERS[0], replica.name)
            self.twin.learn(self.world.now, traffic.SCRAPERS[0], replica.name, 1, [-1, -1, -1], "", cache=1)
        if opened:
            self.declare_all()

    @property
    def commands(self) -> int:
        """Compared so far."""
        return self.twin.compared if hasattr(self, "twin") else 0

    @property
    def present(self) -> list[str]:
        """The owners that still send; a fenced one has a successor."""
        return list(self.world.owners)

    def _hello(self) -> None:
        owner = f"o{self.world.owners_ever}"
        self.world.owners_ever += 1
        self.world.owners[owner] = 0
        self.twin.hello(self.world.now, owner)

    def _send(self, owner: str, ops: list[Op], number: int, malformed: Op | None = None) -> None:
        reply = self.twin.step(self.world.now, owner, number, ops, malformed)
        if reply[0] == "fenced":
            del self.world.owners[owner]
            self._hello()

    def send(self, batch: tuple[str, list[Op]], pause: int = 0, malformed: Op | None = None) -> None:
        owner, ops = batch
        if owner not in self.world.owners:
            return  # fenced since the batch was drawn
        self.world.now += pause
        self.world.owners[owner] += 1
        self._last[owner] = ops
        self._send(owner, ops, self.world.owners[owner], malformed)

    arrive = sends("arrive", traffic.arrivals)
    rush = sends("rush", traffic.rushes)
    crowd = sends("crowd", traffic.rushes)
    throng = sends("throng", traffic.throngs)
    herd = sends("herd", traffic.herds)
    compute = sends("compute", traffic.computations)
    confirm = sends("confirm", traffic.confirmations)
    grow = sends("grow", traffic.growths)
    relocate = sends("relocate", traffic.relocations)
    ask_oddly = sends("ask_oddly", traffic.odd_admits)
    inquire = sends("inquire", traffic.questions)
    settle = sends("settle", traffic.settles)
    clear = sends("clear", traffic.clearances)
    withdraw = sends("withdraw", traffic.withdrawals)
    depart = sends("depart", traffic.departures)
    come_back = sends("come_back", traffic.returns)
    touch = sends("touch", traffic.touches)
    steal = sends("steal", traffic.thefts)
    mix = sends("mix", traffic.mixtures)
    declare = sends("declare", traffic.declarations)
    beat = sends("beat", traffic.heartbeats)

    @rule(batches=sent(traffic.absences))
    def be_away(self, batches: tuple[str, list[list[Op]]]) -> None:
        owner, parts = batches
        for ops in parts:
            self.send((owner, ops))

    @rule(batches=sent(traffic.conversations), pause=PAUSES)
    def converse(self, batches: tuple[str, list[list[Op]]], pause: int) -> None:
        """Some time passes before the last batch."""
        owner, parts = batches
        for at, ops in enumerate(parts):
            self.send((owner, ops), pause if at == len(parts) - 1 else 0)

    @rule(batches=sent(traffic.successions), restarts=st.sampled_from((None, None, 2, 3, 4, 5)))
    def succeed(self, batches: tuple[str, list[list[Op]]], restarts: int | None) -> None:
        """The engines are restarted before the batch of that number, where there is one."""
        owner, parts = batches
        for at, ops in enumerate(parts):
            if at == restarts and self.world.start.caches:
                self._restart_engines()
            self.send((owner, ops))

    def _restart_engines(self) -> None:
        for name, capacity in sorted(self.world.books.capacities.items()):
            cache = self.world.books.replicas[name].cache % 5 + 1
            self.twin.seat(self.world.now, capacity.scraper, name)
            self.twin.learn(
                self.world.now, capacity.scraper, name, capacity.number + 1, [-1, -1, -1], "", cache
            )

    @rule(batch=sent(traffic.mixtures), malformed=st.sampled_from(traffic.MALFORMED))
    def spoil(self, batch: tuple[str, list[Op]], malformed: Op) -> None:
        """One op of the batch is malformed."""
        self.send(batch, malformed=malformed)

    @rule(owner=OWNER)
    def replay(self, owner: str) -> None:
        """The last batch again, as after a reply that was lost."""
        self._send(owner, self._last.get(owner, []), self.world.owners[owner])

    @rule(owner=OWNER)
    def come_late(self, owner: str) -> None:
        """A copy of an earlier batch."""
        self._send(owner, self._last.get(owner, []), max(self.world.owners[owner] - 1, 0))

    @rule(owner=OWNER, end=of_world(traffic.moments))
    def sleep(self, owner: str, end: int) -> None:
        """Until a lease or a deadline is over, or nearly; meanwhile this owner alone sends."""
        while end > 0:
            sender = owner if owner in self.present else self.present[0]
            self.send((sender, []), pause=min(end, traffic.GAP_MS))
            end -= traffic.GAP_MS

    siege = sends("siege", traffic.sieges)
    besiege = sends("besiege", traffic.sieges)

    @precondition(lambda self: len(self.twin.books.calls) < FLOODED)
    @rule(batch=sent(traffic.floods), ending=st.sampled_from(("none", "silence", "gate")))
    def flood(self, batch: tuple[str, list[Op]], ending: str) -> None:
        """Many calls at once; then perhaps their owner is gone, or they had waited for the gate."""
        if ending == "gate":
            self.twin.restart_store()
            self.declare_all()
        self.send(batch)
        if ending == "silence":
            self.sleep(self.present[0], self.world.start.fleet.lease_ms)
        self.declare_all()

    @rule(upset=of_world(traffic.upsets), pause=PAUSES)
    def upset(self, upset: tuple[str, Any], pause: int) -> None:
        """What operators do and what happens to engines, gateways and the store."""
        self.world.now += pause
        kind, argument = upset
        if kind == "observe":
            self.twin.observe(self.world.now, *argument)
        elif kind == "shut":
            self.twin.set_shut(self.world.now, argument)
        elif kind == "rest":
            self.twin.rest(self.world.now, *argument)
        elif kind == "configure":
            self.twin.configure(self.world.now, argument)
        elif kind == "seat":
            self.twin.seat(self.world.now, *argument)
        elif kind == "learn":
            self.twin.learn(self.world.now, *argument)
        elif kind == "distrust":
            self.twin.distrust(self.world.now, *argument)
        elif kind == "policy":
            self.world.policies.update(argument)
        elif kind == "restart":
            self.twin.restart_store()
        else:
            self._hello()

    @rule()
    def go_back(self) -> None:
        """Every other time the content is kept, or what came since is forgotten."""
        if self._saved is None:
            self._saved = self.twin.save()
        else:
            self.twin.go_back(self._saved)
            self._saved = None

    @rule()
    def declare_all(self) -> None:
        """Every owner has declared what it holds: the gate opens."""
        for owner in self.present:
            self.send((owner, [["Y"]]))


def play(machine: Callable[[], BooksMachine], part: int, tuned: settings = CALM) -> None:
    """One part of the suite.  A failure is made small and printed.  Raises AssertionError."""
    examples = max(EXAMPLES // PARTS, 1)
    with mock.patch("hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS", SHRINK_SECONDS):
        run_state_machine_as_test(seed(part)(machine), settings=settings(tuned, max_examples=examples))
