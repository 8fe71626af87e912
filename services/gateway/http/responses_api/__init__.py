"""/v1/responses in OpenAI's form."""
