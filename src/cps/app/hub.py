"""Share models through the Hugging Face Hub: a repository with the model file, and its model card as README.md."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import nn

from cps.app.model_card import model_card
from cps.learner import Learner
from cps.loading import load
from cps.runtime.extras import install_command, is_installed
from cps.storage.atomic import write_text

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MODEL, CARD = "model.cps", "README.md"
REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
METADATA = """---
library_name: cps
pipeline_tag: image-classification
tags:
- continual-learning
- class-incremental-learning
---

"""


def save_for_hub(learner: Learner, folder: str | Path) -> None:
    """Write the model and its card, which the name of the folder entitles, as a repository of the hub holds them."""
    folder = Path(folder)
    learner.save(folder / MODEL)
    write_text(folder / CARD, METADATA + model_card(folder / MODEL, title=folder.resolve().name))


def push_to_hub(
    learner: Learner,
    repository: str,
    *,
    private: bool = False,
    message: str = "Upload a model of cps",
    api: "HfApi | None" = None,
) -> str:
    """Upload the model and its card to a repository ("user/name") and return the address of the commit.

    A repository that does not exist is created. `api` holds another address or token than those of `hf auth login`.
    """
    api = api or _default_api()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / repository.rpartition("/")[2]
        save_for_hub(learner, folder)  # a model without tasks is an error before a repository is created
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message))


def load_from_hub(
    source: str | Path,
    backbone: nn.Module | None = None,
    *,
    revision: str | None = None,
    api: "HfApi | None" = None,
    **settings: Any,
) -> Learner:
    """Return the learner of a repository ("user/name"), or of a folder that `save_for_hub` has written.

    `revision` is a branch, tag or commit. The other arguments are those of `cps.load`.
    """
    file = Path(source) / MODEL
    if not file.is_file():
        if not REPOSITORY.fullmatch(str(source)):
            raise FileNotFoundError(f"'{source}' is neither a folder with {MODEL} nor a repository such as 'user/name'")
        api = api or _default_api()
        file = Path(api.hf_hub_download(str(source), MODEL, revision=revision))
    return load(file, backbone, **settings)


def _default_api() -> "HfApi":
    if not is_installed("huggingface_hub"):
        raise RuntimeError(f"the hub needs huggingface_hub, which is not installed; run: {install_command('hub')}")
    from huggingface_hub import HfApi

    return HfApi(library_name="cps")
