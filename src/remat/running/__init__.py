"""Steps that run: workloads, their comparison, calibrations, the machine, fresh processes."""
