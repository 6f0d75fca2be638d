"""What holds for a Keras model on every backend."""
