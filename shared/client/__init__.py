"""A client of the public gRPC API, for threads (`Client`) and for asyncio (`AsyncClient`).

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate(messages=[{"role": "user", "content": "Hello!"}]):
            print(chunk.text, end="", flush=True)

A stream whose connection breaks goes on by itself, without repeating or skipping a token: it attaches
again, and where the request is not known any more, submits the rest anew from what it has received.
Needs grpcio and protobuf only.
"""

from quartet.shared.client.async_client import AsyncClient, AsyncGeneration
from quartet.shared.client.client import Client, Generation
from quartet.shared.client.state import Chunk, InferenceError, Usage

__all__ = ["AsyncClient", "AsyncGeneration", "Chunk", "Client", "Generation", "InferenceError", "Usage"]
