"""Other servers on this machine, measured beside Quartet: `python -m bench.peers`; see README.md."""
