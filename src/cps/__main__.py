"""`python -m cps` is the command `cps`."""

from cps.cli import main

main()
