"""Optional packages, which the extras of the distribution install."""

from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Return True if a package can be imported, without importing it."""
    return find_spec(package) is not None


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra."""
    return f'pip install "continual-prune-and-select[{extra}]"'
