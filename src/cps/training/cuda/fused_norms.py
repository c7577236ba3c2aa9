"""Fuse batch norm layers with the addition and the ReLU after them, for training in bf16 on a GPU."""

import operator
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cps.network.compact.fx_tracing import ADDITIONS, RELUS, trace_module
from cps.network.partition import named_tensors
from cps.training.cuda import convolution

# Modules whose code does the same in every forward pass, by the start of their dotted name. Moving the backbones
# without changing this would silently disable the fast path for our own ResNets; a test guards it.
TRACEABLE = ("torch.nn.", "cps.network.backbones.", "torchvision.models.resnet.")
MAX_NUMEL = 2**31 - 2**16  # of a tensor that the kernels can address with 32-bit offsets


class FusedBatchNorm(nn.BatchNorm2d):
    """Batch norm, then optionally the addition of a shortcut and a ReLU; fast in training under bf16 on a GPU."""

    def forward(
        self, input: Tensor, shortcut: Tensor | None = None, has_relu: bool = False, is_twice: bool = False
    ) -> Any:
        """Return the result, or a pair of it if `is_twice`: the kernels then add up the gradients of both readers."""
        has_same_shape = shortcut is None or shortcut.shape == input.shape
        # With one number per channel there is no variance, and PyTorch raises an error.
        is_supported = has_same_shape and self.num_features < input.numel() < MAX_NUMEL
        if is_supported and self.training and convolution.is_cuda_autocast(input):
            signal = input.contiguous(memory_format=torch.channels_last)
            added = shortcut if shortcut is None else shortcut.contiguous(memory_format=torch.channels_last)
            return _Normalize.apply(signal, added, self.weight, self.bias, self, has_relu, is_twice)
        result = super().forward(input)
        result = result if shortcut is None else result + shortcut
        result = F.relu(result) if has_relu else result
        return (result, result) if is_twice else result

    def running_statistics(self) -> tuple[Any, ...]:
        """Return the running mean and variance, the number of batches, and the momentum."""
        return self.running_mean, self.running_var, self.num_batches_tracked, self.momentum

    @cached_property
    def counters(self) -> Tensor:
        """Counters of finished programs, which the kernels need; zero before and after each kernel."""
        return torch.zeros(self.num_features, dtype=torch.int32, device=self.weight.device)


def fuse_norms(backbone: nn.Module) -> nn.Module | None:
    """Return the backbone as a graph with fused batch norm layers, changed in place; None if that is not safe.

    The code is traced once, so it must not branch at random or by mode, or call hooks. Every layer must be used once,
    since it writes its own gradient.
    """
    layers = list(backbone.modules())
    norms = [layer for layer in layers if _is_fusible(layer)]
    if not (convolution.HAS_TRITON and norms and all(_is_traceable(layer) for layer in layers)):
        return None
    graph = trace_module(backbone)
    calls = [node for node in graph.graph.nodes if node.op == "call_module"]
    used = [layer for layer in (graph.get_submodule(node.target) for node in calls) if list(layer.parameters())]
    if len(set(used)) < len(used) or list(named_tensors(graph)) != list(named_tensors(backbone)):
        return None
    for node in calls:
        if _is_fusible(graph.get_submodule(node.target)):
            _fuse(node, graph)
    graph.recompile()
    for layer in norms:
        layer.__class__ = FusedBatchNorm
    return graph


def _fuse(norm: fx.Node, module: fx.GraphModule) -> None:
    """Fuse one norm layer with the addition and the ReLU that are the only readers of its result.

    If two nodes read the final result, give each its own output.
    """
    chain, shortcut = [norm], None
    reader = _only_reader(norm)
    if reader is not None and _is_addition(reader):
        first, second = reader.args
        shortcut = second if first is norm else first
        chain.append(reader)
        reader = _only_reader(reader)
    has_relu = reader is not None and _is_relu(reader, module)
    if reader is not None and has_relu:
        chain.append(reader)
    readers = list(chain[-1].users)
    is_twice = len(readers) == 2
    with module.graph.inserting_before(chain[-1]):
        fused = module.graph.call_module(str(norm.target), (norm.args[0], shortcut, has_relu, is_twice))
        results = [module.graph.call_function(operator.getitem, (fused, i)) for i in range(2)] if is_twice else ()
    for reader, result in zip(readers, results or [fused] * len(readers), strict=True):
        reader.replace_input_with(chain[-1], result)
    for node in reversed(chain):
        module.graph.erase_node(node)


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_addition(node: fx.Node) -> bool:
    """Return True if a node adds two different signals and does nothing else."""
    signals = [value for value in node.args if isinstance(value, fx.Node)]
    is_sum = node.op in ("call_function", "call_method") and node.target in ADDITIONS
    return is_sum and len(node.args) == len(set(signals)) == 2 and not node.kwargs


def _is_relu(node: fx.Node, module: fx.GraphModule) -> bool:
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))) is nn.ReLU
    return node.op in ("call_function", "call_method") and node.target in RELUS


def _is_traceable(layer: nn.Module) -> bool:
    has_hooks = bool(layer._forward_hooks or layer._forward_pre_hooks)
    return f"{type(layer).__module__}.".startswith(TRACEABLE) and not has_hooks


def _is_fusible(layer: nn.Module) -> bool:
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
        layer: FusedBatchNorm,
        has_relu: bool,
        is_twice: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        from cps.training.cuda.norms import RunningStatistics, normalize  # Triton comes only with GPU builds of torch

        running, counters = RunningStatistics(*layer.running_statistics()), layer.counters
        done = normalize(signal, weight, bias, running, counters, layer.eps, shortcut=shortcut, has_relu=has_relu)
        ctx.counters, ctx.has_shortcut, ctx.has_relu = counters, shortcut is not None, has_relu
        # The backward pass reads the result only after a shortcut and a ReLU; otherwise it need not be kept.
        result = done.result if ctx.has_shortcut and has_relu else signal
        ctx.save_for_backward(result, done.mean, done.scale, signal, weight, bias)
        return (done.result, done.result.view_as(done.result)) if is_twice else done.result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        from cps.training.cuda.norms import Normalized, normalize_backward

        *done, signal, weight, bias = ctx.saved_tensors
        signal_gradient, weight_gradient, bias_gradient, shortcut_gradient = normalize_backward(
            [gradient.contiguous(memory_format=torch.channels_last) for gradient in gradients],
            Normalized(*done),
            signal,
            weight,
            bias,
            ctx.counters,
            has_shortcut=ctx.has_shortcut,
            has_relu=ctx.has_relu,
        )
        return signal_gradient, shortcut_gradient, weight_gradient, bias_gradient, None, None, None
