"""Fuzz the reader of model files: `python -m fuzz.model_files --cases 60000`.

Each case is a model file made from its number alone. It must load and predict, or be refused with `cps.FileError`, or
ask for a setting that a file cannot hold; anything else is printed with the number that makes it again. While a file
is read, nothing may be written, run or connected to.
"""

import argparse
import math
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import cps
from cps.runtime.environment import describe_device, versions
from cps.storage.container import write_json
from fuzz.odd_files import KINDS, Model, make_case, make_model

SECONDS = 20  # that one case may take
OUTCOMES = ("loaded", "refused", "asked", "failed")
FORBIDDEN = {  # what reading a file must never do, by the names of Python's audit events
    "os.exec", "os.fork", "os.posix_spawn", "os.system", "os.remove", "os.rename", "os.mkdir", "os.chmod",
    "pickle.find_class", "shutil.rmtree", "socket.connect", "subprocess.Popen", "ctypes.dlopen",
}  # fmt: skip


class Watch:
    """Notes forbidden events while it is on. An audit hook cannot be taken away again, so there is one."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if writes or event in FORBIDDEN:
            self.seen.append(f"{event} {arguments}")

    @contextmanager
    def on(self) -> Iterator[None]:
        """Hear what happens inside."""
        self.seen, self.is_on = [], True
        try:
            yield
        finally:
            self.is_on = False


def outcome(model: Model, content: bytes, path: Path, watch: Watch) -> str:
    """Return what came of reading a file: loaded, refused, asked, or what should not have happened."""
    path.write_bytes(content)
    with watch.on(), _time_limit():
        try:
            said = _loaded(model, path)
        except cps.FileError:
            said = "refused"
        except ValueError as error:  # that a part of one's own must be passed, or be there earlier, is no damage
            is_asked = "pass " in str(error) or "must be among the learner's selectors" in str(error)
            said = "asked" if is_asked else f"ValueError: {error}"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return f"did {watch.seen[0]}" if watch.seen else said


def _loaded(model: Model, path: Path) -> str:
    """Load a file and let it predict; what it says must have the right form."""
    learner = cps.load(path, fabric=model.learner.fabric)
    network = learner.network
    if network.subnetworks and math.prod(network.input_shape or ()) < 2**16:  # what is large takes long, as it should
        prediction = learner.predict(torch.zeros(2, *(network.input_shape or ()), dtype=torch.uint8))
        known = {name for subnetwork in network.subnetworks for name in subnetwork.classes}
        assert set(prediction.classes) <= known
        learner.fingerprint(0)
    return "loaded"


@contextmanager
def _time_limit() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"took more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def fuzz(cases: range) -> tuple[Counter[tuple[str, str]], dict[str, int]]:
    """Return how many cases of each kind had which outcome, and a case of each failure."""
    counts: Counter[tuple[str, str]] = Counter()
    failures: dict[str, int] = {}
    watch = Watch()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        model = make_model(folder)
        outcome(model, model.content, folder / "case.cps", watch)  # what torch imports late is not the file's doing
        assert outcome(model, model.content, folder / "case.cps", watch) == "loaded"
        for number in cases:
            kind, content = make_case(model, number, folder)
            said = outcome(model, content, folder / "case.cps", watch)
            if said not in ("loaded", "refused", "asked"):
                failures.setdefault(said[:160], number)
                said = "failed"
            counts[kind, said] += 1
    return counts, failures


def main() -> None:
    """Run the cases that the command line asks for, and say what came of them."""
    parser = argparse.ArgumentParser(description="Fuzz the reader of model files.")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--out", type=Path, help="a JSON file to write the counts to")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    counts, failures = fuzz(range(asked.first, asked.first + asked.cases))
    results = {
        "device": describe_device(cps.make_fabric(accelerator="cpu")),
        "versions": versions(),
        "first": asked.first,
        "cases": asked.cases,
        "minutes": (time.perf_counter() - began) / 60,
        "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # Linux counts kibibytes
        "counts": {kind: {said: counts[kind, said] for said in OUTCOMES} for kind in KINDS},
        "failures": failures,
    }
    print(f"{'kind':12}", *(f"{said:>8}" for said in OUTCOMES))
    for kind, of_kind in results["counts"].items():
        print(f"{kind:12}", *(f"{number:8}" for number in of_kind.values()))
    print(f"{asked.cases} cases, {results['minutes']:.1f} minutes, {results['mebibytes']:.0f} MiB at most")
    for said, number in failures.items():
        print(f"case {number}: {said}")
    if asked.out is not None:
        write_json(asked.out, results)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
