"""Replies: what the server says, as data whose form the OpenAPI document shows."""

from typing import Any

from pydantic import BaseModel, Field


class TaskReply(BaseModel):
    """What one subnetwork says about an image. `share` is the softmax of all scores, as long as a bar should be."""

    task: int = Field(description="From 1, in the order of learning.")
    score: float | None = Field(description="The selector's score of this task; the highest wins.")
    share: float | None = Field(description="The softmax of the scores of all tasks.")
    class_: str | int = Field(serialization_alias="class", description="What this subnetwork would call the image.")
    confidence: float | None = Field(description="The softmax share of that class in this task.")


class ImageReply(BaseModel):
    """What an image is: its class, the task it was found in, and what every subnetwork says."""

    file: str = Field(description="The name that the file came with.")
    class_: str | int = Field(serialization_alias="class")
    unknown: bool = Field(description="Whether it looks like none that was learned; the class is then the nearest.")
    task: int = Field(description="From 1, in the order of learning.")
    confidence: float | None = Field(description="The softmax share of the class in the task.")
    tasks: list[TaskReply]


class PredictReply(BaseModel):
    """The images in the order they came."""

    images: list[ImageReply]
    group: bool = Field(description="Whether all images were taken to share a task.")
    selector: str


class TaskInfo(BaseModel):
    """A task that was learned."""

    task: int = Field(description="From 1, in the order of learning.")
    classes: list[str | int]
    density: float = Field(description="The share of all shared weights that its subnetwork uses.")
    fingerprint: str = Field(description="Digest of its tensors; nothing learned later changes it.")
    outputs: str = Field(description="Digest of its outputs on fixed inputs, on this machine.")
    notes: dict[str, Any] = Field(description="What was noted when it was learned.")


class LimitsInfo(BaseModel):
    """What the server accepts in one request."""

    images: int
    megabytes: int
    megapixels: int


class ModelReply(BaseModel):
    """The model that answers."""

    file: str
    tasks: list[TaskInfo]
    free: float = Field(description="The share of all shared weights that no task has taken.")
    free_by_layer: dict[str, float]
    image_size: int = Field(description="Images are scaled and cut to squares of so many pixels.")
    selector: str
    limits: LimitsInfo


class HealthReply(BaseModel):
    """Whether the server answers with the model that is on the disk."""

    status: str = Field(description="'ok', or 'old model' where a changed file was refused and the old model kept.")
    file: str
    loaded: str = Field(description="When the model was loaded, in UTC.")
    problem: str | None = Field(description="What is wrong with the file now on the disk.")
    at_work: int = Field(description="Requests being answered.")


class ErrorReply(BaseModel):
    """What is wrong with a request, in one sentence."""

    error: str
