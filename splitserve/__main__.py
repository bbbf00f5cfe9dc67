"""`python -m splitserve` is `splitserve`."""

from splitserve.cli import main

main()
