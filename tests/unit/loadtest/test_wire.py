"""One connection of the load generator, fed by hand."""

from unittest.mock import Mock

from gateway.loadtest.wire import HEAD_BYTES_MAX, Connection


def test_a_head_without_end_is_lost() -> None:
    transport, reader = Mock(**{"is_closing.return_value": False}), Mock()
    connection = Connection(Mock())
    connection.connection_made(transport)
    connection.send(b"", reader)
    connection.data_received(b"HTTP/1.1 200 OK\r\nx: ")
    for _ in range(HEAD_BYTES_MAX // 65_536 + 1):
        connection.data_received(b"y" * 65_536)
    assert "too long" in str(reader.on_lost.call_args[0][0])
    transport.close.assert_called()
