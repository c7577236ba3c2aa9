"""The head accepts features of another precision than its weights."""

from torch import nn

import cps
from samples import ACCELERATOR, conv_net, make_task


class BFloat16Features(nn.Module):
    """A backbone whose features have a lower precision than its weights."""

    def __init__(self):
        super().__init__()
        self.inner = conv_net()

    def forward(self, images):
        return self.inner(images).bfloat16()


def test_features_may_have_a_lower_precision_than_the_head(make_learner):
    learner = make_learner(BFloat16Features(), fabric=cps.make_fabric(accelerator=ACCELERATOR, precision="32-true"))
    learner.learn(make_task(0))
    assert learner.predict(make_task(0).test[0]).classes
