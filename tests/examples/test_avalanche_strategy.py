"""cps with Avalanche: its experiences as tasks, and its metrics of cps as a strategy."""

import pytest
import torch

import cps

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # Avalanche warns of what it lacks
pytest.importorskip("avalanche", reason="needs Avalanche: pip install avalanche-lib")


@pytest.fixture(scope="module")
def example(load_example):
    return load_example("avalanche_strategy")


@pytest.fixture(scope="module")
def scenario(example):
    from avalanche.benchmarks import nc_benchmark

    train, test = (example.Digits(images[:300], labels[:300]) for images, labels in cps.read_digits())
    return nc_benchmark(train, test, n_experiences=5, task_labels=False, seed=0)


def test_an_experience_is_the_task_of_its_classes(example, scenario):
    for experience in scenario.train_stream:
        task = example.task_of(experience, scenario.test_stream[experience.current_experience])
        assert set(task.classes) == set(experience.classes_in_this_experience)
        assert len(task.train) == len(experience.dataset)
        image, label = task.train[0]
        assert torch.equal(image, experience.dataset[0][0])
        assert label == experience.dataset[0][1]
        assert set(task.test.targets) == set(task.classes)


def test_the_metrics_of_avalanche_are_those_of_the_learner(example, scenario):
    torch.manual_seed(0)
    strategy = example.make_strategy(3)
    shown = []
    for index, experience in enumerate(scenario.train_stream[:2]):
        strategy.train(experience)
        shown.append(strategy.eval(scenario.test_stream[: index + 1]))
    right = {}
    for experience in scenario.test_stream[:2]:
        images = torch.stack([experience.dataset[index][0] for index in range(len(experience.dataset))])
        right[experience.current_experience] = strategy.learner.predict(images) == experience.dataset.targets
    for index, hits in right.items():
        name = f"Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp{index:03d}"
        assert shown[-1][name] == pytest.approx(hits.mean())
    everything = sum(hits.sum() for hits in right.values()) / sum(map(len, right.values()))
    assert shown[-1]["Top1_Acc_Stream/eval_phase/test_stream/Task000"] == pytest.approx(everything)
    assert everything > 0.5  # it has learned something
    first = "Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp000"
    assert shown[-1]["StreamForgetting/eval_phase/test_stream"] == pytest.approx(shown[0][first] - shown[-1][first])
