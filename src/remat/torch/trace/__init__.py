"""A training step -> Graph.

Read in this order: ``fake_step`` runs the step on fake tensors, ``watcher`` sees its operators, ``recording`` holds
what was seen, ``trace`` makes the graph of it. ``op_facts`` and ``cpu_scratch`` know PyTorch's operators.
"""
