"""Groups: images that are assumed to share a task. Each image has a group number, from 0."""

import torch
from torch import Tensor


def consecutive_groups(images: int, group_size: int, device: torch.device | None = None) -> Tensor:
    """Return the group of each image if every `group_size` consecutive images share a task."""
    is_integer = hasattr(group_size, "__index__") or (isinstance(group_size, float) and group_size.is_integer())
    if not is_integer or group_size < 1:
        raise ValueError(f"group_size must be an integer, 1 or more, got {group_size!r}")
    return torch.arange(images, device=device) // int(group_size)


def number_of_groups(groups: Tensor) -> int:
    """Return the number of groups."""
    return int(groups.max()) + 1


def mean_by_group(values: Tensor, groups: Tensor) -> Tensor:
    """Return the mean of the rows of each group, shape (groups, ...)."""
    if torch.equal(groups.cpu(), torch.arange(len(groups))):  # groups of one
        return values
    number, groups = number_of_groups(groups), groups.to(values.device)
    sums = values.new_zeros(number, *values.shape[1:])
    if values.is_cuda:  # deterministic there, unlike index_add_
        sums.index_put_((groups,), values, accumulate=True)
    else:
        sums.index_add_(0, groups, values)
    sizes = torch.bincount(groups, minlength=number)
    return sums / sizes.reshape(-1, *(1 for _ in values.shape[1:]))
