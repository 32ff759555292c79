"""`python -m sferic` is the `sferic` program."""

from sferic.cli import main

main()
