"""Fuzz the reader of model files: `python -m fuzz.model_files --cases 60000`.

Each case is a model file that depends on its number only. It must load and predict, be refused with `cps.FileError`, or
ask for a setting that a file cannot hold. Everything else is printed with the number of the case. Reading a file must
not write files, start programs or open connections.
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
from cps.storage.atomic import write_json
from fuzz.malformed_files import KINDS, ModelFile, make_case, make_model

MAX_SECONDS = 20  # per case
OUTCOMES = ("loaded", "refused", "asked", "failed")
FORBIDDEN = {  # Python's audit events that reading a file must never cause
    "os.exec", "os.fork", "os.posix_spawn", "os.system", "os.remove", "os.rename", "os.mkdir", "os.chmod",
    "pickle.find_class", "shutil.rmtree", "socket.connect", "subprocess.Popen", "ctypes.dlopen",
}  # fmt: skip


class AuditHook:
    """Records forbidden audit events. Create it once per process: Python cannot remove an audit hook."""

    def __init__(self) -> None:
        self.is_recording = False
        self.events: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_recording:
            return
        writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if writes or event in FORBIDDEN:
            self.events.append(f"{event} {arguments}")

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the forbidden events of the block in `events`."""
        self.events, self.is_recording = [], True
        try:
            yield
        finally:
            self.is_recording = False


def outcome(model: ModelFile, content: bytes, path: Path, hook: AuditHook) -> str:
    """Read a file with this content; return "loaded", "refused" or "asked", or else a description of the failure."""
    path.write_bytes(content)
    with hook.record(), _time_limit():
        try:
            _load_and_predict(model, path)
            result = "loaded"
        except cps.FileError:
            result = "refused"
        except ValueError as error:  # a setting that must be passed, or added earlier, is no damage
            is_asked = "pass " in str(error) or "must be among the learner's selectors" in str(error)
            result = "asked" if is_asked else f"ValueError: {error}"
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
    return f"did {hook.events[0]}" if hook.events else result


def _load_and_predict(model: ModelFile, path: Path) -> None:
    """Load a file, predict two images, and check that the predicted classes are known."""
    learner = cps.load(path, fabric=model.learner.fabric)
    network = learner.network
    if network.subnetworks and math.prod(network.input_shape or ()) < 2**16:  # large images are rightly slow
        prediction = learner.predict(torch.zeros(2, *(network.input_shape or ()), dtype=torch.uint8))
        known = {name for subnetwork in network.subnetworks for name in subnetwork.classes}
        assert set(prediction.classes) <= known
        learner.fingerprint(0)


@contextmanager
def _time_limit() -> Iterator[None]:
    def on_alarm(*_: object) -> None:
        raise TimeoutError(f"took more than {MAX_SECONDS} seconds")

    signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(MAX_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def fuzz(cases: range) -> tuple[Counter[tuple[str, str]], dict[str, int]]:
    """Return the number of cases by kind and outcome, and the first case of each failure."""
    counts: Counter[tuple[str, str]] = Counter()
    failures: dict[str, int] = {}
    hook = AuditHook()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        model = make_model(folder)
        outcome(model, model.content, folder / "case.cps", hook)  # torch's late imports also cause audit events
        assert outcome(model, model.content, folder / "case.cps", hook) == "loaded"
        for number in cases:
            kind, content = make_case(model, number, folder)
            result = outcome(model, content, folder / "case.cps", hook)
            if result not in ("loaded", "refused", "asked"):
                failures.setdefault(result[:160], number)
                result = "failed"
            counts[kind, result] += 1
    return counts, failures


def main() -> None:
    """Run the cases, print the counts, and exit with 1 if any case failed."""
    parser = argparse.ArgumentParser(description="Fuzz the reader of model files.")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    counts, failures = fuzz(range(options.first, options.first + options.cases))
    results = {
        "device": describe_device(cps.make_fabric(accelerator="cpu")),
        "versions": versions(),
        "first": options.first,
        "cases": options.cases,
        "minutes": (time.perf_counter() - started) / 60,
        "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # Linux reports KiB
        "counts": {kind: {name: counts[kind, name] for name in OUTCOMES} for kind in KINDS},
        "failures": failures,
    }
    print(f"{'kind':12}", *(f"{name:>8}" for name in OUTCOMES))
    for kind, by_outcome in results["counts"].items():
        print(f"{kind:12}", *(f"{count:8}" for count in by_outcome.values()))
    print(f"{options.cases} cases, {results['minutes']:.1f} minutes, {results['mebibytes']:.0f} MiB at most")
    for failure, number in failures.items():
        print(f"case {number}: {failure}")
    if options.out is not None:
        write_json(options.out, results)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
