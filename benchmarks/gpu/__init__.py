"""What remat does on a GPU, in one command; ``python -m benchmarks.gpu --help``."""
