"""Numbers that others published for the methods of comparisons, with their source and protocol.

Protocols differ in network, memory, augmentation and class order, so differences below three points mean nothing. Only
numbers that were read where `source` says are here; `reading` says how. An AIA weighs all images equally.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

READ, FIGURE, SECOND_HAND = "read", "off a figure, ± 0.5", "second-hand"

DYTOX = "table of DyTox (Douillard et al., CVPR 2022)"
CPS_PAPER = "table of CP&S (Dekhovich et al., 2023)"
DER_CURVES = "curves in the repository of DER (Yan et al., CVPR 2021)"
FOSTER_README = "README of FOSTER (Wang et al., ECCV 2022)"
ITAML_CURVES = "curve in iTAML's notebook"
SOME_FIGURE, NOTE = "a published figure", "a public note on the paper"
NETWORK_18 = "ResNet-18, 2,000 images"
THIRD = "ResNet-18(1/3), 2,000 images"
PER_TASK = "a ResNet-18 per task, 2,000 images, not pruned"
IMAGENET_18 = "ResNet-18, 20,000 images"
NETWORK_32 = "ResNet-32, 2,000 images"
B50_32 = "ResNet-32, 20 images per class"
AUTOAUGMENT = "ResNet-32, 2,000 images, AutoAugment and Cutout"
TEN, TWENTY, FIVE, B50 = (10,) * 10, (5,) * 20, (20,) * 5, (50, 10, 10, 10, 10, 10)
IMAGENET100, IMAGENET1000 = (10,) * 10, (100,) * 10


@dataclass(frozen=True)
class PublishedNumber:
    """A method on a data set in tasks of some sizes, in percent.

    `method` is its name in comparisons. `AIA` is the mean accuracy after each task, `last` the accuracy after the last
    one, `known` that with the task given. `group_size` images share a task.
    """

    method: str
    name: str
    data: str
    sizes: tuple[int, ...]
    protocol: str
    source: str
    AIA: float | None = None
    last: float | None = None
    known: float | None = None
    group_size: int = 1
    measure: str = "top-1"
    reading: str = READ


def _cifar(
    method: str, name: str, sizes: tuple[int, ...], protocol: str, source: str, **values: Any
) -> PublishedNumber:
    return PublishedNumber(method, name, "cifar100", sizes, protocol, source, **values)


def published_numbers(recipe: str, sizes: Sequence[int]) -> list[PublishedNumber]:
    """Return what was published for the data of a recipe in tasks of these sizes."""
    data, _, _ = recipe.partition("-")
    return [each for each in NUMBERS if each.data == data and each.sizes == tuple(sizes)]


NUMBERS = (
    _cifar("finetuning", "finetuning", TEN, "ResNet-32", NOTE, last=8.91, reading=SECOND_HAND),
    _cifar("joint", "joint training", TEN, "ResNet-18", DYTOX, last=80.4),
    _cifar("joint", "joint training", TEN, "ResNet-32, ten seeds", "issue 34 of FACIL", last=66.0),
    _cifar("icarl", "iCaRL", TEN, NETWORK_32, ITAML_CURVES, AIA=64.1, last=49.1),
    _cifar("icarl", "iCaRL", TEN, NETWORK_18, DYTOX, AIA=65.27, last=50.74),
    _cifar("icarl", "iCaRL", TWENTY, NETWORK_18, DYTOX, AIA=61.20, last=43.75),
    _cifar("icarl", "iCaRL", B50, B50_32, "issue 57 of PODNet's repository", AIA=58.08),
    _cifar("icarl", "iCaRL", B50, "ResNet-32, three orders", CPS_PAPER, AIA=61.63),
    _cifar("bic", "BiC", TEN, NETWORK_18, DYTOX, AIA=68.80, last=53.54),
    _cifar("bic", "BiC", TWENTY, NETWORK_18, DYTOX, AIA=66.48, last=47.02),
    _cifar("wa", "WA", TEN, NETWORK_18, DYTOX, AIA=69.46, last=53.78),
    _cifar("wa", "WA", FIVE, NETWORK_32, SOME_FIGURE, last=58.0, reading=FIGURE),
    _cifar("wa", "WA", B50, NETWORK_32, SOME_FIGURE, last=56.0, reading=FIGURE),
    _cifar("lucir", "LUCIR", TEN, NETWORK_18, DYTOX, AIA=58.66, last=43.39),
    _cifar("lucir", "LUCIR", B50, B50_32, "repository of LUCIR (Hou et al., CVPR 2019)", AIA=63.42),
    _cifar("lucir", "LUCIR", B50, "ResNet-32, three orders", CPS_PAPER, AIA=63.29),
    _cifar("podnet-cnn", "PODNet (CNN)", TEN, NETWORK_18, DYTOX, AIA=58.03, last=41.05),
    _cifar("podnet-cnn", "PODNet (CNN)", TWENTY, NETWORK_18, DYTOX, AIA=53.97, last=35.02),
    _cifar("podnet-cnn", "PODNet (CNN)", FIVE, NETWORK_32, SOME_FIGURE, last=49.0, reading=FIGURE),
    _cifar("podnet-cnn", "PODNet (CNN)", B50, B50_32, "PODNet (Douillard et al., ECCV 2020)", AIA=64.83),
    _cifar("podnet-cnn", "PODNet (CNN)", B50, "ResNet-32, three orders", CPS_PAPER, AIA=64.56),
    _cifar("podnet-nme", "PODNet (NME)", B50, B50_32, "note of PyCIL on PODNet", AIA=64.48),
    _cifar("podnet-nme", "PODNet (NME)", B50, "ResNet-32, three orders", CPS_PAPER, AIA=65.07),
    _cifar("afc", "AFC", B50, "ResNet-32, three orders", CPS_PAPER, AIA=65.73),
    _cifar("rps-net", "RPS-net", TEN, "56.5 M weights, 2,000 images", ITAML_CURVES, AIA=69.75, last=57.36),
    _cifar("itaml", "iTAML", TEN, THIRD, SOME_FIGURE, last=77.8, group_size=20, reading=FIGURE),
    _cifar("itaml", "iTAML", TWENTY, THIRD, SOME_FIGURE, last=77.0, group_size=20, reading=FIGURE),
    _cifar("itaml", "iTAML", FIVE, THIRD, SOME_FIGURE, last=72.3, group_size=20, reading=FIGURE),
    _cifar("itaml", "iTAML", TEN, THIRD, NOTE, last=33.5, reading=SECOND_HAND),
    _cifar("der", "DER", TEN, PER_TASK, DER_CURVES, AIA=75.36, last=65.22),
    _cifar("der", "DER", TWENTY, PER_TASK, DER_CURVES, AIA=74.09, last=62.49),
    _cifar("der", "DER", FIVE, PER_TASK, DER_CURVES, AIA=76.80, last=68.72),
    _cifar("der", "DER", B50, PER_TASK, DER_CURVES, AIA=73.21, last=66.26),
    _cifar("foster", "FOSTER", TEN, AUTOAUGMENT, FOSTER_README, AIA=73.10),
    _cifar("foster", "FOSTER", TWENTY, AUTOAUGMENT, FOSTER_README, AIA=70.59),
    _cifar("foster", "FOSTER", FIVE, AUTOAUGMENT, FOSTER_README, AIA=73.88),
    _cifar("foster", "FOSTER", B50, AUTOAUGMENT, FOSTER_README, AIA=71.08),
    _cifar("lwf", "LwF", TEN, "ResNet-32, no image kept", "issue 36 of FACIL", last=30.2),
    _cifar("packnet", "PackNet", TEN, "AlexNet", NOTE, known=72.39, reading=SECOND_HAND),
    _cifar("supsup", "SupSup", TEN, "ResNet-18, largest logit", NOTE, last=44.6, reading=SECOND_HAND),
    _cifar("supsup", "SupSup", TEN, "ResNet-18, its own rule", NOTE, last=33.1, reading=SECOND_HAND),
    _cifar("supsup", "SupSup", TEN, "AlexNet", NOTE, known=75.47, reading=SECOND_HAND),
    _cifar("wsn", "WSN", TEN, "AlexNet", NOTE, known=77.67, reading=SECOND_HAND),
    _cifar("wsn", "WSN", TEN, "ResNet-18", NOTE, known=86.47, reading=SECOND_HAND),
    _cifar("wsn", "WSN", FIVE, "ResNet-18, SupSup's rule", NOTE, last=46.24, reading=SECOND_HAND),
    _cifar("closed-form", "FeCAM", B50, "ResNet-18 of the first task", NOTE, last=62.1, reading=SECOND_HAND),
    PublishedNumber(
        "der", "DER", "imagenet100", IMAGENET100, PER_TASK, DER_CURVES, AIA=93.23, last=88.72, measure="top-5"
    ),
    PublishedNumber(
        "itaml", "iTAML", "imagenet100", IMAGENET100, "ResNet-18, 2,000 images", SOME_FIGURE, last=89.8, group_size=50,
        measure="top-5", reading=FIGURE,
    ),
    PublishedNumber("icarl", "iCaRL", "imagenet1000", IMAGENET1000, IMAGENET_18, CPS_PAPER, AIA=38.4),
    PublishedNumber("der", "DER", "imagenet1000", IMAGENET1000, f"{IMAGENET_18}, pruned", CPS_PAPER, AIA=66.73),
    PublishedNumber("foster", "FOSTER", "imagenet1000", IMAGENET1000, IMAGENET_18, CPS_PAPER, AIA=68.3),
)  # fmt: skip
