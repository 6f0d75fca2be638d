"""Graph mode: a plan's schedule written out as two straight Python functions, one for each pass.

Read in this order: ``capture`` gets the joint graph of AOTAutograd, with the operators that eager PyTorch runs
(``recurrent`` for an LSTM); ``nodes`` says what is in it; ``joint_step`` makes the graph for the planner; ``candidate``
plans it; ``program`` writes the schedule as a forward and a backward graph; ``source`` makes Python functions of both,
and ``calls`` knows how each operator is called at least cost. For slices, ``separable_joint`` is the joint graph as the
search for regions sees it, ``separable_ops`` the table of operators, and ``split_joint`` writes them. ``data_parallel``
leaves the reducer outside. ``_aot`` holds the private symbols of AOTAutograd and Dynamo.
"""
