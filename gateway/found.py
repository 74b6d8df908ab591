"""The replicas of a fleet: those that its configuration lists, and those that are found while the gateway runs."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from gateway.config import ConfigError, Replica, ReplicasFrom, found_replicas, load_replicas
from gateway.config import Fleet as FleetSettings
from gateway.reload import FileWatch
from gateway.upstream.api import Access
from gateway.upstream.fleet import ReplicaSpec
from gateway.upstream.sources import Dns, EndpointSlices, Follower, ReplicaSource

log = logging.getLogger("kvgate.found")


class FoundReplicas:
    """The replicas of one fleet's pools that no list has: they are looked for while the gateway runs."""

    def __init__(self, changed: Callable[[], None], failed: Callable[[], None]) -> None:
        """`failed`: a source could not say which replicas there are; what it said last counts."""
        self.of: dict[str, tuple[Replica, ...]] = {}
        """By pool."""
        self._changed = changed
        self._failed = failed
        self._followed: dict[str, tuple[ReplicasFrom, asyncio.Task[None]]] = {}
        self._looked: dict[str, asyncio.Event] = {}
        """Of each pool with a source: it was asked once."""
        self._told = asyncio.Event()
        """No source is left that has not said anything yet."""
        self._ended: set[asyncio.Task[None]] = set()

    def follow(self, fleet: FleetSettings) -> None:
        """The sources of a configuration; those that it does not change are followed on."""
        wanted = {pool.name: pool.replicas_from for pool in fleet.pools if pool.replicas_from}
        for pool, (source, task) in list(self._followed.items()):
            if wanted.get(pool) != source:
                task.cancel()
                self._ended.add(task)
                task.add_done_callback(self._ended.discard)
                del self._followed[pool]
        for pool in self.of.keys() - wanted.keys():
            del self.of[pool]
        for pool in wanted.keys() - self._followed.keys():
            self._looked[pool] = asyncio.Event()
            task = asyncio.create_task(self._follow(pool, wanted[pool]))
            self._followed[pool] = wanted[pool], task
        self._note_told()

    @property
    def silent(self) -> list[str]:
        """Pools whose source has not said anything yet."""
        return sorted(self._followed.keys() - self.of.keys())

    async def told(self) -> None:
        """Returns once every source has said which replicas there are: who does not know would take them from all."""
        await self._told.wait()

    def _note_told(self) -> None:
        if not self.silent:
            self._told.set()

    async def looked(self) -> None:
        """Returns when every source was asked once, whatever came of it."""
        for event in self._looked.values():
            await event.wait()

    async def close(self) -> None:
        tasks = {*self._ended, *(task for _, task in self._followed.values())}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, pool: str, source: ReplicasFrom) -> None:
        if source.file:
            return await self._follow_file(pool, source, Path(source.file))
        failed = partial(self._cannot_say, pool)
        follower = Follower(
            _source(source),
            lambda urls: self._use(pool, found_replicas(source, urls)),
            failed,
            source.seconds,
        )
        await follower.look()
        self._looked[pool].set()
        await follower.run()

    async def _follow_file(self, pool: str, source: ReplicasFrom, path: Path) -> None:
        read = partial(load_replicas, source)
        try:
            self._use(pool, await asyncio.to_thread(read))
        except ConfigError as error:
            self._cannot_say(pool, str(error))
        self._looked[pool].set()
        await FileWatch(path, self.of.get(pool, ()), read, partial(self._use, pool), self._failed).run()

    def _use(self, pool: str, found: tuple[Replica, ...]) -> None:
        before = {replica.name for replica in self.of.get(pool, ())}
        now = {replica.name for replica in found}
        self.of[pool] = found
        self._note_told()
        log.info(
            "pool %s: found %s, gone %s",
            pool,
            ", ".join(sorted(now - before)) or "none",
            ", ".join(sorted(before - now)) or "none",
        )
        self._changed()

    def _cannot_say(self, pool: str, problem: str) -> None:
        log.error("the replicas of pool %s cannot be told, those known stay: %s", pool, problem)
        self._failed()


def _source(source: ReplicasFrom) -> ReplicaSource:
    if source.dns:
        return Dns(source.dns)
    slices = source.endpoint_slices
    assert slices is not None, "the configuration names one"
    return EndpointSlices(
        slices.api,
        slices.namespace,
        slices.service,
        slices.port,
        slices.scheme,
        Path(slices.token_file),
        Path(slices.ca_file) if slices.api.startswith("https:") else None,
    )


def replica_specs(
    fleet: FleetSettings, found: Mapping[str, Sequence[Replica]], accesses: Mapping[str, Access]
) -> list[ReplicaSpec]:
    """Those of the lists, then those that were found: an engine that has a place already gets no second one.

    `accesses` by pool.
    """
    listed = [(pool.name, replica) for pool in fleet.pools for replica in pool.replicas]
    others = [(pool.name, replica) for pool in fleet.pools for replica in found.get(pool.name, ())]
    specs: dict[str, ReplicaSpec] = {}
    places: set[tuple[str, int | None]] = set()
    for pool, replica in listed + others:
        spec = _replica_spec(pool, replica, accesses[pool])
        whole = spec.rank is None and any(url == spec.url for url, _ in places)
        if spec.name in specs or spec.place in places or (spec.url, None) in places or whole:
            log.error("replica %s of pool %s has a place already: it is left out", replica.name, pool)
            continue
        places.add(spec.place)
        specs[spec.name] = spec
    return list(specs.values())


def _replica_spec(pool: str, replica: Replica, access: Access) -> ReplicaSpec:
    defaults = ReplicaSpec("", "", "")
    return ReplicaSpec(
        pool=pool,
        name=replica.name,
        url=replica.url,
        rank=replica.data_parallel_rank,
        num_gpu_blocks=replica.num_gpu_blocks,
        block_size=replica.block_size,
        max_model_len=replica.max_model_len,
        max_num_seqs=replica.max_num_seqs or defaults.max_num_seqs,
        prefill_tokens=replica.prefill_tokens or defaults.prefill_tokens,
        access=access,
    )


def names_by_pool(fleet: FleetSettings, specs: Iterable[ReplicaSpec]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {pool.name: [] for pool in fleet.pools}
    for spec in specs:
        names[spec.pool].append(spec.name)
    return names
