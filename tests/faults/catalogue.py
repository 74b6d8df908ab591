"""The faults that are injected into real processes, in the order of the table in `docs/reliability.md`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.faults.scene import Found, Needs, Scene, Size, scene

Play = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    part: str
    """What fails: the heading under which the fault stands."""
    name: str
    play: Play
    """Strikes, waits until all is whole, and asserts what each client saw."""
    needs: Needs
    short: bool
    """Also in the short form."""

    async def run(self, size: Size) -> Found:
        """Raises AssertionError where something was not as it must be."""
        async with scene(size, self.needs) as here:
            await here.fill()
            await self.play(here)
            await here.quiet()
            return here.found()


class Part:
    """Faults of one kind; `fault` adds the decorated function."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.faults: list[Fault] = []

    def fault(self, name: str, needs: Needs = Needs(), *, short: bool = False) -> Callable[[Play], Play]:  # noqa: B008
        def add(play: Play) -> Play:
            self.faults.append(Fault(self.title, name, play, needs, short))
            return play

        return add
