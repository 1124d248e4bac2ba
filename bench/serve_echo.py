"""Answers every request at once with the same row: what the client and HTTP alone take.

Usage: python bench/serve_echo.py PORT
"""

import socket
import sys
import threading

ROW = b'{"job":"echo","top":[' + b",".join([b'{"label":"a class","score":0.125}'] * 5) + b"]}"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(ROW), ROW)
READ = 1 << 18


def serve(client):
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    got = b""
    while True:
        while b"\r\n\r\n" not in got:
            if not (read := client.recv(READ)):
                return
            got += read
        head, _, body = got.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        left = next(int(line[16:]) for line in lines if line.startswith(b"content-length: ")) - len(body)
        while left > 0:
            if not (read := client.recv(READ)):
                return
            left -= len(read)
        client.sendall(ANSWER)
        got = b""  # this client sends no request before the answer


def main():
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
        while True:
            client, _ = server.accept()
            threading.Thread(target=serve, args=(client,), daemon=True).start()


main()
