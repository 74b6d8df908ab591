"""The mock's engine itself behind the interface of `counted`: for prompts that share what the prefix cache keeps."""

from collections.abc import Callable

from benchmarks.experiment.counted import Served
from gateway.mock.engine import Engine, EngineConfig, Request, Sizes, Step
from gateway.mock.pool import EMPTY, Content


class Mocked:
    def __init__(self, config: EngineConfig, told: Callable[[Served, int], int]) -> None:
        self.config = config
        self.engine = Engine(config)
        self._told = told
        self._step = Step(1)
        self._served: dict[str, Served] = {}
        self._arrivals = 0

    @property
    def used(self) -> int:
        return self.engine.blocks_used

    @property
    def preemptions(self) -> int:
        return self.engine.preemptions

    @property
    def recomputed_tokens(self) -> int:
        return self.engine.recomputed_tokens

    @property
    def generated_tokens(self) -> int:
        return self.engine.generation_tokens

    @property
    def waits(self) -> int:
        return len(self.engine.waiting)

    def add(self, served: Served, prompt: Content = EMPTY) -> None:
        self._arrivals += 1
        name = str(self._arrivals)
        self._served[name] = served
        self.engine.add(Request(name, (Sizes(served.prompt_tokens, served.output_tokens, prompt),)))

    def schedule(self) -> float:
        self._step = self.engine.schedule()
        return 0.0 if self._step.idle else self._step.duration_ms

    def complete(self) -> None:
        self.engine.complete(self._step)
        for victim in self._step.preempted:
            self._served[victim.request_id].preemptions += 1
        for token in self._step.tokens:
            served = self._served[token.request_id]
            served.outputs = token.number
            if token.last:
                del self._served[token.request_id]
                self._told(served, token.number)
            elif token.number >= served.mark:
                served.mark = self._told(served, token.number)
