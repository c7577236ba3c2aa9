"""Joining: norm layers that do the addition and the ReLU after them in the same kernels, where a GPU trains in bf16."""

import operator
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cps.network.compact.fx_tracing import ADDITIONS, RELUS, traced
from cps.network.partition import named_tensors
from cps.training.cuda import convolution

KNOWN = ("torch.nn.", "cps.network.backbones", "torchvision.models.resnet")  # code that does the same in every pass
FARTHEST = 2**31 - 2**16  # numbers that our kernels can count


class Norm(nn.BatchNorm2d):
    """Batch norm, then the addition of a shortcut, then ReLU, as asked; fast in training under bf16 on a GPU."""

    def forward(
        self, input: Tensor, shortcut: Tensor | None = None, has_relu: bool = False, is_twice: bool = False
    ) -> Any:
        """Return the normalised signal with what follows, twice if asked: then its two gradients need no addition."""
        is_like = shortcut is None or shortcut.shape == input.shape
        is_sound = is_like and self.num_features < input.numel() < FARTHEST  # one number has no spread
        if is_sound and self.training and convolution.runs_in_bf16(input):
            seen = input.contiguous(memory_format=torch.channels_last)
            beside = shortcut if shortcut is None else shortcut.contiguous(memory_format=torch.channels_last)
            return _Normalize.apply(seen, beside, self.weight, self.bias, self, has_relu, is_twice)
        result = super().forward(input)
        result = result if shortcut is None else result + shortcut
        result = F.relu(result) if has_relu else result
        return (result, result) if is_twice else result

    def kept(self) -> tuple[Any, ...]:
        """Return the running mean and variance, the number of batches, and the momentum."""
        return self.running_mean, self.running_var, self.num_batches_tracked, self.momentum

    @cached_property
    def counts(self) -> Tensor:
        """Where the programs of a kernel count how many of them have finished: zero between any two of its kernels."""
        return torch.zeros(self.num_features, dtype=torch.int32, device=self.weight.device)


def joined(backbone: nn.Module) -> nn.Module | None:
    """Return the backbone with its norm layers joined to what follows them, in place; None where that is not safe.

    Its code is traced once, so it must be known not to branch by chance or by mode, nor to call hooks; and every layer
    must be used once, so that it can write its own gradient.
    """
    layers = list(backbone.modules())
    norms = [layer for layer in layers if _can_join(layer)]
    if not (convolution.HAS_TRITON and norms and all(_is_known(layer) for layer in layers)):
        return None
    graph = traced(backbone)
    calls = [node for node in graph.graph.nodes if node.op == "call_module"]
    used = [layer for layer in (graph.get_submodule(node.target) for node in calls) if list(layer.parameters())]
    if len(set(used)) < len(used) or list(named_tensors(graph)) != list(named_tensors(backbone)):
        return None
    for node in calls:
        if _can_join(graph.get_submodule(node.target)):
            _join(node, graph)
    graph.recompile()
    for layer in norms:
        layer.__class__ = Norm
    return graph


def _join(norm: fx.Node, traced: fx.GraphModule) -> None:
    """Let one norm layer do the addition and the ReLU that alone read its result, and give it to two readers apart."""
    chain, shortcut = [norm], None
    reader = _only_reader(norm)
    if reader is not None and _is_addition(reader):
        first, second = reader.args
        shortcut = second if first is norm else first
        chain.append(reader)
        reader = _only_reader(reader)
    has_relu = reader is not None and _is_relu(reader, traced)
    if reader is not None and has_relu:
        chain.append(reader)
    readers = list(chain[-1].users)
    is_twice = len(readers) == 2
    with traced.graph.inserting_before(chain[-1]):
        whole = traced.graph.call_module(str(norm.target), (norm.args[0], shortcut, has_relu, is_twice))
        parts = [traced.graph.call_function(operator.getitem, (whole, i)) for i in range(2)] if is_twice else ()
    for reader, part in zip(readers, parts or [whole] * len(readers), strict=True):
        reader.replace_input_with(chain[-1], part)
    for node in reversed(chain):
        traced.graph.erase_node(node)


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_addition(node: fx.Node) -> bool:
    """Say whether a node adds two different signals and does nothing else."""
    signals = [value for value in node.args if isinstance(value, fx.Node)]
    is_sum = node.op in ("call_function", "call_method") and node.target in ADDITIONS
    return is_sum and len(node.args) == len(set(signals)) == 2 and not node.kwargs


def _is_relu(node: fx.Node, traced: fx.GraphModule) -> bool:
    if node.op == "call_module":
        return type(traced.get_submodule(str(node.target))) is nn.ReLU
    return node.op in ("call_function", "call_method") and node.target in RELUS


def _is_known(layer: nn.Module) -> bool:
    has_hooks = bool(layer._forward_hooks or layer._forward_pre_hooks)
    return f"{type(layer).__module__}.".startswith(KNOWN) and not has_hooks


def _can_join(layer: nn.Module) -> bool:
    is_plain = type(layer) is nn.BatchNorm2d and layer.affine and layer.track_running_stats
    return is_plain and layer.momentum is not None


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        signal: Tensor,
        shortcut: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        layer: Norm,
        has_relu: bool,
        is_twice: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        from cps.training.cuda.norms import Running, normalize  # Triton is there only where GPUs are

        running = Running(*layer.kept())
        done = normalize(signal, weight, bias, running, layer.counts, layer.eps, shortcut=shortcut, has_relu=has_relu)
        ctx.counts, ctx.has_shortcut, ctx.has_relu = layer.counts, shortcut is not None, has_relu
        seen = done.result if ctx.has_shortcut and has_relu else signal
        ctx.save_for_backward(seen, done.mean, done.scale, signal, weight, bias)
        return (done.result, done.result.view_as(done.result)) if is_twice else done.result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        from cps.training.cuda.norms import Normalized, normalize_backward

        *done, signal, weight, bias = ctx.saved_tensors
        of_signal, of_weight, of_bias, of_shortcut = normalize_backward(
            [gradient.contiguous(memory_format=torch.channels_last) for gradient in gradients],
            Normalized(*done),
            signal,
            weight,
            bias,
            ctx.counts,
            has_shortcut=ctx.has_shortcut,
            has_relu=ctx.has_relu,
        )
        return of_signal, of_shortcut, of_weight, of_bias, None, None, None
