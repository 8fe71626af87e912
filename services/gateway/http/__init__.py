"""OpenAI's HTTP API over the stream table."""
