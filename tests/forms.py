"""Forms with files and sounds, as clients of audio routes send them."""

import io
import wave

BOUNDARY = "frontier-7f3a"
CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"
Field = tuple[str, str | bytes]


def form(*fields: Field, boundary: str = BOUNDARY, end: bytes = b"--\r\n") -> bytes:
    """Text is a field, bytes are a file of the name `a.wav`."""
    parts = []
    for name, value in fields:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"'
        if isinstance(value, bytes):
            head += '; filename="a.wav"\r\nContent-Type: audio/wav'
        parts.append(
            f"{head}\r\n\r\n".encode() + (value if isinstance(value, bytes) else value.encode()) + b"\r\n"
        )
    return b"".join(parts) + f"--{boundary}".encode() + end


def wav(seconds: float, *, rate: int = 8000, width: int = 1, channels: int = 1) -> bytes:
    """Silence of that length."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(channels)
        sound.setsampwidth(width)
        sound.setframerate(rate)
        sound.writeframes(bytes(int(seconds * rate) * width * channels))
    return file.getvalue()
