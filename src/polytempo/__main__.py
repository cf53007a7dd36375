"""`python -m polytempo` is the command `polytempo`."""

from polytempo.cli.main import main

main()
