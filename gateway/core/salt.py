"""A key's own part of an engine's prefix cache: what its prompts left there is found by no call of another key.

Who shares a cache with strangers can tell from the time of a first token what they have asked (vLLM's `cache_salt`).
"""

import hashlib

from gateway.core.body import Edit, append_member, read_members

FIELD = "cache_salt"


def salt_edit(body: bytes, salt: str) -> Edit | None:
    """Writes the key's salt into a body that was read before; a client's own one goes into it.

    None where the client's is none that an engine takes: it refuses the call.
    """
    member = read_members(body).get(FIELD)
    given = b"" if member is None or member.is_null else bytes(member.raw)
    if given and (given[:1] != b'"' or given == b'""'):
        return None
    value = b'"%s"' % hashlib.sha256(salt.encode() + b"\0" + given).hexdigest().encode()
    return append_member(body, FIELD, value) if member is None else (member.start, member.end, value)
