"""What a user of TensorFlow calls in place of the framework's own functions."""
