"""Schemas of the server's JSON replies; FastAPI shows them in the OpenAPI document."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class TaskReply(BaseModel):
    """The prediction of one task's subnetwork for an image."""

    task: int = Field(description="Task number, from 1, in order of learning.")
    score: float | None = Field(description="The selector's score; the task with the highest score is selected.")
    share: float | None = Field(description="Softmax over the scores of all tasks.")
    class_: str | int = Field(serialization_alias="class", description="The class that this subnetwork predicts.")
    confidence: float | None = Field(description="Softmax probability of that class within the task.")


class ImageReply(BaseModel):
    """The prediction for one image, or an error, in which case the other fields are null."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)  # fields may be null, never missing

    file: str = Field(description="Name of the uploaded file.")
    error: str | None = Field(
        default=None, description="Why there is no prediction for this image, in one sentence; otherwise null."
    )
    class_: str | int | None = Field(
        default=None, serialization_alias="class", description="Predicted class; null for an unknown image."
    )
    version: int | None = Field(
        default=None, description="How many tasks, up to this one, have learned the class: 1 unless trained again."
    )
    unknown: bool | None = Field(
        default=None, description="True if the image resembles no learned class; 'task' is then the closest task."
    )
    task: int | None = Field(default=None, description="Selected task, from 1, in order of learning.")
    share: float | None = Field(
        default=None,
        description="Softmax over the scores of all tasks, for the selected task; 1 if the request gives the task.",
    )
    confidence: float | None = Field(
        default=None, description="Softmax probability of the class within the task; 1 if the task has one class."
    )
    tasks: list[TaskReply] | None = Field(default=None, description="The prediction of every task's subnetwork.")


class PredictReply(BaseModel):
    """Predictions in the order of the uploaded images."""

    images: list[ImageReply]
    group: bool = Field(description="True if all images were assumed to share a task.")
    selector: str = Field(description="Name of the selector that scored the tasks.")


class UnreadableReply(PredictReply):
    """The reply if no image could be read."""

    error: str = Field(description="The error of the first image.")


class TaskInfo(BaseModel):
    """A learned task."""

    task: int = Field(description="Task number, from 1, in order of learning.")
    classes: list[str | int] = Field(description="Names of its classes.")
    density: float = Field(description="Fraction of the shared weights that its subnetwork uses.")
    fingerprint: str = Field(description="Digest of its tensors; learning other tasks never changes it.")
    outputs: str = Field(description="Digest of its outputs for fixed inputs on this machine.")
    notes: dict[str, Any] = Field(description="Notes stored when it was learned.")


class ClassInfo(BaseModel):
    """How many held-out images of a class were recognised when its folders were learned."""

    class_: str = Field(serialization_alias="class", description="Name of the class.")
    right: int = Field(description="Held-out images that were recognised.")
    held_out: int = Field(description="All held-out images of the class.")


class PairInfo(BaseModel):
    """Two classes that were confused."""

    classes: list[str] = Field(description="Names of the two classes.")
    images: int = Field(description="Held-out images of either class that were taken for the other.")


class LimitsInfo(BaseModel):
    """Limits of one request."""

    images: int = Field(description="Maximum number of images in a request.")
    megabytes: int = Field(description="Maximum size of a request in MiB.")
    megapixels: int = Field(description="Maximum size of an image in millions of pixels.")


class ModelReply(BaseModel):
    """The served model."""

    file: str = Field(description="Name of the model file.")
    tasks: list[TaskInfo]
    free: float = Field(description="Fraction of the shared weights that no task uses.")
    free_by_layer: dict[str, float] = Field(description="The same for each layer.")
    image_size: int = Field(description="Images are scaled and cropped to squares of this many pixels a side.")
    selector: str = Field(description="Name of the selector that scores the tasks.")
    limits: LimitsInfo
    accuracy: list[ClassInfo] = Field(description="For each class, how many of its held-out images were recognised.")
    confused: list[PairInfo] = Field(description="Pairs of classes that were confused, the most frequent first.")


class HealthReply(BaseModel):
    """The state of the server."""

    status: str = Field(
        description="'ok', or 'old model' if the model file changed, could not be loaded and the old model is in use."
    )
    file: str = Field(description="Name of the model file.")
    loaded: str = Field(description="When the model was loaded (UTC).")
    problem: str | None = Field(description="Why the current model file could not be loaded; otherwise null.")
    at_work: int = Field(description="Number of requests being processed.")


class ErrorReply(BaseModel):
    """The reply to a rejected request."""

    error: str = Field(description="What is wrong and what to do, in one sentence.")
