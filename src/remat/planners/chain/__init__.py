"""A step as a chain of blocks: the blocks, what each can do, and the dynamic programme over them."""
