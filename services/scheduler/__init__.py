"""Owns queues, block tables, prefix hashes and the step plan; knows nothing of text or tensors."""
