"""The `quartet` command: spawns the services and imports none of them."""
