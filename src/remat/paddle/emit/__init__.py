"""A plan -> the program: rewritten in place."""
