"""What the services have in common: the wire protocol, links, the ledger, settings, logs."""
