"""What a planner sees of a graph: storages, uses and gaps instead of tensors and ops."""
