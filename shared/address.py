"""Where services listen unless they are told otherwise."""

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_HTTP_ADDRESS = "127.0.0.1:8000"
# The gateway's are on its HTTP address.
DEFAULT_TOKENIZER_METRICS = "127.0.0.1:9120"
DEFAULT_SCHEDULER_METRICS = "127.0.0.1:9130"
DEFAULT_EXECUTOR_METRICS = "127.0.0.1:9140"


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of host:port or [v6 address]:port. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ValueError(f"must be host:port or [v6 address]:port, got {address!r}")
    return host.strip("[]"), int(port)


def check_metrics_address(address: str) -> None:
    """Raises ValueError that names the setting; "" is no address and right."""
    if address:
        try:
            split_address(address)
        except ValueError as error:
            raise ValueError(f"--metrics-address {error}") from None
