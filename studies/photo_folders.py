"""Folders of photos on frozen pretrained features: time and accuracy of `cps learn`, and whether the order matters.

`python -m studies.photo_folders CUB --cifar DIR --out FILE` needs CUB-200-2011 as image folders CUB/train and CUB/test.
By the command line it learns three folders of ten classes with at most 30 photos each, in closed form and, if
`--minutes` is given, with that, then more photos of known classes beside new ones, and forgets a class. The same is
repeated with classes of CIFAR-100, scaled up. Then it learns all 200 classes of CUB-200 in 1, 4 and 10 folders, in
several orders of the classes, each with a tenth held out as `cps learn` does it. All predictions are of single test
images.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import cps
from cps.app.frozen_folder import FrozenFolder, read_features
from cps.data.class_orders import class_order
from cps.data.decode import ImageFormat
from cps.data.examples import as_examples
from cps.data.image_folder import list_images
from cps.network.pretrained import installed_backbone, load_pretrained
from cps.runtime.environment import describe_device, versions
from cps.selection.base import Oracle
from cps.selection.gather import gather_evidence
from cps.selection.predict import predict
from cps.storage.atomic import write_json
from studies.published import markdown, read_json

SIZE = 224
PHOTOS = 30  # of a class in a folder
CLASSES = 10  # of a folder
HELD_OUT = 10  # every tenth image
FOLDERS = (1, 4, 10)  # in which all classes are learned
ORDERS = (0, 1, 2)  # seeds
CIFAR_SIDE = 128  # pixels


def learner_of_photos() -> cps.Learner:
    """Return a new learner with the settings that `cps learn` chooses for photos."""
    name = installed_backbone()
    assert name is not None, "install the extra 'pretrained'"
    pretrained = load_pretrained(cps.Architecture(name))
    return cps.Learner(
        pretrained.module,
        architecture=pretrained.architecture,
        normalize=pretrained.preprocessing.normalize,
        selectors=(cps.Fusion(cps.SharedSpace(cps.Pretrained())),),
        fabric=cps.make_fabric(accelerator="cpu"),
    )


def write_folder(folder: Path, classes: Sequence[Path], photos: slice) -> None:
    """Write a folder of links to some photos of each class."""
    for name in classes:
        (folder / name.name).mkdir(parents=True)
        for file in sorted(name.iterdir())[photos]:
            (folder / name.name / file.name).symlink_to(file.resolve())


def run_command(*arguments: object) -> dict[str, float]:
    """Run a cps command; return the seconds it took from start to exit, elapsed and of the CPU."""
    start, cpu_start = time.perf_counter(), _cpu_seconds()
    command = [sys.executable, "-m", "cps", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)
    elapsed, cpu = time.perf_counter() - start, _cpu_seconds() - cpu_start
    return {"seconds": round(elapsed, 1), "cpu_seconds": round(cpu, 1)}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def write_cifar(cifar: Path, target: Path) -> None:
    """Write classes of CIFAR-100 as image folders target/train and target/test, scaled up like photos.

    `cifar` is the folder that torchvision reads.
    """
    from torchvision.datasets import CIFAR100

    for part in ("train", "test"):
        data = CIFAR100(cifar, train=part == "train")
        for label, name in enumerate(data.classes[: 3 * CLASSES]):
            (target / part / name).mkdir(parents=True)
            own = [index for index, each in enumerate(data.targets) if each == label][:PHOTOS]
            for index in own:
                image, _ = data[index]
                image.resize((CIFAR_SIDE, CIFAR_SIDE), Image.Resampling.BICUBIC).save(
                    target / part / name / f"{index:05}.png"
                )


def measure_commands(data: Path, minutes: float | None) -> list[dict[str, Any]]:
    """Return seconds and accuracy after each command, with the image folders data/train and data/test."""
    classes = sorted((data / "train").iterdir())[: 3 * CLASSES]
    test = features_of(data / "test", {each.name for each in classes})
    rows = []

    def run(model: Path, what: str, folder: Path | None, *command: object) -> None:
        rows.append({"command": what, **_row(model, test, run_command(*command), folder)})
        print(rows[-1], flush=True)

    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        parts = [classes[start : start + CLASSES] for start in range(0, 3 * CLASSES, CLASSES)]
        for number, part in enumerate(parts, start=1):
            write_folder(root / f"folder-{number}", part, slice(PHOTOS))
        write_folder(root / "half", parts[0], slice(PHOTOS // 2))
        write_folder(root / "mixed", parts[0], slice(PHOTOS // 2, PHOTOS))
        write_folder(root / "mixed", parts[1], slice(PHOTOS))
        trained = [] if minutes is None else [("trained.cps", ("--minutes", minutes), ", --minutes")]
        for file, options, how in (("a.cps", (), ""), *trained):
            for number in range(1, len(parts) + 1):
                folder = root / f"folder-{number}"
                run(
                    root / file,
                    f"learn folder {number}{how}",
                    folder,
                    "learn",
                    folder,
                    "--model",
                    root / file,
                    *options,
                )
        for name, what in (
            ("half", "learn half of the photos of 10 classes"),
            ("mixed", "learn the other half and 10 new classes"),
        ):
            run(root / "known.cps", what, root / name, "learn", root / name, "--model", root / "known.cps")
        run(
            root / "a.cps",
            "forget a class of folder 1",
            None,
            "forget",
            root / "a.cps",
            "--class",
            classes[0].name,
            "--yes",
        )
    return rows


def _row(model: Path, test: FrozenFolder, seconds: dict[str, float], folder: Path | None) -> dict[str, Any]:
    learner = cps.load(model, fabric=cps.make_fabric(accelerator="cpu"))
    learned = {name for classes in learner.classes for name in classes}
    right, images, known = accuracy(learner, select(test, learned))
    return {
        **seconds,
        "photos": 0 if folder is None else len(list(folder.glob("*/*"))),
        "classes": len(learned),
        "accuracy": right,
        "task_known": known,
        "test_images": images,
        "mebibytes": round(model.stat().st_size / 2**20, 1),
    }


def select(folder: FrozenFolder, classes: set[Any]) -> FrozenFolder:
    """Return the images of some classes."""
    names = {name: name for name in folder.labels}
    return folder.select([index for index, name in enumerate(folder.labels) if name in classes], names)


def accuracy(learner: cps.Learner, test: FrozenFolder) -> tuple[float, int, float]:
    """Return the share of single images in % that are right, their number, and the same with the task known."""
    examples = as_examples(test, lambda labels: torch.zeros(len(labels), dtype=torch.long))
    evidence = gather_evidence(learner.network, examples, learner.fabric)
    groups = torch.arange(len(test))
    found = predict(learner.network, evidence, learner.config.selectors[0], groups).classes
    right = sum(a == b for a, b in zip(found, test.labels, strict=True))
    known = 0
    owners = [learner.network.tasks_of(name)[-1] for name in test.labels]
    for task in sorted(set(owners)):
        rows = [row for row, owner in enumerate(owners) if owner == task]
        of_task = evidence.of_images(torch.tensor(rows))
        names = predict(learner.network, of_task, Oracle(task), torch.arange(len(rows))).classes
        known += sum(name == test.labels[row] for row, name in zip(rows, names, strict=True))
    return round(100 * right / len(test), 2), len(test), round(100 * known / len(test), 2)


def measure_orders(train: FrozenFolder, test: FrozenFolder) -> list[dict[str, Any]]:
    """Return the accuracy on all classes, learned in several numbers of folders and orders."""
    rows = []
    for number in FOLDERS:
        for order in ORDERS[: 1 if number == 1 else None]:
            learner, names = learner_of_photos(), class_order(sorted(set(train.labels)), order)
            size = len(names) // number
            for start in range(0, len(names), size):
                folder = select(train, set(names[start : start + size]))
                same = {name: name for name in folder.labels}
                parts = [
                    folder.select([i for i in range(len(folder)) if (i % HELD_OUT == 0) == is_held], same)
                    for is_held in (False, True)
                ]
                classes = sorted(set(folder.labels))
                learner.learn_frozen(cps.Task(classes, train=parts[0], val=parts[1]))
                learner.add(cps.Task(classes, train=parts[1]))
            right, images, known = accuracy(learner, test)
            rows.append(
                {"folders": number, "order": order, "accuracy": right, "task_known": known, "test_images": images}
            )
            print(rows[-1], flush=True)
    return rows


def features_of(folder: Path, classes: set[str] | None = None) -> FrozenFolder:
    """Return the features of all images of a folder, or of those of some classes."""
    files = [file for file in list_images(folder) if classes is None or file.parent.name in classes]
    learner = learner_of_photos()
    assert learner.architecture is not None
    return read_features(learner.network, folder, files, ImageFormat(SIZE, learner.architecture.margin))


def commands_table(data: str) -> str:
    """Return the table of the commands on "CUB-200" or "CIFAR-100"."""
    results = read_json("photo-folders")
    head = ["command", "photos", "seconds (of the CPU)", "classes so far", "right (%)", "task known (%)", "model (MiB)"]
    rows = [
        [
            row["command"],
            str(row["photos"] or ""),
            f"{row['seconds']:.0f} ({row['cpu_seconds']:.0f})",
            str(row["classes"]),
            f"{row['accuracy']:.1f} of {row['test_images']:,}",
            f"{row['task_known']:.1f}",
            f"{row['mebibytes']:.0f}",
        ]
        for row in results["commands"][data]
    ]
    load = "Elapsed seconds from start to exit, on a machine with other work"
    load += "" if results["minutes"] is None else f"; --minutes {results['minutes']:g}"
    photos = _PHOTOS if data == "CUB-200" else f"CIFAR-100, images scaled up to {CIFAR_SIDE} pixels"
    return markdown(head, rows, f"{load}. {photos}; {_note(results)}")


def orders_table() -> str:
    """Return the table of all classes in several numbers of folders."""
    results = read_json("photo-folders")
    rows = []
    for number in FOLDERS:
        of_number = [row for row in results["orders"] if row["folders"] == number]
        right, known = ([row[key] for row in of_number] for key in ("accuracy", "task_known"))
        rows.append(
            [
                str(number),
                str(len(of_number)),
                f"{min(right):.1f} to {max(right):.1f}",
                f"{min(known):.1f} to {max(known):.1f}",
            ]
        )
    head = ["folders", "orders of the classes", "right (%)", "task known (%)"]
    images = results["orders"][0]["test_images"]
    return markdown(head, rows, f"200 classes, {images:,} test images. {_PHOTOS}; {_note(results)}")


_PHOTOS = (
    "CUB-200-2011, photos scaled to a short side of 208 pixels and stored as WebP, so results are slightly below those "
    "on the original files"
)


def _note(results: dict[str, Any]) -> str:
    threads = results["threads"]
    return (
        f"single images, task unknown. {results['backbone']}. {results['device']}, {threads} "
        f"thread{'s' if threads > 1 else ''}, torch {results['versions']['torch']}."
    )


def main() -> None:
    """Measure everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cub", type=Path)
    parser.add_argument("--cifar", type=Path, help="folder of CIFAR-100 as torchvision reads it")
    parser.add_argument("--minutes", type=float, help="learn with --minutes, too, and for how long a folder")
    parser.add_argument(
        "--parts", nargs="+", default=["CUB-200", "CIFAR-100", "orders"], help="others stay as they were"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/photo-folders.json"))
    options = parser.parse_args()
    found = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    found |= {
        "device": describe_device(cps.make_fabric(accelerator="cpu")),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "backbone": f"{installed_backbone()}, pretrained",
        "minutes": options.minutes,
    }
    if "CUB-200" in options.parts:
        found.setdefault("commands", {})["CUB-200"] = measure_commands(options.cub, options.minutes)
        write_json(options.out, found)
    if "CIFAR-100" in options.parts and options.cifar is not None:
        with tempfile.TemporaryDirectory() as place:
            write_cifar(options.cifar, Path(place))
            found.setdefault("commands", {})["CIFAR-100"] = measure_commands(Path(place), options.minutes)
        write_json(options.out, found)
    if "orders" in options.parts:
        train, test = (features_of(options.cub / part) for part in ("train", "test"))
        found["orders"] = measure_orders(train, test)
        write_json(options.out, found)


if __name__ == "__main__":
    main()
