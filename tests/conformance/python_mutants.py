"""Planted faults of the Python around the ledger: file, text, what it becomes, and the tests that have to see it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PythonMutant:
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


PYTHON_MUTANTS: dict[str, PythonMutant] = {
    "null block forgotten (limit)": PythonMutant(
        "gateway/upstream/engines.py",
        "math.floor((num_gpu_blocks - 1) * ",
        "math.floor(num_gpu_blocks * ",
        ("tests/unit/test_engines.py",),
    ),
    "null block forgotten (largest call)": PythonMutant(
        "gateway/upstream/engines.py",
        "usable = shape.num_gpu_blocks - 1",
        "usable = shape.num_gpu_blocks",
        ("tests/unit/test_engines.py",),
    ),
    "n ignored": PythonMutant(
        "gateway/core/blocks.py",
        "return per_prompt * sum(each)",
        "return sum(each)",
        ("tests/unit/test_blocks.py",),
    ),
    "one token too little per sequence": PythonMutant(
        "gateway/core/blocks.py",
        "max_model_len) - 1 + speculative_tokens",
        "max_model_len) - 2 + speculative_tokens",
        ("tests/unit/test_blocks.py",),
    ),
    "prefill part never ended (gateway)": PythonMutant(
        "gateway/flow.py",
        "        reservation.first_token()\n",
        "        pass\n",
        ("tests/flow/test_prefill.py",),
    ),
}
