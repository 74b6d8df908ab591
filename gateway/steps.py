"""Running a coroutine as far as it goes without a task: most of what waits here need not wait at all."""

import types
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Begun(Generic[T]):
    """A coroutine that was run to its first suspension.

    Until it is finished or closed it may hold what it has taken: whoever begins one awaits `rest` or calls `close`.
    """

    __slots__ = ("_coroutine", "_waits_for", "result", "suspended")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """What it raises before it first suspends passes through."""
        self._coroutine = coroutine
        self.suspended = False
        try:
            self._waits_for = coroutine.send(None)
            self.suspended = True
        except StopIteration as finished:
            self.result: T = finished.value

    async def rest(self) -> T:
        """Finish it as a part of the awaiting task."""
        if self.suspended:
            self.result = await _rest(self._coroutine, self._waits_for)
            self.suspended = False
        return self.result

    def close(self) -> None:
        self._coroutine.close()


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, None, T]:
    while True:
        try:
            yield waits_for
        except BaseException as error:
            step, argument = coroutine.throw, error
        else:
            step, argument = coroutine.send, None  # type: ignore[assignment]
        try:
            waits_for = step(argument)
        except StopIteration as finished:
            result: T = finished.value
            return result
