"""A bound for calls that reserve nothing, and that nothing in the store would bound."""

from gateway.core.outcomes import Code, Refusal

RETRY_MS = 1_000


class Passages:
    """Such calls under way in this process, by key.  One key takes half of what there may be."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: dict[str, int] = {}

    @property
    def count(self) -> int:
        return sum(self._held.values())

    def take(self, key: str) -> Refusal | None:
        """Whoever is not refused gives its place back once."""
        held, of_key = self.count, self._held.get(key, 0)
        key_most = max(1, self.most // 2)
        if held >= self.most:
            return _refusal(f"{held} calls that reserve nothing are under way", self.most)
        if of_key >= key_most:
            return _refusal(f"{of_key} calls of this key that reserve nothing are under way", self.most)
        self._held[key] = of_key + 1
        return None

    def give_back(self, key: str) -> None:
        left = self._held[key] - 1
        if left:
            self._held[key] = left
        else:
            del self._held[key]


def _refusal(what: str, most: int) -> Refusal:
    words = f"{what}; `routes.unreserved_max` is {most}, of which one key may take half"
    return Refusal(Code.CAPACITY_EXCEEDED, words, retry_ms=RETRY_MS)
