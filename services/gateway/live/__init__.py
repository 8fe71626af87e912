"""What happens on the line, for those who look: one account of it, and each viewer's place in that."""
