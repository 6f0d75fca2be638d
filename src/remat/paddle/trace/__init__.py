"""A program -> a graph: its operators, the sizes of its values, what may repeat."""
