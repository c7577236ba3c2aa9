"""Finetuning: train on one task after the other and forget. The lower bound of continual learning."""

from dataclasses import dataclass

from cps.methods.single_head import SingleHead


@dataclass(eq=False)
class Finetuning(SingleHead):
    """Cross-entropy on the images of each task in turn; nothing protects what was learned before."""
