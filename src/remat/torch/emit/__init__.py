"""How an eager plan is carried out: its order, its recipes, and when they run."""
