"""Experience replay: train on the images of a task and of the memory together."""

from dataclasses import dataclass

from cps.method import Assumptions
from cps.methods.blocks.memory import Memory
from cps.methods.single_head import SingleHead


@dataclass(eq=False)
class ExperienceReplay(SingleHead):
    """Cross-entropy on new images and on a memory of old ones: what every method with a memory should beat."""

    memory: Memory | None = Memory(2000)

    name = "ER"
    assumes = Assumptions(replay=True)
