"""The published claims of paged attention, measured on this machine: see __main__."""
