"""Loops planned inside: what the forward body keeps for the backward pass, and what the backward body makes again."""
