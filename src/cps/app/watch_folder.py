"""Predict images as they arrive in a folder."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cps.app.list_files import FileState, file_state, file_states
from cps.app.predict_files import FilePrediction, Predictor, is_image, predict_files
from cps.learner import Learner

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0  # an unreadable file that changed more recently may still be being written


def watch_folder(
    current: Callable[[], Learner],
    folder: Path,
    predictor: Predictor | None = None,
    *,
    seen: Mapping[Path, FileState | None] | None = None,
    interval: float = 0.5,
    until: Callable[[], bool] = lambda: False,
) -> Iterator[FilePrediction]:
    """Return an iterator of predictions for new images in a folder, each once it has stopped changing.

    An image is new if it is not in `seen`, which defaults to the content of the folder at the time of this call.
    `current` returns the learner to use; it is called before each scan of the folder. An image that cannot be read may
    be incomplete, so it is retried until it has not changed for some seconds. An image that changes later is new again.
    The oldest image comes first. The iterator ends when `until` returns True.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder '{folder}' to watch")
    return _watch(current, folder, predictor, interval, until, dict(file_states(folder) if seen is None else seen))


def _watch(
    current: Callable[[], Learner],
    folder: Path,
    predictor: Predictor | None,
    interval: float,
    until: Callable[[], bool],
    handled: dict[Path, FileState | None],
) -> Iterator[FilePrediction]:
    before: dict[Path, FileState | None] = {}
    exists = True
    while not until():
        learner, now = current(), file_states(folder)
        if exists != (exists := folder.is_dir()):
            log.warning("the folder '%s' %s", folder, "is back" if exists else "has gone; still watching")
        stable = {path: state for path, state in now.items() if state and before.get(path) == state and is_image(path)}
        oldest_first = sorted(stable.items(), key=lambda item: item[1].modified)  # equal times keep the natural order
        groups = [[path] for path, state in oldest_first if handled.get(path) != state]
        for prediction in predict_files(learner, groups, predictor):
            state = stable[prediction.path]
            if file_state(prediction.path) != state:
                continue  # the file changed while it was read, so it may have been read in part
            if not prediction.error or time.time() - state.modified > RETRY_SECONDS:
                handled[prediction.path] = state
                yield prediction
        before = now
        time.sleep(interval)
