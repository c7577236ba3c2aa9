"""Use cps with Avalanche, both ways: its experiences as tasks, and cps as one of its strategies with its metrics.

It needs Avalanche: pip install avalanche-lib
"""

import sys
from typing import Any

import torch
from avalanche.benchmarks import nc_benchmark  # pyright: ignore[reportMissingImports]
from avalanche.evaluation.metrics import accuracy_metrics, forgetting_metrics  # pyright: ignore[reportMissingImports]
from avalanche.logging import InteractiveLogger  # pyright: ignore[reportMissingImports]
from avalanche.training.plugins import EvaluationPlugin  # pyright: ignore[reportMissingImports]
from avalanche.training.templates import SupervisedTemplate  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from torch.utils.data import Dataset

import cps


class Pairs(Dataset):
    """The examples of an experience as (image, label), without Avalanche's task label."""

    def __init__(self, experience: Any):
        self.examples = experience.dataset
        self.targets = list(map(int, experience.dataset.targets))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label, *_ = self.examples[index]
        return image, int(label)


def task_of(experience: Any, test: Any = None) -> cps.Task:
    """Return an experience as a task; `test` is the experience of the test stream with the same classes."""
    classes = sorted(map(int, experience.classes_in_this_experience))
    return cps.Task(classes, train=Pairs(experience), test=None if test is None else Pairs(test))


class LearnerModule(nn.Module):
    """What a learner predicts: images -> log probabilities of the classes 0 to N - 1, minus infinity if not learned."""

    def __init__(self, learner: cps.Learner, num_classes: int):
        super().__init__()
        self.learner, self.num_classes = learner, num_classes

    def forward(self, images: Tensor) -> Tensor:
        if not self.learner.classes:
            return images.new_zeros(len(images), self.num_classes)
        scores = images.new_full((len(images), self.num_classes), -torch.inf)
        prediction = self.learner.predict(images)
        scores[:, [int(name) for name in prediction.all_classes]] = prediction.scores.to(scores)
        return scores


class ContinualPruneAndSelect(SupervisedTemplate):
    """cps as a strategy: `train` learns each experience as a task, `eval` and all metrics are those of Avalanche."""

    def __init__(self, *, learner: cps.Learner, num_classes: int, evaluator: Any):
        super().__init__(
            model=LearnerModule(learner, num_classes), optimizer=None, criterion=nn.CrossEntropyLoss(),
            eval_mb_size=256, evaluator=evaluator,
        )  # fmt: skip
        self.learner = learner

    def _train_exp(self, experience: Any, eval_streams: Any = None, **settings: Any) -> None:
        self.learner.learn(task_of(experience))

    def check_model_and_optimizer(self, **settings: Any) -> None:
        """Do nothing: the learner has its own optimizer and grows by itself."""

    def model_adaptation(self, model: Any = None) -> Any:
        """Return the model: its outputs do not depend on the experience."""
        return self.model


class Digits(Dataset):
    """Handwritten digits as Avalanche reads them: pairs, and their labels in `targets`."""

    def __init__(self, images: Any, labels: Any):
        self.images, self.targets = torch.from_numpy(images), labels.tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.targets[index]


def make_strategy(epochs: int, *, loggers: Any = ()) -> ContinualPruneAndSelect:
    """Return the strategy for ten digits, with the accuracy and the forgetting of Avalanche."""
    training = cps.Training(epochs, cps.Adam(3e-3), cps.Cosine(), batch_size=32)
    learner = cps.Learner(cps.SmallConvNet(1), pruner=cps.NNrelief(0.7), rounds=1, train=training, retrain=training)
    metrics = accuracy_metrics(experience=True, stream=True), forgetting_metrics(stream=True)
    evaluator = EvaluationPlugin(*metrics, loggers=list(loggers))
    return ContinualPruneAndSelect(learner=learner, num_classes=10, evaluator=evaluator)


def main() -> None:
    """Learn five experiences of two digits, and evaluate after each."""
    train, test = (Digits(*part) for part in cps.read_digits())
    benchmark = nc_benchmark(train, test, n_experiences=5, task_labels=False, seed=0)
    strategy = make_strategy(2 if "--quick" in sys.argv else 10, loggers=[InteractiveLogger()])
    for index, experience in enumerate(benchmark.train_stream):
        strategy.train(experience)
        strategy.eval(benchmark.test_stream[: index + 1])

    # The learner is the same as without Avalanche, so everything else of cps works, too.
    tasks = [task_of(*pair) for pair in zip(benchmark.train_stream, benchmark.test_stream, strict=True)]
    fusion = cps.evaluate(strategy.learner, cps.Scenario(tuple(tasks), "given"), group_sizes=(1, 20)).class_il["Fusion"]
    print(f"cps.evaluate: one image {fusion[1].ACC:.1f}, groups of 20 {fusion[20].ACC:.1f}")


if __name__ == "__main__":
    main()
