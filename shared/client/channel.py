"""How a client connects, and how it asks whether the server is ready."""

SERVICE = "inference.v1.InferenceService"
RECONNECT_TIMEOUT = 60.0
MAX_MESSAGE_BYTES = 64 * 2**20
POLL_READY = 0.1

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # gRPC's own back-off grows to minutes, longer than a restart takes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
# HealthCheckRequest(service=SERVICE) and HealthCheckResponse(status=SERVING), which need no generated code.
HEALTH_REQUEST = b"\x0a" + bytes([len(SERVICE)]) + SERVICE.encode()
HEALTH_SERVING = b"\x08\x01"
