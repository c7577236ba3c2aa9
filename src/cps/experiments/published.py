"""Numbers that the paper published, shown beside our results.

The paper's ImageNet tables are top-5 accuracies inside the selected task (10 classes a task for ImageNet-100). Its
numbers are those of the epochs that were best on the test images, and its groups include the mirror images. See
docs/reproducing.md.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PublishedResult:
    """Numbers of one experiment in percent.

    `history` is the accuracy after each task by group size; `task_il` is the same with the task given.
    """

    measure: str
    history: dict[int, list[float]] = field(default_factory=dict)
    task_il: list[float] = field(default_factory=list)
    AIA: float | None = None
    AIA_std: float | None = None
    BWT: float | None = None


PUBLISHED = {
    "imagenet100-adam": PublishedResult(
        measure="top-5 inside the selected task",
        history={
            20: [98.20, 98.80, 98.67, 98.50, 98.48, 98.60, 98.63, 98.63, 98.50, 98.38],
            10: [98.20, 98.80, 98.67, 98.41, 98.25, 98.15, 97.90, 97.94, 97.23, 97.00],
            5: [98.20, 98.02, 97.03, 95.86, 94.23, 92.51, 92.08, 92.12, 90.53, 89.39],
        },
        task_il=[98.20, 98.80, 98.67, 98.50, 98.48, 98.60, 98.63, 98.63, 98.50, 98.38],
    ),
    "imagenet100": PublishedResult(
        measure="top-5 inside the selected task",
        history={20: [99.00, 98.90, 98.67, 98.60, 97.90, 98.09, 98.05, 98.25, 94.20, 92.62]},
        task_il=[99.00, 98.90, 98.67, 98.60, 98.20, 98.33, 98.26, 98.43, 98.20, 98.06],
    ),
    "imagenet1000": PublishedResult(
        measure="top-5 inside the selected task; the AIA is top-1",
        history={
            50: [94.38, 94.96, 94.52, 94.42, 94.40, 94.45, 94.40, 94.16, 93.88, 93.77],
            20: [94.38, 94.96, 94.52, 94.42, 94.40, 94.40, 94.34, 94.12, 93.77, 93.66],
            10: [94.38, 94.96, 94.42, 94.09, 93.91, 93.70, 93.40, 92.92, 92.19, 91.97],
            5: [94.38, 94.31, 92.74, 91.53, 90.41, 89.24, 88.07, 86.59, 84.82, 83.92],
        },
        task_il=[94.38, 94.96, 94.52, 94.42, 94.40, 94.45, 94.40, 94.16, 93.88, 93.77],
        AIA=79.08,
    ),
    "cifar100-b50": PublishedResult(measure="signature, groups of 60", AIA=64.97, AIA_std=4.23, BWT=11.68),
    "cifar100-b50-frozen": PublishedResult(measure="signature, groups of 60", AIA=70.55, AIA_std=5.05, BWT=4.90),
}
