"""The results of a run, and the file results.json that holds them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from cps.data.rotations import Rotations
from cps.evaluation.confusion import Confusion
from cps.evaluation.metrics import Evaluation, Matrix, Metrics
from cps.evaluation.weight_sharing import LayerSharing
from cps.methods.closed_form_metrics import ClosedFormMetrics
from cps.network.capacity import Capacity
from cps.selection.cascade import Cascade
from cps.storage.atomic import write_json
from cps.storage.json_codec import from_json, to_json
from cps.storage.settings_codec import RENAMED_SETTINGS

RENAMED_PARAMETERS = {**Cascade.RENAMED, **Capacity.RENAMED, **Rotations.RENAMED}  # in files of version 0.1 -> since


@dataclass(frozen=True)
class Seconds:
    """How long the phases of a run took."""

    learn: float
    evaluate: float


@dataclass(frozen=True)
class MillisecondsPerImage:
    """How long one image takes on its own: in the dense network, and in each extracted subnetwork."""

    dense: float
    tasks: tuple[float, ...]


@dataclass(frozen=True)
class JointMetrics:
    """The accuracy of joint training in percent: the mean over tasks, and on each task as a matrix (1, tasks)."""

    ACC: float
    accuracy: Matrix


@dataclass(frozen=True)
class Bounds:
    """What other methods reach; None if they were not run.

    Finetuning is a lower bound, joint training an upper bound, and a closed form over fixed features, which trains
    nothing, the bar that training should clear. Early files have no `closed_form`.
    """

    finetuning: Metrics | None = None
    joint: JointMetrics | None = None
    closed_form: ClosedFormMetrics | None = None


@dataclass(frozen=True)
class DenseCost:
    """The parameters of the dense network with a head, and its floating-point operations for one image."""

    parameters: int
    operations: int


@dataclass(frozen=True)
class SubnetworkCost:
    """The weights a task uses (`density`) and all tasks so far use (`taken`), in percent, and its cost when extracted.

    Early files have no `parameters` and `operations`.
    """

    task: int
    density: float
    taken: float
    parameters: int | None = None
    operations: int | None = None


@dataclass(frozen=True, kw_only=True)
class Results:
    """Everything a run measured. Fields are the keys of results.json, in the order of the file.

    `epochs` are those of training and of retraining. `flips` is the evaluation with mirror images.
    `confusion` counts what the default selector takes single images for after the last task. Fields with a default are
    missing in files of early versions.
    """

    recipe: str
    order: int | str
    seed: int
    epochs: tuple[int, int] | None = None
    rounds: int | None = None
    precision: str | None = None
    settings: dict[str, str] | None = None
    device: str
    versions: dict[str, str]
    seconds: Seconds
    milliseconds_per_image: MillisecondsPerImage | None = None
    classes_per_task: tuple[int, ...]
    task_il: Metrics
    class_il: dict[str, dict[int, Metrics]]
    flips: Evaluation | None = None
    default_selector: str
    confusion: Confusion | None = None
    bounds: Bounds = Bounds()  # frozen, so all results can share it
    dense: DenseCost | None = None
    weights: int | None = None
    subnetworks: tuple[SubnetworkCost, ...] = ()
    layers: tuple[LayerSharing, ...] = ()
    sharing: tuple[float, ...] = ()
    fingerprints: tuple[str, ...] = ()

    @property
    def num_tasks(self) -> int:
        """The number of tasks."""
        return len(self.classes_per_task)

    @property
    def default_metrics(self) -> dict[int, Metrics]:
        """The metrics of the default selector by group size."""
        return self.class_il[self.default_selector]

    @property
    def group_sizes(self) -> list[int]:
        """The group sizes of the default selector, in the order of the file."""
        return list(self.default_metrics)

    def with_evaluation(self, evaluation: Evaluation) -> "Results":
        """Return the results with another evaluation of the same model, without bounds."""
        parts = {"task_il": evaluation.task_il, "class_il": evaluation.class_il, "confusion": evaluation.confusion}
        return replace(self, **parts, bounds=Bounds())

    def encode(self) -> dict[str, Any]:
        """Return the results as JSON data."""
        data = {"flips": {}, **to_json(self)}
        return {field.name: data[field.name] for field in fields(self) if field.name in data}

    @classmethod
    def decode(cls, data: Any) -> "Results":
        """Return the results that `encode` encoded; raise `ValueError` if an entry is missing or wrong."""
        if isinstance(data, dict) and data.get("flips") == {}:
            data = {**data, "flips": None}
        results = from_json(cls, data)
        if not results.class_il.get(results.default_selector):
            raise ValueError(f"'class_il' has no entry for the default selector '{results.default_selector}'")
        return results


def read_results(path: str | Path) -> Results:
    """Read a results.json; raise `ValueError` if there is none, or if it is damaged or something else."""
    path = Path(path)
    try:
        return Results.decode(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(f"no run at '{path}'; pass the folder of a run, or its results.json") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"'{path}' holds no results of a run: it is not valid JSON ({error})") from None
    except ValueError as error:
        raise ValueError(f"'{path}' holds no results of a run: {error}") from None


def write_results(path: str | Path, results: Results) -> None:
    """Write a results.json; a previous file stays intact until the new one is complete on disk."""
    write_json(Path(path), results.encode())


def upgrade_settings_text(settings: Mapping[str, str]) -> dict[str, str]:
    """Return printed settings with the names that files of early versions use replaced by the present ones."""
    pattern = rf"\b({'|'.join(RENAMED_PARAMETERS)})(?==)"
    return {
        RENAMED_SETTINGS.get(name, name): re.sub(pattern, lambda match: RENAMED_PARAMETERS[match[1]], text)
        for name, text in settings.items()
    }
