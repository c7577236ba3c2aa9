"""Replies: what the server says, as data whose form the OpenAPI document shows."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class TaskReply(BaseModel):
    """What one subnetwork says about an image. `share` is the softmax of all scores, as long as a bar should be."""

    task: int = Field(description="From 1, in the order of learning.")
    score: float | None = Field(description="The selector's score of this task; the highest wins.")
    share: float | None = Field(description="The softmax of the scores of all tasks.")
    class_: str | int = Field(serialization_alias="class", description="What this subnetwork would call the image.")
    confidence: float | None = Field(description="The softmax share of that class in this task.")


class ImageReply(BaseModel):
    """What an image is: its class, its task, and what every subnetwork says; or an error, and all of that is null."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)  # null, but never left out

    file: str = Field(description="The name that the file came with.")
    error: str | None = Field(
        default=None, description="Why this image has no answer, in one sentence; null if it has one."
    )
    class_: str | int | None = Field(
        default=None, serialization_alias="class", description="What it is; null if it is unknown."
    )
    unknown: bool | None = Field(
        default=None, description="Whether it looks like none that was learned; `task` is then the nearest."
    )
    task: int | None = Field(default=None, description="The task it was found in, from 1, in the order of learning.")
    share: float | None = Field(
        default=None, description="The task's share of the scores of all tasks; 1 if the task was told."
    )
    confidence: float | None = Field(
        default=None, description="The softmax share of the class in the task; 1 if the task has no other."
    )
    tasks: list[TaskReply] | None = Field(default=None, description="What every subnetwork says.")


class PredictReply(BaseModel):
    """The images in the order they came."""

    images: list[ImageReply]
    group: bool = Field(description="Whether all images were taken to share a task.")
    selector: str = Field(description="What scored the tasks.")


class UnreadReply(PredictReply):
    """None of the images could be read."""

    error: str = Field(description="The error of the first image.")


class TaskInfo(BaseModel):
    """A task that was learned."""

    task: int = Field(description="From 1, in the order of learning.")
    classes: list[str | int] = Field(description="Their names.")
    density: float = Field(description="The share of all shared weights that its subnetwork uses.")
    fingerprint: str = Field(description="Digest of its tensors; nothing learned later changes it.")
    outputs: str = Field(description="Digest of its outputs on fixed inputs, on this machine.")
    notes: dict[str, Any] = Field(description="What was noted when it was learned.")


class LimitsInfo(BaseModel):
    """What the server accepts in one request."""

    images: int = Field(description="Images in a request.")
    megabytes: int = Field(description="MiB of a request.")
    megapixels: int = Field(description="Millions of pixels in an image.")


class ModelReply(BaseModel):
    """The model that answers."""

    file: str = Field(description="The name of the model file.")
    tasks: list[TaskInfo]
    free: float = Field(description="The share of all shared weights that no task has taken.")
    free_by_layer: dict[str, float] = Field(description="The same for each layer.")
    image_size: int = Field(description="Images are scaled and cut to squares of so many pixels.")
    selector: str = Field(description="What scores the tasks.")
    limits: LimitsInfo


class HealthReply(BaseModel):
    """Whether the server answers with the model that is on the disk."""

    status: str = Field(description="'ok', or 'old model' where a changed file was refused and the old model kept.")
    file: str = Field(description="The name of the model file.")
    loaded: str = Field(description="When the model was loaded, in UTC.")
    problem: str | None = Field(description="What is wrong with the file now on the disk; null if nothing is.")
    at_work: int = Field(description="Requests being answered.")


class ErrorReply(BaseModel):
    """What is wrong with a request, in one sentence."""

    error: str = Field(description="What was expected, and what to do.")
