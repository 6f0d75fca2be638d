"""A training step -> Graph.

Read in this order: ``fake_step`` runs the step on fake tensors, ``watcher`` sees its operators, ``gradients`` what
becomes of gradients, ``recording`` holds what was seen, ``trace`` makes the graph of it. ``origins`` says where in the
model an operator comes from; ``op_facts``, ``cpu_scratch`` and ``onednn_scratch`` know PyTorch's operators, and
``cpu_trials`` and ``gpu_scratch`` run one where nothing is known.
"""
