"""Measurements that print JSON. Run them with nothing else running; quote medians and ratios."""
