"""The block pool and its prefix cache, by hand and against its own books."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.mock.pool import EMPTY, Block, BlockPool, chained, content


def pieces(text: str) -> list[str]:
    return list(text)


def cached(pool: BlockPool, names: list[int]) -> list[Block]:
    """Blocks that were computed by one sequence under those names."""
    blocks = pool.take(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.cache(block, name)
    return blocks


def test_a_prompt_is_named_block_by_block_and_each_name_depends_on_all_before() -> None:
    one, two = content(pieces("abcdefghij"), 4), content(pieces("abcdEfghij"), 4)
    assert (len(one.hashes), one.tail) == (2, ("i", "j"))
    assert one.hashes[0] == two.hashes[0]
    assert one.hashes[1] != two.hashes[1]
    assert content(pieces("efgh"), 4).hashes[0] != one.hashes[1]
    assert content(pieces("abcd"), 4).hashes == one.hashes[:1]
    assert content([], 4) == content([], 4)


def test_salts_keep_prompts_apart_also_when_they_fill_no_block() -> None:
    plain, salted = content(pieces("abc"), 4), content(pieces("abc"), 4, "tenant")
    assert plain.end != salted.end
    assert content(pieces("abcd"), 4).hashes != content(pieces("abcd"), 4, "tenant").hashes
    assert EMPTY.tail == EMPTY.hashes == ()


def test_what_follows_a_prompt_continues_its_chain() -> None:
    prompt = content(pieces("abcdef"), 4)
    assert chained(prompt.end, [*prompt.tail, "g", "h"]) == content(pieces("abcdefgh"), 4).hashes[1]


def test_a_left_block_is_found_counts_as_free_and_is_forgotten_when_taken() -> None:
    pool = BlockPool(2)
    pool.give_back(cached(pool, [7]))
    assert (pool.used, pool.free) == (0, 2)
    found = pool.find([7, 8])
    assert len(found) == 1
    assert BlockPool.free_among(found) == 1
    pool.share(found)
    assert (pool.used, BlockPool.free_among(found)) == (1, 0)
    pool.give_back(found)
    pool.take(2)
    assert pool.find([7]) == []


def test_a_shared_block_is_free_when_the_last_holder_leaves() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, [1, 2])
    pool.share(pool.find([1, 2]))
    pool.give_back(blocks)
    assert pool.used == 2
    pool.give_back(blocks)
    assert pool.used == 0


def test_the_block_left_longest_ago_goes_first_and_of_one_sequence_the_tail() -> None:
    pool = BlockPool(5)
    old, new = cached(pool, [1, 2]), cached(pool, [3, 4])
    pool.give_back(old)
    pool.give_back(new)
    pool.share(pool.find([1, 2]))  # used again: now the newest
    pool.give_back(old)
    order = []
    for _ in range(5):
        pool.take(1)
        order.append([name for name in (1, 2, 3, 4) if pool.find([name])])
    assert order == [[1, 2, 3, 4], [1, 2, 3], [1, 2], [1], []]


def test_blocks_that_hold_nothing_are_taken_before_anything_is_forgotten() -> None:
    pool = BlockPool(3)
    blank = pool.take(2)
    pool.give_back(cached(pool, [1]))
    pool.give_back(blank)
    pool.take(2)
    assert pool.find([1])


def test_two_that_computed_the_same_keep_one_each_and_one_is_found() -> None:
    pool = BlockPool(2)
    first, second = cached(pool, [1]), cached(pool, [1])
    assert pool.find([1]) == first
    pool.give_back(first)
    pool.take(1)
    assert pool.find([1]) == second


def test_reset_forgets_all_but_not_while_blocks_are_held() -> None:
    pool = BlockPool(2)
    blocks = cached(pool, [1])
    assert not pool.reset()
    assert pool.find([1])
    pool.give_back(blocks)
    assert pool.reset()
    assert pool.find([1]) == []
    assert len(pool.take(2)) == 2


def test_no_more_than_is_free_can_be_taken() -> None:
    pool = BlockPool(2)
    pool.take(2)
    with pytest.raises(AssertionError):
        pool.take(1)


@dataclass
class Books:
    """A pool, and who holds what as the test sees it."""

    pool: BlockPool
    holders: list[list[Block]] = field(default_factory=list)

    def enter(self, names: list[int]) -> None:
        found = self.pool.find(names)
        missing = len(names) - len(found)
        if missing + BlockPool.free_among(found) > self.pool.free:
            return
        self.pool.share(found)
        taken = self.pool.take(missing)
        for block, name in zip(taken, names[len(found) :], strict=True):
            self.pool.cache(block, name)
        self.holders.append(found + taken)

    def check(self, names: range) -> None:
        counts: dict[Block, int] = {}
        for blocks in self.holders:
            assert len(set(blocks)) == len(blocks)
            for block in blocks:
                counts[block] = counts.get(block, 0) + 1
        assert self.pool.used + self.pool.free == self.pool.size
        assert self.pool.used == len(counts)
        assert all(block.holders == count for block, count in counts.items())
        for name in names:
            assert all(block.hash == name for block in self.pool.find([name]))


CHAINS = st.lists(st.integers(1, 6), max_size=5).map(
    lambda digits: [chained(0, [str(digit) for digit in digits[: end + 1]]) for end in range(len(digits))]
)


@given(st.integers(1, 8), st.lists(st.one_of(CHAINS, st.integers(0, 9)), max_size=40))
@settings(max_examples=150, deadline=None)
def test_the_books_hold_whatever_happens(size: int, ops: list[list[int] | int]) -> None:
    """A chain enters, a number lets one of the holders leave; all blocks come back in the end."""
    books = Books(BlockPool(size))
    for op in ops:
        if isinstance(op, list):
            books.enter(op)
        elif books.holders:
            books.pool.give_back(books.holders.pop(op % len(books.holders)))
        books.check(range(1, 7))
    for blocks in books.holders:
        books.pool.give_back(blocks)
    assert books.pool.used == 0
    assert len(books.pool.take(size)) == size
