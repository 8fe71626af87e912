"""`quartet bench`: load on a running server, this one or another, in the field's terms."""
