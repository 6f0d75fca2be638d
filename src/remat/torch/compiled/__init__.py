"""``torch.compile`` within a budget: AOTAutograd's joint graph of forward and backward pass, parted for Inductor.

Read in this order: ``partition`` plans a joint graph and parts it, ``joint_graph`` and ``joint_nodes`` make the graph
for the planner, ``inductor_peak`` asks Inductor what the parts need. ``_inductor`` holds Inductor's private symbols.
"""
