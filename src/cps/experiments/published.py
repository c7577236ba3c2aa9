"""What the paper published, to be shown beside our results.

Its ImageNet tables are top-5 inside the selected task, of ten classes for ImageNet-100; its numbers are of the epochs
that were best on the test images, and groups were doubled with mirror images. See docs/reproducing.md.
"""

from typing import Any

PUBLISHED: dict[str, dict[str, Any]] = {
    "imagenet100-adam": {
        "what": "top-5 inside the selected task",
        "history": {
            "20": [98.20, 98.80, 98.67, 98.50, 98.48, 98.60, 98.63, 98.63, 98.50, 98.38],
            "10": [98.20, 98.80, 98.67, 98.41, 98.25, 98.15, 97.90, 97.94, 97.23, 97.00],
            "5": [98.20, 98.02, 97.03, 95.86, 94.23, 92.51, 92.08, 92.12, 90.53, 89.39],
            "task-IL": [98.20, 98.80, 98.67, 98.50, 98.48, 98.60, 98.63, 98.63, 98.50, 98.38],
        },
    },
    "imagenet100": {
        "what": "top-5 inside the selected task",
        "history": {
            "20": [99.00, 98.90, 98.67, 98.60, 97.90, 98.09, 98.05, 98.25, 94.20, 92.62],
            "task-IL": [99.00, 98.90, 98.67, 98.60, 98.20, 98.33, 98.26, 98.43, 98.20, 98.06],
        },
    },
    "imagenet1000": {
        "what": "top-5 inside the selected task; the AIA is top-1",
        "AIA": 79.08,
        "history": {
            "50": [94.38, 94.96, 94.52, 94.42, 94.40, 94.45, 94.40, 94.16, 93.88, 93.77],
            "20": [94.38, 94.96, 94.52, 94.42, 94.40, 94.40, 94.34, 94.12, 93.77, 93.66],
            "10": [94.38, 94.96, 94.42, 94.09, 93.91, 93.70, 93.40, 92.92, 92.19, 91.97],
            "5": [94.38, 94.31, 92.74, 91.53, 90.41, 89.24, 88.07, 86.59, 84.82, 83.92],
            "task-IL": [94.38, 94.96, 94.52, 94.42, 94.40, 94.45, 94.40, 94.16, 93.88, 93.77],
        },
    },
    "cifar100-b50": {"what": "signature, groups of 60", "AIA": 64.97, "AIA spread": 4.23, "BWT": 11.68},
    "cifar100-b50-frozen": {"what": "signature, groups of 60", "AIA": 70.55, "AIA spread": 5.05, "BWT": 4.90},
}
