"""The planners themselves, one strategy a file, named as the literature names the method."""
