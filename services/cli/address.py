"""Where clients find the gateway."""

DEFAULT_ADDRESS = "127.0.0.1:50051"
