"""A plan -> the function, evaluated in the plan's order, recomputations held back."""
