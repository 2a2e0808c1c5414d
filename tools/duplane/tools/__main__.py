"""`python -m duplane.tools` is the `duplane` command."""

from duplane.tools.main import main

main()
