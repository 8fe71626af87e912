"""/v1/messages in Anthropic's form."""
