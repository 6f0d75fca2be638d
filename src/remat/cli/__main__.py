"""``python -m remat.cli`` does what the ``remat`` script does."""

from remat.cli import main

main()
