"""What every framework's zoo shares: one process for each model, measuring in turns, results on disk, tables."""
