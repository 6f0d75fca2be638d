"""The real peak of a schedule: what TensorFlow's allocator or XLA makes of it."""
