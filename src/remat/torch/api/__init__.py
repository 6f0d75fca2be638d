"""What a user of PyTorch calls: ``plan``, ``apply``, ``limit_memory``, ``compile``."""
