"""What the services have in common: the wire protocol, a kit that checks it, links, settings, logs, the client."""
