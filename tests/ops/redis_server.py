"""The store of the tests as a setting says: another server program, and TLS on the ledger's way to it.

KVGATE_TEST_STORE=redis-server    a program in PATH, in the place of the server of the wheel
KVGATE_TEST_STORE_TLS=1           the ledger speaks TLS to it; tests that look into the store do not
"""

import atexit
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gateway.ledger import connection, embedded
from gateway.ledger.address import Address, Server, parse
from tests.processes import free_port

HOST = "localhost"
"""The name in the certificate; 127.0.0.1 is not in it."""


@dataclass(frozen=True, slots=True)
class Certificates:
    ca_file: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """A CA of its own, and a certificate for HOST; by the program `openssl`."""
    found = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    ca_key, request, names = folder / "ca.key", folder / "server.csr", folder / "names"
    names.write_text(f"subjectAltName=DNS:{HOST}\n")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    _openssl("req", "-x509", *new_key, "-subj", "/CN=tests", "-keyout", ca_key, "-out", found.ca_file)
    _openssl("req", *new_key[:-2], "-subj", f"/CN={HOST}", "-keyout", found.key, "-out", request)
    _openssl(
        "x509", "-req", "-in", request, "-CA", found.ca_file, "-CAkey", ca_key, "-CAcreateserial",
        "-days", "2", "-extfile", names, "-out", found.certificate,
    )  # fmt: skip
    return found


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def tls_options(port: int, found: Certificates) -> tuple[str, ...]:
    return (
        "--tls-port", str(port), "--tls-cert-file", str(found.certificate), "--tls-key-file", str(found.key),
        "--tls-ca-cert-file", str(found.ca_file), "--tls-auth-clients", "no",
    )  # fmt: skip


def apply(environ: Mapping[str, str]) -> str:
    """Make it so for this process; says what the store is."""
    program = environ.get("KVGATE_TEST_STORE")
    if not program:
        return "the store of the wheel"
    found = shutil.which(program)
    assert found, f"KVGATE_TEST_STORE: there is no {program}"
    embedded.find_server = lambda: Path(found)
    if not environ.get("KVGATE_TEST_STORE_TLS"):
        return found
    _speak_tls()
    return f"{found}, by TLS"


def _speak_tls() -> None:
    """Every store gets a TLS port beside its socket, and the ledger goes there when it is told the socket."""
    ports: dict[str, int] = {}
    plain: Callable[[embedded.EmbeddedStore], list[str]] = embedded.EmbeddedStore._command

    def command(store: embedded.EmbeddedStore) -> list[str]:
        port = ports.setdefault(str(store.socket), free_port())
        return [*plain(store), *tls_options(port, _certificates())]

    def parse_to_tls(url: str) -> Address:
        address = parse(url)
        if port := ports.get(address.servers[0].path):
            return Address(
                address.kind, (Server(HOST, port),), tls=True, ca_file=str(_certificates().ca_file)
            )
        return address

    embedded.EmbeddedStore._command = command  # type: ignore[method-assign]
    connection.parse = parse_to_tls


@cache
def _certificates() -> Certificates:
    """For as long as this process lives."""
    folder = tempfile.TemporaryDirectory(prefix="kvgate-test-")
    atexit.register(folder.cleanup)
    return make_certificates(Path(folder.name))
