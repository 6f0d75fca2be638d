"""A plan -> the function that is being traced, rewritten in place."""
