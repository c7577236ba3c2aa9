"""Send losses and accuracies to a logger: of lightning-fabric, wandb, TensorBoard or the like."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from cps.evaluation.metrics import Metrics, history
from cps.training.progress import Progress

Log = Callable[[Mapping[str, float], str, int], None]  # metrics, what the steps count, and the step
KINDS = ("csv", "tensorboard", "wandb")
EPOCH, TASK = "epoch", "task"  # what steps count


class Measured(Protocol):
    """An evaluation, or the results of a run."""

    @property
    def task_il(self) -> Metrics:
        """The accuracy with the task given."""
        ...

    @property
    def class_il(self) -> Mapping[str, Mapping[int, Metrics]]:
        """The accuracy with the task found, by selector and group size."""
        ...


class Tracker:
    """Sends losses and accuracies to a logger: pass it as `on_epoch`, and call `log_evaluation` at the end.

    >>> import cps
    >>> class Printer:
    ...     def log(self, metrics):
    ...         print(metrics)
    >>> tracker = cps.Tracker(Printer())
    >>> tracker(cps.Progress(task=1, phase=0, epoch=2, lengths=(5, 3), loss=0.5))
    {'loss/training': 0.5, 'epoch': 10}

    The logger has `log_metrics(metrics, step)`, as those of lightning-fabric and mlflow, `log(metrics)`, as a run of
    wandb, or `add_scalar(name, value, step)`, as a `SummaryWriter` of TensorBoard. A loss has as its step the number of
    epochs of all tasks so far, an accuracy the number of tasks; `log(metrics)` gets it as one of the metrics.
    """

    def __init__(self, logger: Any):
        self._logger, self._log = logger, _log_of(logger)

    def __call__(self, progress: Progress) -> None:
        """Log the loss of an epoch."""
        self.log_loss(progress.phase_name, progress.loss, progress.task * progress.total + progress.done)

    def log_loss(self, phase: str, loss: float, step: int) -> None:
        """Log the loss of a phase such as "training"; all rounds of retraining are one curve."""
        self._log({f"loss/{phase.partition(',')[0]}": loss}, EPOCH, step)

    def log_evaluation(self, evaluation: Measured) -> None:
        """Log the mean accuracy over the tasks after each task, by selector and group size, and save the log."""
        curves = {"accuracy/task known": history(evaluation.task_il.accuracy)}
        for selector, by_size in evaluation.class_il.items():
            curves |= {f"accuracy/{selector}/{size}": history(each.accuracy) for size, each in by_size.items()}
        for index, values in enumerate(zip(*curves.values(), strict=True)):
            self._log(dict(zip(curves, values, strict=True)), TASK, index + 1)
        self._save()

    def _save(self) -> None:
        """Let a logger of lightning-fabric or a `SummaryWriter` write what it has not written yet."""
        for method, save in (("log_metrics", "save"), ("add_scalar", "flush")):
            if hasattr(self._logger, method) and hasattr(self._logger, save):
                getattr(self._logger, save)()


def open_tracker(kind: str, folder: Path, name: str) -> Tracker:
    """Return a tracker that writes to a folder as CSV files or for TensorBoard, or to a wandb run of that name."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of log '{kind}'; choose from: {', '.join(KINDS)}")
    try:
        if kind == "csv":
            from lightning_fabric.loggers.csv_logs import CSVLogger

            return Tracker(CSVLogger(folder, name="log", flush_logs_every_n_steps=1))
        if kind == "tensorboard":
            from lightning_fabric.loggers.tensorboard import TensorBoardLogger

            return Tracker(TensorBoardLogger(folder, name="tensorboard"))
        import wandb  # pyright: ignore[reportMissingImports]

        return Tracker(wandb.init(project="cps", name=name, dir=folder))
    except ModuleNotFoundError as error:
        raise ValueError(f"a log for {kind} needs a package that is not installed; run: pip install {kind}") from error


def _log_of(logger: Any) -> Log:
    """Return a function that logs metrics; raise `TypeError` for an object that cannot."""
    if callable(getattr(logger, "log_metrics", None)):
        return lambda metrics, _, step: logger.log_metrics(dict(metrics), step=step)
    if callable(getattr(logger, "add_scalar", None)):
        return lambda metrics, _, step: _add_scalars(logger, metrics, step)
    if callable(getattr(logger, "log", None)) and not isinstance(logger, logging.Logger):
        return lambda metrics, counted, step: logger.log({**metrics, counted: step})
    raise TypeError(f"a logger must have log_metrics, log or add_scalar, as those of lightning-fabric, got {logger!r}")


def _add_scalars(writer: Any, metrics: Mapping[str, float], step: int) -> None:
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)
