"""Linear and integer models for HiGHS: schedules from their solutions, bounds from their multipliers."""
