"""The four services and the command line. A service imports `quartet.shared` and itself, nothing else."""
