"""A JAX function -> a program of instructions -> Graph."""
