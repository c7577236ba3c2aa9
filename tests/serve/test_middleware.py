"""The middleware: unknown hosts, and too large, too slow or too many requests are rejected."""

import socket

import httpx
from served import image_file, post_images, serve, wait_for_health

from cps.serve import middleware
from cps.serve.middleware import Limits


def start_request(address):
    """Return a connection that has sent a part of a request."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = f"POST /predict HTTP/1.1\r\nHost: {host}\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 4\r\n\r\n"
    connection.sendall(head.encode() + b"--")
    return connection


def test_a_local_server_rejects_other_host_names(address):
    reply = httpx.get(f"{address}/model", headers={"host": "evil.example"})
    assert reply.status_code == 400
    assert "Unknown host name 'evil.example'" in reply.json()["error"]
    assert httpx.get(f"{address}/model", headers={"host": "localhost:9"}).status_code == 200


def test_a_chunked_body_without_content_length_is_limited_too(address):
    def chunks():
        for _ in range(64):
            yield bytes(2**16)

    reply = httpx.post(
        f"{address}/predict", content=chunks(), headers={"content-type": "multipart/form-data; boundary=x"}
    )
    assert reply.status_code == 413
    assert "larger than 1 MiB" in reply.json()["error"]


def test_too_many_concurrent_requests_get_503_and_retry_after(model):
    with serve(model, Limits(concurrent_requests=2, seconds=20)) as address:
        waiting = [start_request(address) for _ in range(2)]
        wait_for_health(address, lambda health: health["at_work"] == 2)
        reply = post_images(address, ("x.png", image_file(0)))
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        assert "try again soon" in reply.json()["error"]
        for connection in waiting:
            connection.close()
        wait_for_health(address, lambda health: health["at_work"] == 0)
        assert post_images(address, ("x.png", image_file(0))).status_code == 200


def test_a_body_that_does_not_arrive_in_time_gets_408(model, monkeypatch):
    monkeypatch.setattr(middleware, "DRAIN_SECONDS", 0.2)
    with serve(model, Limits(seconds=0.2)) as address, start_request(address) as connection:
        reply = connection.recv(4096)
        assert b" 408 " in reply.splitlines()[0]
