"""The server that is further away: every byte arrives, and each request takes that much longer."""

import socket
import threading
import time

from benchmarks.peers.delaying import open_delay

DELAY_S = 0.05


def test_each_request_takes_longer_and_all_bytes_arrive_in_order() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=echo, args=(server,), daemon=True)
        thread.start()
        with open_delay(f"http://127.0.0.1:{server.getsockname()[1]}", DELAY_S) as url:
            address = ("127.0.0.1", int(url.rpartition(":")[2]))
            with socket.create_connection(address, timeout=10) as client:
                took_s = []
                for _ in range(3):
                    began_s = time.monotonic()
                    client.sendall(b"request")
                    assert client.recv(100) == b"request"
                    took_s.append(time.monotonic() - began_s)
                assert min(took_s) > 0.9 * DELAY_S
                large = bytes(range(256)) * 4096
                sender = threading.Thread(target=client.sendall, args=(large,))
                sender.start()
                with client.makefile("rb") as answer:
                    assert answer.read(len(large)) == large
                sender.join()
        thread.join(10)
        assert not thread.is_alive()


def echo(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)
