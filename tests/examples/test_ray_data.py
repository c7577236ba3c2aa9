"""Prediction and closed forms with Ray Data, on two local workers."""

import numpy as np
import pytest

import cps

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
ray = pytest.importorskip("ray", reason='needs Ray: pip install "ray[data]"')


@pytest.fixture(scope="module")
def example(load_example):
    module = load_example("ray_data")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield module
    ray.shutdown()


def test_two_workers_predict_as_one_process(example, tmp_path):
    images, labels = cps.read_digits()[0]
    few = cps.Training(2, cps.Adam(3e-3), batch_size=32)
    learner = cps.Learner(cps.Architecture("small", channels=1), rounds=1, train=few, retrain=few)
    for task in cps.split_by_class((images[:400], labels[:400]), sizes=5):
        learner.learn(task)
    learner.save(tmp_path / "digits.cps")
    found, rate = example.predict(images[400:], tmp_path / "digits.cps")
    assert found == list(learner.predict(images[400:]))
    assert rate > 0


def test_a_closed_form_learned_in_two_parts_is_that_of_all_images(example):
    (images, labels), (new, truth) = cps.read_digits()
    method = example.learn([list(cps.split_by_class((images[at::2], labels[at::2]), sizes=2)) for at in range(2)])
    whole = cps.ClosedForm()
    for task in cps.split_by_class((images, labels), sizes=2):
        whole.learn(task)
    assert method.predict(new) == whole.predict(new)
    assert np.mean(np.equal(method.predict(new), truth)) > 0.95
