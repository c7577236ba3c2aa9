"""Metrics of the server: what is counted, in the text format that Prometheus reads."""

import re

import httpx
import pytest
from served import image_file, post_images, serve

import cps

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="[^"\\\n]*",?)+)\})? (-?[0-9.e+-]+)')


def read_metrics(address):
    """Return the numbers by name and labels; every line must be a sample of a metric with a help and a type."""
    reply = httpx.get(f"{address}/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert reply.text.endswith("\n")
    described, numbers = {}, {}
    for line in reply.text.splitlines():
        if line.startswith("# "):
            described.setdefault(line.split()[2], []).append(line.split()[1])
            continue
        name, labels, value = SAMPLE.fullmatch(line).groups()
        family = re.sub(r"^(cps_predict_seconds)_(bucket|sum|count)$", r"\1", name)
        assert described[family] == ["HELP", "TYPE"]
        numbers[f"{name}{{{labels}}}" if labels else name] = float(value)
    return numbers


@pytest.fixture
def fresh(model):
    """Return the address of a server that has had no requests."""
    with serve(model) as address:
        yield address


def test_requests_and_images_are_counted_by_what_became_of_them(fresh, learner):
    contents = [image_file(seed) for seed in range(3)]
    found = post_images(fresh, *(("x", each) for each in (*contents, b"no image"))).json()["images"]
    assert post_images(fresh, ("x", b"no image")).status_code == 415
    httpx.get(f"{fresh}/health")
    httpx.get(f"{fresh}/metrics")
    numbers = read_metrics(fresh)
    assert numbers['cps_requests_total{method="POST",path="/predict",status="200"}'] == 1
    assert numbers['cps_requests_total{method="POST",path="/predict",status="415"}'] == 1
    assert numbers['cps_requests_total{method="GET",path="/health",status="200"}'] == 1
    assert numbers['cps_requests_total{method="GET",path="/metrics",status="200"}'] == 1
    assert numbers['cps_images_total{task="unreadable"}'] == 2
    outcomes = ["unknown" if image["unknown"] else str(image["task"]) for image in found[:3]]
    for outcome in outcomes:
        assert numbers[f'cps_images_total{{task="{outcome}"}}'] == outcomes.count(outcome)
    assert numbers['cps_predict_seconds_bucket{le="+Inf"}'] == numbers["cps_predict_seconds_count"] == 2
    buckets = [value for name, value in numbers.items() if name.startswith("cps_predict_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert 0 < numbers["cps_predict_seconds_sum"] < 60
    assert numbers["cps_requests_active"] == 0


def test_the_model_in_use_is_described(fresh, learner):
    numbers = read_metrics(fresh)
    assert numbers[f'cps_info{{version="{cps.__version__}"}}'] == 1
    assert numbers["cps_model_tasks"] == 2
    assert numbers["cps_model_classes"] == sum(len(names) for names in learner.classes)
    assert numbers["cps_model_is_old"] == 0
    assert numbers["cps_model_loaded_timestamp_seconds"] > 1.7e9


def test_a_client_cannot_add_labels(fresh):
    for path in ("/secret", '/x"} 1', "/predict/y"):
        httpx.get(f"{fresh}{path}")
    httpx.request("BREW", fresh)
    numbers = read_metrics(fresh)
    assert numbers['cps_requests_total{method="GET",path="other",status="404"}'] == 3
    assert numbers['cps_requests_total{method="other",path="/",status="405"}'] == 1


def test_rejected_requests_are_counted_and_other_hosts_are_rejected(model):
    with serve(model, hosts={"127.0.0.1"}) as address:
        assert httpx.get(f"{address}/metrics", headers={"host": "attacker.example"}).status_code == 400
        numbers = read_metrics(address)
    assert numbers['cps_requests_total{method="GET",path="/metrics",status="400"}'] == 1
